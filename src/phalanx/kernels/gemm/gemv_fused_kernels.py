# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMV with a fused epilogue on pairs of its outputs: SiLU of the gate, or RoPE and the KV cache; it saves a launch.

    gate, up = output[i], output[I + i]
    out[i] = round(round(silu(gate)) * up)                                              see `ops.silu_and_mul`

    first, second = output[h * D + i], output[h * D + D / 2 + i]
    queries, keys and values of head h, rotated and stored                              see `ops.rope_kv_cache`

Outputs are those of `gemv` and `gemv_fp8`, with the same bits where a program has as many columns and warps as theirs; they are
rounded before the epilogue, as if another kernel read them. The delta of an adapter is added before that, by more programs of the
same launch: see `adapters.gemv_delta`. Rows SPAN apart are a pair, and 2 * SPAN rows contain the pairs of each
other: all rows, or a head's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.adapters.gemv_delta import add_delta, factors_of, programs_of_sums, publish_sums, words_of
from phalanx.kernels.adapters.rows import GemvDelta
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.gemv import row_sums, tile
from phalanx.kernels.gemm.gemv_fp8 import row_sums_fp8
from phalanx.kernels.gemm.heuristics import FusedGemvTiling
from phalanx.kernels.ops.rope_kv_cache import rotate_and_store
from phalanx.kernels.ops.silu_and_mul import silu_mul_rounded
from phalanx.kernels.scaled_tensors import GemvArgs
from phalanx.kernels.vectors import nearest

NO_DELTA = (None,) * len(GemvDelta._fields)
WITH_DELTA_REGISTERS = 64
"""Of a thread, so that a multiprocessor has as many programs as without a delta."""


