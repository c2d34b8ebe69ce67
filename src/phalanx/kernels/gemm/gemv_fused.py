# SPDX-License-Identifier: Apache-2.0
"""One token's products together with what follows them, a launch less each; where no kernel takes the factors, they say so, and the
product and what follows are two calls."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.norms import triton_is_here
from phalanx.kernels.products import choice
from phalanx.kernels.products.factors import Factors
from phalanx.kernels.scaled_mm import FP8, has_fp8_kernels


def gate_up_silu(factors: Factors) -> Tensor | None:
    """silu(gate) * up of the product [1, 2 * I], as `between.silu_mul` -> [1, I]. None: use that."""
    tiling = tiling_of(factors)
    if tiling is None:
        return None
    from phalanx.kernels.products.pairs import gate_up_silu as kernel

    return kernel(factors, tiling)


def qkv_rope_store(
    factors: Factors, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None,
) -> Tensor | None:  # fmt: skip
    """The queries [1, q_heads, D] of the product [1, (q_heads + 2 * kv_heads) * D], whose keys and values are stored, as by
    `between.rope_store`. None: use that; nothing has been stored."""
    tiling = tiling_of(factors)
    if tiling is None or not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        return None
    from phalanx.kernels.products.pairs import qkv_rope_store as kernel

    return kernel(factors, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales, tiling)


def tiling_of(factors: Factors) -> choice.Pairs | None:
    """How a kernel cuts the weight; None where no kernel takes the factors."""
    x, weight = factors.x, factors.weight
    if x.shape[0] != 1 or not x.is_cuda or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    if factors.scale is not None:
        return choice.pairs(1, weight.shape[1], fp8=True, quantized=x.dtype == FP8) if has_fp8_kernels(x.device) else None
    known = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and weight.shape[1] % 8 == 0
    return choice.pairs(1, weight.shape[1], fp8=False) if known and triton_is_here() else None
