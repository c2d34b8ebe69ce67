# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that sum a tensor over the GPUs of one host through peer memory, and the signals that they share."""
