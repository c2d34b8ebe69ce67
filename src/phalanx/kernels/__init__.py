# SPDX-License-Identifier: Apache-2.0
"""How one GPU computes: one op per file, and `reference` with every op in plain torch.

The functions here pick the kernel for the tensors' device. Importing this package loads no Triton.
"""

from phalanx.kernels.gemm.linear import linear, linear_fp32
from phalanx.kernels.gemm.scaled_mm import scaled_mm
from phalanx.kernels.ops.dispatch import (
    embed,
    embed_norm,
    index_put_,
    latent_rope_store,
    quantize_fp8,
    residual_rms_norm_quant,
    rms_norm,
    rope_cos_sin,
    rope_store,
    silu_mul,
    silu_mul_quant_fp8,
)
from phalanx.kernels.reference import dequantize, quantize_nvfp4, rope, write_kv
from phalanx.kernels.warmup import warmup_row_counts, warmup_token_counts

__all__ = [
    "dequantize",
    "embed",
    "embed_norm",
    "index_put_",
    "latent_rope_store",
    "linear",
    "linear_fp32",
    "quantize_fp8",
    "quantize_nvfp4",
    "residual_rms_norm_quant",
    "rms_norm",
    "rope",
    "rope_cos_sin",
    "rope_store",
    "scaled_mm",
    "silu_mul",
    "silu_mul_quant_fp8",
    "warmup_token_counts",
    "warmup_row_counts",
    "write_kv",
]
