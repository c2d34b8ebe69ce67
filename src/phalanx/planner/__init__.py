# SPDX-License-Identifier: Apache-2.0
"""What would run: the memory, time and cost of every layout of a model on a machine, without a GPU. No torch here."""
