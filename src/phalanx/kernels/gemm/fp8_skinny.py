# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Skinny GEMM in e4m3 on Hopper: a few tokens, stream-K over the tiles of the weight, which overlaps the kernel before it.

    out[t, n] = round(sum over k of x[t, k] * weight[n, k])                             in fp32, rounded once

A program fills its shared memory with its first tiles of the weight before it waits for the kernel before it, since no kernel
writes weights; after that it waits for x alone. Weights are the rows of the tensor cores' GEMM and tokens its columns, which come
in multiples of 8.

The weight's tiles [ROWS, DEPTH], numbered along its rows of tiles, are divided evenly over the programs: each has a run of them,
and a row of tiles may belong to several programs. Each of those leaves its sums in fp32, and the last one to do so adds all up in
the order of the programs: the same bits whichever is the last, and no program waits for another."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.gemm.counters import counters
from phalanx.kernels.gemm.heuristics import SkinnyTiling
from phalanx.kernels.gluon_names import thread_barrier

ALIGNMENT = 16
"""Rows that the tensor memory accelerator reads begin on multiples of this many bytes."""
MAX_TOKENS = 256
"""Tokens that one GEMM takes: the columns of an instruction."""


@gluon.jit
def _tile_begin(unit, KT: gl.constexpr, DEPTH: gl.constexpr):
    """Where the tile `unit` begins: (row of tiles, column)."""
    row = unit // KT
    return row, (unit - row * KT) * DEPTH


@gluon.jit
def _load_weight(weight, ring, bar, stage, unit, KT: gl.constexpr, go, BYTES: gl.constexpr):
    """Start loading the tile `unit` of the weight; `bar` then waits for BYTES, which include x's tile."""
    row, column = _tile_begin(unit, KT, ring.shape[2])
    mbarrier.expect(bar.index(stage), BYTES, pred=go)
    tma.async_copy_global_to_shared(weight, [row * ring.shape[1], column], bar.index(stage), ring.index(stage), pred=go)


@gluon.jit
def _load_x(x, ring, bar, stage, unit, KT: gl.constexpr, go):
    _, column = _tile_begin(unit, KT, ring.shape[2])
    tma.async_copy_global_to_shared(x, [0, column], bar.index(stage), ring.index(stage), pred=go)


@gluon.jit
def _total(parts, place, begin, end, SIZE: gl.constexpr, AT_ONCE: gl.constexpr):
    """The sums that the programs begin .. end - 1 left of a row of tiles, added up in their order; AT_ONCE loads are in flight."""
    total = gl.load(parts + (2 * begin + 1).to(gl.int64) * SIZE + place, cache_modifier=".cg")
    for first in range(begin + 1, end, AT_ONCE):
        loaded = ()
        for j in gl.static_range(AT_ONCE):
            valid = (place < SIZE) & (first + j < end)
            loaded = loaded + (gl.load(parts + (2 * (first + j)).to(gl.int64) * SIZE + place, valid, 0.0, cache_modifier=".cg"),)
        for j in gl.static_range(AT_ONCE):
            total += loaded[j]
    return total


@gluon.jit
def _store(out, total, row, outputs, tokens, row_scale, column_scale, STORED: gl.constexpr):
    """total [ROWS, TOKENS] -> out [tokens, outputs] from the column `row` on, scaled where there are scales, in the layout
    STORED."""
    ROWS: gl.constexpr = total.shape[0]
    TOKENS: gl.constexpr = total.shape[1]
    if row_scale is not None:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, total.type.layout))
        columns = gl.arange(0, TOKENS, gl.SliceLayout(0, total.type.layout))
        by_token = gl.load(row_scale + columns, columns < tokens, 0.0)
        by_row = gl.load(column_scale + rows, rows < outputs, 0.0)
        total = total * by_token[None, :] * by_row[:, None]
    rounded = gl.convert_layout(total.to(out.dtype.element_ty), STORED)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
    columns = gl.arange(0, TOKENS, gl.SliceLayout(0, STORED))
    inside = (rows < outputs)[:, None] & (columns < tokens)[None, :]
    gl.store(out + columns.to(gl.int64)[None, :] * outputs + rows[:, None], rounded, inside)