@triton.jit
def _gemv_pairs(
    x, x_scale, weight, scale, bias, pairs, adapter, like, SPAN: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
    QUANTIZE: tl.constexpr, STATIC: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The GEMV of these kernels: a program's pairs of outputs: their numbers [PAIRS], two of [PAIRS] in the dtype of `like`. scale:
    None for a weight in 16 bit. bias: [rows], added before the rounding, or None. adapter: see `GemvDelta`; the first programs,
    which compute its sums, have no pairs. The rest: see `row_sums_fp8`."""
    program = tl.program_id(0)
    if adapter[0] is not None:
        program -= programs_of_sums(adapter, 2 * PAIRS)
    side = tl.arange(0, 2 * PAIRS)
    pair = program * PAIRS + side // 2
    valid = pair < pairs
    row = pair // SPAN * (2 * SPAN) + pair % SPAN + side % 2 * SPAN
    column, inside, place, next_values = tile(weight, row, valid, COLUMNS, BLOCK)
    if scale is not None:
        row_scale = tl.load(scale + row, valid, 0.0)
    if bias is not None:
        added = tl.load(bias + row, valid, 0.0).to(tl.float32)
    if adapter[0] is not None:
        part, rank, place_b, factors = factors_of(adapter, row, valid, 2 * pairs)
    if SM >= 90:
        gdc_wait()
    if adapter[0] is not None:
        words = words_of(adapter, part, rank, 0)
    if scale is not None:
        sums = row_sums_fp8(
            x, x_scale, column, inside, place, next_values, COLUMNS, PADDED, QUANTIZE, STATIC, 2 * PAIRS, BLOCK, SM
        )  # fmt: skip
        total = sums * row_scale
    else:
        total = row_sums(x, column, inside, place, next_values, COLUMNS, 2 * PAIRS, BLOCK)
    if bias is not None:
        total += added
    if adapter[0] is not None:
        total = add_delta(total, words, factors, adapter, part, rank, place_b)
    first, second = tl.split(tl.reshape(nearest(total, tl.zeros([2 * PAIRS], like), SM), [PAIRS, 2]))
    return program * PAIRS + tl.arange(0, PAIRS), first, second


@triton.jit
def _gate_up_silu(
    x, x_scale, weight, scale, bias, pairs, a, b, sums, part_of, tiles, ranks, step, parts, room, out, SPAN: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, QUANTIZE: tl.constexpr, STATIC: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
    adapter = (a, b, sums, part_of, tiles, ranks, step, parts, room)
    if a is not None:  # noqa: SIM102, this one is decided when it is compiled
        if tl.program_id(0) < programs_of_sums(adapter, 2 * PAIRS):
            publish_sums(x, adapter, COLUMNS, 2 * PAIRS, BLOCK, SM)
            return
    like: tl.constexpr = out.dtype.element_ty
    pair, gate, up = _gemv_pairs(
        x, x_scale, weight, scale, bias, pairs, adapter, like, SPAN, COLUMNS, PADDED, QUANTIZE, STATIC, PAIRS, BLOCK, SM
    )  # fmt: skip
    tl.store(out + pair, silu_mul_rounded(gate, up, SM), pair < pairs)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _qkv_rope_store(
    x, x_scale, weight, scale, bias, pairs, a, b, sums, part_of, tiles, ranks, step, parts, room, cos, sin, query, key_cache,
    value_cache, slots, q_heads, kv_heads, key_inverse, value_inverse, FP8_CACHE: tl.constexpr, SPAN: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, QUANTIZE: tl.constexpr, STATIC: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
    adapter = (a, b, sums, part_of, tiles, ranks, step, parts, room)
    if a is not None:  # noqa: SIM102, this one is decided when it is compiled
        if tl.program_id(0) < programs_of_sums(adapter, 2 * PAIRS):
            publish_sums(x, adapter, COLUMNS, 2 * PAIRS, BLOCK, SM)
            return
    like: tl.constexpr = query.dtype.element_ty
    pair, first, second = _gemv_pairs(
        x, x_scale, weight, scale, bias, pairs, adapter, like, SPAN, COLUMNS, PADDED, QUANTIZE, STATIC, PAIRS, BLOCK, SM
    )  # fmt: skip
    inside = pair < pairs
    head, pair = pair // SPAN, pair % SPAN
    c, s = tl.load(cos + pair, inside, 0.0), tl.load(sin + pair, inside, 0.0)
    rotate_and_store(
        first, second, first.to(tl.float32), second.to(tl.float32), c, s, 0, head, pair, inside, query, key_cache, value_cache,
        None, slots, q_heads, kv_heads, SPAN, key_inverse, value_inverse, 0, FP8_CACHE, SM,
    )  # fmt: skip


def _launch(kernel: Any, args: GemvArgs, span: int, tiling: FusedGemvTiling, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel: `arguments` and `constants` come behind those that all these kernels have."""
    x, x_scale, weight, scale, bias, _, delta = args
    outputs, inputs = weight.shape
    sm = sm_arch(x.device)
    shrinks = 0 if delta is None else delta.programs(2 * tiling.pairs)
    kernel[(shrinks + triton.cdiv(outputs // 2, tiling.pairs),)](
        x, x_scale, weight, scale, bias, outputs // 2, *(delta or NO_DELTA), *arguments, SPAN=span, COLUMNS=inputs,
        PADDED=triton.next_power_of_2(inputs), QUANTIZE=scale is not None and x.dtype != weight.dtype, STATIC=x_scale is not None,
        PAIRS=tiling.pairs, BLOCK=tiling.block, SM=sm, num_warps=tiling.warps, launch_pdl=sm >= 90,
        maxnreg=None if delta is None else WITH_DELTA_REGISTERS, **constants,
    )  # fmt: skip


def gate_up_silu(args: GemvArgs, tiling: FusedGemvTiling) -> Tensor:
    """`reference.silu_mul` of x times weight [2 * I, in] -> [1, I] in args.dtype."""
    inner = args.weight.shape[0] // 2
    out = torch.empty((1, inner), dtype=args.dtype, device=args.x.device)
    _launch(_gate_up_silu, args, inner, tiling, out)
    return out


def qkv_rope_store(
    args: GemvArgs, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None, tiling: FusedGemvTiling,
) -> Tensor:  # fmt: skip
    """`reference.rope_store` of x times weight [(q_heads + 2 * kv_heads) * D, in] -> the queries [1, q_heads, D] in args.dtype. For
    contiguous tensors; caches in that dtype or e4m3."""
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
