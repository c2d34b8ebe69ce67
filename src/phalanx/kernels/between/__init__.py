# SPDX-License-Identifier: Apache-2.0
"""Which code runs what lies between a layer's matrix products: the Triton kernels on GPUs, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.norms import triton_is_here

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _kernel_takes(x: Tensor) -> bool:
    return x.is_cuda and x.is_contiguous() and x.dtype in _FLOATS and triton_is_here()


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if _kernel_takes(gate_up) and gate_up.dim() == 2:
        from phalanx.kernels.between.silu_gate import silu_mul as kernel

        return kernel(gate_up)
    return reference.silu_mul(gate_up)


def silu_mul_quant_fp8(gate_up: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.silu_mul_quant_fp8`."""
    if _kernel_takes(gate_up) and gate_up.dim() == 2:
        from phalanx.kernels.between.silu_gate import silu_mul_quant_fp8 as kernel

        return kernel(gate_up, scale)
    return reference.silu_mul_quant_fp8(gate_up, scale)


def rope_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.rope_store`."""
    if _kernel_takes(qkv) and key_cache.is_contiguous() and value_cache.is_contiguous():
        from phalanx.kernels.between.rope_to_cache import rope_store as kernel

        return kernel(qkv, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales)
    return reference.rope_store(qkv, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales)
