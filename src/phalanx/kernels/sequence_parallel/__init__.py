# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel collectives in Triton: reduce-scatter, residual add, RMSNorm and quantization on each rank's own rows,
all-gather."""
