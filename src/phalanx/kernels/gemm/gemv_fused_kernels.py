# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""One row times pairs of a matrix's rows, with what a model does to each pair behind the product: a launch less.

    gate, up = product[i], product[I + i]
    out[i] = round(round(silu(gate)) * up)                                              see `between.silu_gate`

    first, second = product[h * D + i], product[h * D + D / 2 + i]
    queries, keys and values of head h, turned and stored                               see `between.rope_to_cache`

Products are those of `gemv` and `gemv_fp8`, the same bits where a program has as many columns and warps as theirs has; they
are rounded before they go on, as if another kernel read them. Rows SPAN apart are a pair, and 2 * SPAN rows hold the pairs among
them: all rows, or a head's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.gemv import row_sums, tile
from phalanx.kernels.gemm.gemv_fp8 import row_sums_fp8
from phalanx.kernels.gemm.heuristics import FusedGemvTiling
from phalanx.kernels.ops.rope_kv_cache import rotate_and_store
from phalanx.kernels.ops.silu_and_mul import gate_of
from phalanx.kernels.scaled_tensors import GemvArgs
from phalanx.kernels.vectors import nearest


@triton.jit
def _product(
    x, x_scale, weight, scale, bias, pairs, like, SPAN: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    QUANTIZE: tl.constexpr, GIVEN: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """How these kernels begin. A program's pairs [PAIRS] of x times the weight, in the dtype of `like`. scale: None for a weight in
    16 bit. bias: [rows], added before the rounding, or None. The rest: see `row_sums_fp8`."""
    if SM >= 90:
        gdc_launch_dependents()
    side = tl.arange(0, 2 * PAIRS)
    pair = tl.program_id(0) * PAIRS + side // 2
    there = pair < pairs
    row = pair // SPAN * (2 * SPAN) + pair % SPAN + side % 2 * SPAN
    column, inside, place, coming = tile(weight, row, there, COLUMNS, BLOCK)
    if scale is not None:
        row_scale = tl.load(scale + row, there, 0.0)
    if bias is not None:
        added = tl.load(bias + row, there, 0.0).to(tl.float32)
    if SM >= 90:
        gdc_wait()
    if scale is not None:
        sums = row_sums_fp8(
            x, x_scale, column, inside, place, coming, COLUMNS, WIDE, QUANTIZE, GIVEN, 2 * PAIRS, BLOCK, SM
        )  # fmt: skip
        total = sums * row_scale
    else:
        total = row_sums(x, column, inside, place, coming, COLUMNS, 2 * PAIRS, BLOCK)
    if bias is not None:
        total += added
    return tl.split(tl.reshape(nearest(total, tl.zeros([2 * PAIRS], like), SM), [PAIRS, 2]))


@triton.jit
def _gate_up_silu(
    x, x_scale, weight, scale, bias, pairs, out, SPAN: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    QUANTIZE: tl.constexpr, GIVEN: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    like: tl.constexpr = out.dtype.element_ty
    gate, up = _product(
        x, x_scale, weight, scale, bias, pairs, like, SPAN, COLUMNS, WIDE, QUANTIZE, GIVEN, PAIRS, BLOCK, SM
    )  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tl.store(out + pair, gate_of(gate, up, SM), pair < pairs)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _qkv_rope_store(
    x, x_scale, weight, scale, bias, pairs, cos, sin, query, key_cache, value_cache, slots, q_heads, kv_heads, key_inverse,
    value_inverse, FP8_CACHE: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, QUANTIZE: tl.constexpr,
    GIVEN: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    like: tl.constexpr = query.dtype.element_ty
    first, second = _product(
        x, x_scale, weight, scale, bias, pairs, like, SPAN, COLUMNS, WIDE, QUANTIZE, GIVEN, PAIRS, BLOCK, SM
    )  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    head, pair = pair // SPAN, pair % SPAN
    c, s = tl.load(cos + pair, inside, 0.0), tl.load(sin + pair, inside, 0.0)
    rotate_and_store(
        first, second, first.to(tl.float32), second.to(tl.float32), c, s, 0, head, pair, inside, query, key_cache, value_cache,
        slots, q_heads, kv_heads, SPAN, key_inverse, value_inverse, FP8_CACHE, SM,
    )  # fmt: skip


def _launch(kernel: Any, args: GemvArgs, span: int, tiling: FusedGemvTiling, *arguments: Any, **constants: Any) -> None:
    """For the arguments behind those that all these kernels have."""
    x, x_scale, weight, scale, bias, _ = args
    outputs, inputs = weight.shape
    sm = sm_arch(x.device)
    kernel[(triton.cdiv(outputs // 2, tiling.pairs),)](
        x, x_scale, weight, scale, bias, outputs // 2, *arguments, SPAN=span, COLUMNS=inputs,
        WIDE=triton.next_power_of_2(inputs), QUANTIZE=scale is not None and x.dtype != weight.dtype, GIVEN=x_scale is not None,
        PAIRS=tiling.pairs, BLOCK=tiling.block, SM=sm, num_warps=tiling.warps, launch_pdl=sm >= 90, **constants,
    )  # fmt: skip


def gate_up_silu(args: GemvArgs, tiling: FusedGemvTiling) -> Tensor:
    """`reference.silu_mul` of the product of x and weight [2 * I, in] -> [1, I] in the product's dtype."""
    inner = args.weight.shape[0] // 2
    out = torch.empty((1, inner), dtype=args.dtype, device=args.x.device)
    _launch(_gate_up_silu, args, inner, tiling, out)
    return out


def qkv_rope_store(
    args: GemvArgs, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None, tiling: FusedGemvTiling,
) -> Tensor:  # fmt: skip
    """`reference.rope_store` of the product of x and weight [(q_heads + 2 * kv_heads) * D, in] -> the queries [1, q_heads, D] in
    the product's dtype. For contiguous tensors; caches in that dtype or e4m3."""
    head_dim = 2 * cos.shape[1]
    heads = args.weight.shape[0] // head_dim
    query = torch.empty((1, q_heads, head_dim), dtype=args.dtype, device=args.x.device)
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    key_scale, value_scale = kv_scales or (1.0, 1.0)
    caches = [cache.view(torch.uint8) if fp8 else cache for cache in (key_cache, value_cache)]
    _launch(
        _qkv_rope_store, args, head_dim // 2, tiling, cos, sin, query, *caches, slots, q_heads, (heads - q_heads) // 2,
        1.0 / key_scale, 1.0 / value_scale, FP8_CACHE=fp8,
    )  # fmt: skip
    return query
