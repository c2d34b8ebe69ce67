# SPDX-License-Identifier: Apache-2.0
"""What adapters add to the output of a linear layer: rows of several adapters, and rows of none, in one batch."""
