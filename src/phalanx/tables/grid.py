# SPDX-License-Identifier: Apache-2.0
"""The axes of a benchmark and of TensorRT-LLM's look-up table: stated here and nowhere else."""

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
"""A fusion's place in the look-up table is its index here, not its number."""

WIDE_TOKENS = tuple(2**power for power in range(21))
WIDE_HIDDEN = (*HIDDEN, 16384)
"""Beyond the look-up table, for our own: a CSV may hold these without a sidecar that names them."""
