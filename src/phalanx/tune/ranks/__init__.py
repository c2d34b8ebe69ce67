# SPDX-License-Identifier: Apache-2.0
"""The ranks of a benchmark: their processes, their candidates, and how they verify and time them. Only here is torch imported."""
