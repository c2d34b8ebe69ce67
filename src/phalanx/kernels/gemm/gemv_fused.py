# SPDX-License-Identifier: Apache-2.0
"""GEMV of one token fused with the op behind it, which saves a launch. Where no kernel takes the operands, the result is None, and
the caller runs the GEMM and the op."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.capabilities import has_fp8_kernels, has_triton
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.scaled_tensors import FP8, GemvArgs


def gate_up_silu(args: GemvArgs) -> Tensor | None:
    """`kernels.silu_mul` of the GEMV's output [1, 2 * I] -> [1, I]. None: call that."""
    tiling = _select(args)
    if tiling is None:
        return None
    from phalanx.kernels.gemm.gemv_fused_kernels import gate_up_silu as kernel

    return kernel(args, tiling)


def qkv_rope_store(
    args: GemvArgs, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None,
) -> Tensor | None:  # fmt: skip
    """`kernels.rope_store` of the GEMV's output [1, (q_heads + 2 * kv_heads) * D]: the queries [1, q_heads, D]; keys and values are
    stored. None: call that; nothing has been stored."""
    tiling = _select(args)
    if tiling is None or not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        return None
    from phalanx.kernels.gemm.gemv_fused_kernels import qkv_rope_store as kernel

    return kernel(args, cos, sin, key_cache, value_cache, slots, q_heads, kv_scales, tiling)


def _select(args: GemvArgs) -> heuristics.FusedGemvTiling | None:
    """How a kernel tiles the weight; None where no kernel takes the operands."""
    x, weight = args.x, args.weight
    if x.shape[0] != 1 or not x.is_cuda or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    inputs = weight.shape[1]
    if args.scale is not None:
        assert args.delta is None, "adapters multiply activations in 16 bit"
        return heuristics.select_fused_gemv(1, inputs, fp8=True, quantized=x.dtype == FP8) if has_fp8_kernels(x.device) else None
    known = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and inputs % 8 == 0
    return heuristics.select_fused_gemv(1, inputs, fp8=False) if known and has_triton() else None
