# SPDX-License-Identifier: Apache-2.0
"""Kernels of a group in which each row belongs to one rank."""
