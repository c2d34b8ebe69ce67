# SPDX-License-Identifier: Apache-2.0
"""How one GPU computes: one op per file; `reference` has every op again in plain torch.

The names here pick the kernel for the tensor's device; importing this room loads no Triton.
"""

from phalanx.kernels.between import rms_norm, rope_store, silu_mul
from phalanx.kernels.norms import residual_rms_norm_quant
from phalanx.kernels.products import linear
from phalanx.kernels.reference import dequantize, quantize_nvfp4, rope, write_kv
from phalanx.kernels.scaled_mm import quantize_fp8, scaled_mm, silu_mul_quant_fp8

__all__ = [
    "dequantize",
    "linear",
    "quantize_fp8",
    "quantize_nvfp4",
    "residual_rms_norm_quant",
    "rms_norm",
    "rope",
    "rope_store",
    "scaled_mm",
    "silu_mul",
    "silu_mul_quant_fp8",
    "write_kv",
]