@gluon.jit
def _combine(
    total, tile, units, parts, arrivals, place, out, outputs, tokens, row_scale, column_scale,
    KT: gl.constexpr, STORED: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Leave this program's sums of a row of tiles; the last program to do so adds all up and stores them."""
    SIZE: gl.constexpr = total.shape[0] * total.shape[1]
    program, programs = gl.program_id(0), gl.num_programs(0)
    first_program, end_program = ((tile * KT + 1) * programs - 1) // units, ((tile + 1) * KT * programs - 1) // units + 1
    slot = 2 * program + (program == first_program).to(gl.int32)
    gl.store(parts + slot.to(gl.int64) * SIZE + place, total)
    thread_barrier()
    if gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == end_program - first_program - 1:
        gl.store(arrivals + tile, 0)
        combined = _total(parts, place, first_program, end_program, SIZE, AT_ONCE)
        _store(out, combined, tile * total.shape[0], outputs, tokens, row_scale, column_scale, STORED)


@gluon.jit(do_not_specialize=["tokens", "units"])
def _fp8_skinny(
    x, weight, out, row_scale, column_scale, parts, arrivals, tokens, outputs, units, KT: gl.constexpr, STAGES: gl.constexpr,
    SUMS: gl.constexpr, STORED: gl.constexpr, AT_ONCE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    ROWS: gl.constexpr = weight.block_type.shape[0]
    TOKENS: gl.constexpr = x.block_type.shape[0]
    DEPTH: gl.constexpr = x.block_type.shape[1]
    BYTES: gl.constexpr = (ROWS + TOKENS) * DEPTH
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, DEPTH], weight.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES + 1):
        mbarrier.init(bar.index(stage), count=1)
    fence_async_shared()
    thread_barrier()

    program, programs = gl.program_id(0), gl.num_programs(0)
    first, last = program * units // programs, (program + 1) * units // programs
    for stage in gl.static_range(STAGES):
        _load_weight(weight, tiles, bar, stage, first + stage, KT, first + stage < last, BYTES)
    # A tile beyond the last token: nothing is read, but x's descriptor is in the cache when it is needed.
    mbarrier.expect(bar.index(STAGES), TOKENS * DEPTH)
    tma.async_copy_global_to_shared(x, [TOKENS, 0], bar.index(STAGES), inputs.index(0))
    mbarrier.wait(bar.index(STAGES), 0)
    gdc_wait()
    for stage in gl.static_range(STAGES):
        _load_x(x, inputs, bar, stage, first + stage, KT, first + stage < last)

    rows, columns = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
    place = rows[:, None] * TOKENS + columns[None, :]
    stage, phase, before = 0, 0, 0
    for tile in range(first // KT, (last - 1) // KT + 1):
        begin, end = gl.maximum(first, tile * KT), gl.minimum(last, (tile + 1) * KT)
        sums = gl.zeros([ROWS, TOKENS], gl.float32, SUMS)
        for unit in range(begin, end):
            mbarrier.wait(bar.index(stage), phase)
            sums = warpgroup_mma(tiles.index(stage), inputs.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            # The tensor cores' instruction before this one is done, by all warps, behind the barrier. Its tiles may be overwritten.
            thread_barrier()
            ahead = unit - 1 + STAGES
            go = (unit > first) & (ahead < last)
            _load_weight(weight, tiles, bar, before, ahead, KT, go, BYTES)
            _load_x(x, inputs, bar, before, ahead, KT, go)
            before = stage
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        total = warpgroup_mma_wait(0, deps=(sums,))
        if SHARED and end - begin < KT:
            _combine(
                total, tile, units, parts, arrivals, place, out, outputs, tokens, row_scale, column_scale, KT, STORED, AT_ONCE
            )  # fmt: skip
        else:
            _store(out, total, tile * ROWS, outputs, tokens, row_scale, column_scale, STORED)


def _powers(first: int, end: int) -> list[int]:
    return [first << j for j in range((end // first).bit_length() - 1)]


@cache
def layouts(rows: int, tokens: int, warps: int) -> tuple[gl.NVMMADistributedLayout, gl.DistributedLayout]:
    """Two layouts of sums [rows, tokens]: as the tensor cores leave them, and as they are stored, 8 rows of a token in each thread.

    From 16 tokens on, the two differ within warps only.
    """
    sums = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, tokens, 32])
    if tokens < 16:
        return sums, sums
    registers = [[1, 0], [2, 0], [4, 0], *([0, t] for t in _powers(16, tokens)), *([r, 0] for r in _powers(16 * warps, rows))]
    lanes = [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]]
    return sums, gl.DistributedLinearLayout(registers, lanes, [[r, 0] for r in _powers(16, 16 * warps)], [], [rows, tokens])


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether `fp8_skinny_gemm` takes these: on Hopper, in e4m3, contiguous, up to `MAX_TOKENS` tokens, rows of a multiple of
    `ALIGNMENT` bytes."""
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.float8_e4m3fn
        and x.is_contiguous()
        and weight.is_contiguous()
        and 0 < x.shape[0] <= MAX_TOKENS
        and weight.shape[1] % ALIGNMENT == 0
        and weight.shape[1] > 0
        and weight.shape[0] > 0
        and x.data_ptr() % ALIGNMENT == weight.data_ptr() % ALIGNMENT == 0
        and sm_arch(x.device) == 90
    )


def fp8_skinny_gemm(
    x: Tensor, weight: Tensor, tiling: SkinnyTiling, scales: tuple[Tensor, Tensor] | None = None, *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """x [T, in] times weight [out, in], for operands that `supports` admits -> [T, out] in `dtype`.

    scales: fp32, one for each token [T] or [T, 1] and one for each of the weight's rows [out]; applied in fp32 before the rounding.
    Two GEMMs with one weight must not run at the same time: they use the same counters.
    """
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    columns = heuristics.tile_tokens(tokens)
    depth = heuristics.TILE_K
    tile_rows, tile_columns = triton.cdiv(outputs, tiling.rows), triton.cdiv(inputs, depth)
    sums, stored = layouts(tiling.rows, columns, tiling.warps)
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=depth, element_bitwidth=8, rank=2)
    shared = tile_rows * tile_columns % tiling.programs != 0 or tile_rows * tile_columns // tiling.programs % tile_columns != 0
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    parts, arrivals = out, out
    if shared:
        parts = torch.empty(2 * tiling.programs * tiling.rows * columns, dtype=torch.float32, device=x.device)
        arrivals = counters(x.device).of(weight.data_ptr(), tile_rows)
    by_token, by_row = scales or (None, None)
    each = tiling.rows * columns // (32 * tiling.warps)
    _fp8_skinny[(tiling.programs,)](
        TensorDescriptor(x, [tokens, inputs], [inputs, 1], [columns, depth], swizzled),
        TensorDescriptor(weight, [outputs, inputs], [inputs, 1], [tiling.rows, depth], swizzled),
        out, by_token, by_row, parts, arrivals, tokens, outputs, tile_rows * tile_columns, KT=tile_columns, STAGES=tiling.stages,
        SUMS=sums, STORED=stored, AT_ONCE=max(1, min(4, 128 // each)), SHARED=shared, num_warps=tiling.warps, launch_pdl=True,
    )  # fmt: skip
    return out
