# SPDX-License-Identifier: Apache-2.0
"""The axes of a benchmark and of TensorRT-LLM's look-up table. The only place that states them."""

from __future__ import annotations

from phalanx.tables.message import Fusion

TOKENS = tuple(2**power for power in range(15))
HIDDEN = tuple(2**power for power in range(7, 14))
TP_SIZES = (2, 4, 8)
LOOKUP_FUSIONS = (
    Fusion.NONE,
    Fusion.RESIDUAL_RMS_NORM,
    Fusion.RESIDUAL_RMS_NORM_QUANT_FP8,
    Fusion.RESIDUAL_RMS_NORM_QUANT_NVFP4,
)
"""In the look-up table, a fusion's index is its index here, not its number."""

WIDE_TOKENS = tuple(2**power for power in range(21))
WIDE_HIDDEN = (*HIDDEN, 16384)
"""Larger axes than those of the look-up table, for tables of Phalanx: a CSV may hold these sizes without a sidecar."""
