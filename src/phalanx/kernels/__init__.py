# SPDX-License-Identifier: Apache-2.0
"""How one GPU computes: one op per file; `reference` has every op again in plain torch.

The names here pick the kernel for the tensor's device; importing this room loads no Triton.
"""

from phalanx.kernels.norms import residual_rms_norm, residual_rms_norm_quant
from phalanx.kernels.reference import quantize_fp8, quantize_nvfp4, rms_norm, rope, silu_mul, write_kv

__all__ = [
    "quantize_fp8",
    "quantize_nvfp4",
    "residual_rms_norm",
    "residual_rms_norm_quant",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]
