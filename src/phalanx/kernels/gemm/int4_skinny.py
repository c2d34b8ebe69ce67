# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Skinny GEMM with 4-bit integer weights on Hopper: a few tokens, stream-K over the tiles of the weight, as `fp8_skinny`.

    out[t, n] = round(sum over k of x[t, k] * round((q[n, k] - zero[n, k / group]) * scale[n, k / group]))

Tiles of the weight, its scales and x come to shared memory by the tensor memory accelerator. A thread loads 16 bytes of a row's
words, which hold what it has of the row in the tensor cores' instruction (`int4_packing.ORDER`), and widens them in registers: 32
columns at a time are an operand that needs no shared memory. The equivalent plain code is `int4_packing.dequantized` and a
product."""

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
from phalanx.kernels.gemm.counters import counters
from phalanx.kernels.gemm.fp8_skinny import _combine, _powers, _store
from phalanx.kernels.gemm.int4_gemm import widening
from phalanx.kernels.gemm.int4_heuristics import SkinnyInt4Tiling
from phalanx.kernels.gemm.int4_packing import BLOCK, TILE_COLUMNS, TILE_ROWS, Int4Weight
from phalanx.kernels.gluon_names import thread_barrier

MAX_TOKENS = 128
ALIGNMENT = 16
RUN = 256
"""Words of a row of what the accelerator takes a tile for: it takes no more in a row."""
GROUP_ROWS, COLUMNS, PIECES, WORDS = (
    gl.constexpr(TILE_ROWS),
    gl.constexpr(BLOCK),
    gl.constexpr(TILE_COLUMNS // BLOCK),
    gl.constexpr(RUN),
)


@gluon.jit
def _load_weight(
    words, scales, ring, scale_ring, bar, stage, unit, KT: gl.constexpr, PER: gl.constexpr, PLANES: gl.constexpr, go,
    BYTES: gl.constexpr,
):  # fmt: skip
    """Start loading the tile `unit` of the weight and its scales; `bar` then waits for BYTES, which include x's pieces."""
    ROWS: gl.constexpr = ring.shape[1]
    row = unit // KT
    step = unit - row * KT
    mbarrier.expect(bar.index(stage), BYTES, pred=go)
    TILES: gl.constexpr = ROWS // GROUP_ROWS
    LINES: gl.constexpr = GROUP_ROWS * COLUMNS // WORDS
    for tile in gl.static_range(TILES):
        part = ring.index(stage).slice(tile * GROUP_ROWS, GROUP_ROWS, 0)._reinterpret(words.dtype, [LINES, WORDS], words.layout)
        line = ((row * TILES + tile) * KT + step) * LINES
        tma.async_copy_global_to_shared(words, [line, 0], bar.index(stage), part, pred=go)
    for plane in gl.static_range(PLANES):
        part = scale_ring.index(stage * PLANES + plane)._reinterpret(scales.dtype, [1, ROWS], scales.layout)
        tma.async_copy_global_to_shared(scales, [step // PER * PLANES + plane, row * ROWS], bar.index(stage), part, pred=go)


@gluon.jit
def _load_x(x, ring, bar, stage, unit, KT: gl.constexpr, go):
    step = unit % KT
    for piece in gl.static_range(PIECES):
        column = (step * PIECES + piece) * COLUMNS
        tma.async_copy_global_to_shared(x, [0, column], bar.index(stage), ring.index(stage * PIECES + piece), pred=go)


@gluon.jit
def _operand(words, scale, offset, PLACE: gl.constexpr, BY_STEP: gl.constexpr, ZEROS: gl.constexpr, DTYPE: gl.constexpr):
    """words [ROWS, 32] int16 -> the values at one nibble of each."""
    code: gl.constexpr = widening("fp16" if gl.float16 == DTYPE else "bf16", PLACE, ZEROS, BY_STEP)
    if ZEROS and not BY_STEP:
        value = gl.inline_asm_elementwise(
            code, "=r,r,r,r,r,r", [words, scale[:, None], offset[:, None]], dtype=gl.int16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        value = gl.inline_asm_elementwise(code, "=r,r,r,r", [words, scale[:, None]], dtype=gl.int16, is_pure=True, pack=2)
    return value.to(DTYPE, bitcast=True)


@gluon.jit(do_not_specialize=["tokens", "units"])
def _int4_skinny(
    x, words, scales, out, parts, arrivals, tokens, outputs, units, KT: gl.constexpr, PER: gl.constexpr, ROWS: gl.constexpr,
    PLANES: gl.constexpr, ZEROS: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr, LOADED: gl.constexpr, STORED: gl.constexpr,
    AT_ONCE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """KT: k steps of a row of tiles; PER: k steps of a group. LOADED: the layout in which a thread has 16 bytes of a row's
    words."""
    gdc_launch_dependents()
    TOKENS: gl.constexpr = x.block_type.shape[0]
    BY_STEP: gl.constexpr = PLANES == 1
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, OPERAND)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BYTES: gl.constexpr = ROWS * COLUMNS * 2 + PIECES * TOKENS * COLUMNS * 2 + PLANES * ROWS * 4
    tiles = gl.allocate_shared_memory(gl.int16, [STAGES, ROWS, COLUMNS], PLAIN)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES * PLANES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES * PIECES, TOKENS, COLUMNS], x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES + 1):
        mbarrier.init(bar.index(stage), count=1)
    fence_async_shared()
    thread_barrier()

    program, programs = gl.program_id(0), gl.num_programs(0)
    first, last = program * units // programs, (program + 1) * units // programs
    for stage in gl.static_range(STAGES):
        _load_weight(words, scales, tiles, scale_ring, bar, stage, first + stage, KT, PER, PLANES, first + stage < last, BYTES)
    # A tile beyond the last token: nothing is read, but x's descriptor is in the cache when it is needed.
    mbarrier.expect(bar.index(STAGES), TOKENS * COLUMNS * 2)
    tma.async_copy_global_to_shared(x, [TOKENS, 0], bar.index(STAGES), inputs.index(0))
    mbarrier.wait(bar.index(STAGES), 0)
    gdc_wait()
    for stage in gl.static_range(STAGES):
        _load_x(x, inputs, bar, stage, first + stage, KT, first + stage < last)

    rows, columns = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
    place = rows[:, None] * TOKENS + columns[None, :]
    stage, phase = 0, 0
    for tile in range(first // KT, (last - 1) // KT + 1):
        begin, end = gl.maximum(first, tile * KT), gl.minimum(last, (tile + 1) * KT)
        total = gl.zeros([ROWS, TOKENS], gl.float32, SUMS)
        for unit in range(begin, end):
            mbarrier.wait(bar.index(stage), phase)
            stored = tiles.index(stage).load(LOADED)
            ordered = stored.reshape([ROWS, 4, 2, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([ROWS, COLUMNS])
            word = gl.convert_layout(ordered, OPERAND, assert_trivial=True)
            a = scale_ring.index(stage * PLANES).load(OF_ROW)
            b, c, d = a, a, a
            if not BY_STEP:
                b = scale_ring.index(stage * PLANES + 1).load(OF_ROW)
                if ZEROS:
                    c = scale_ring.index(stage * PLANES + 2).load(OF_ROW)
                    d = scale_ring.index(stage * PLANES + 3).load(OF_ROW)
            v0 = _operand(word, a, c, 0, BY_STEP, ZEROS, x.dtype)
            v1 = _operand(word, a, c, 1, BY_STEP, ZEROS, x.dtype)
            v2 = _operand(word, b, d, 2, BY_STEP, ZEROS, x.dtype)
            v3 = _operand(word, b, d, 3, BY_STEP, ZEROS, x.dtype)
            at = stage * PIECES
            sums = warpgroup_mma(v0, inputs.index(at).permute((1, 0)), total, is_async=True)
            sums = warpgroup_mma(v1, inputs.index(at + 1).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma(v2, inputs.index(at + 2).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma(v3, inputs.index(at + 3).permute((1, 0)), sums, is_async=True)
            total, v0, v1, v2, v3 = warpgroup_mma_wait(0, deps=(sums, v0, v1, v2, v3))
            # All warps have read the tile and multiplied it behind the barrier: it may be overwritten.
            thread_barrier()
            ahead = unit + STAGES
            go = ahead < last
            _load_weight(words, scales, tiles, scale_ring, bar, stage, ahead, KT, PER, PLANES, go, BYTES)
            _load_x(x, inputs, bar, stage, ahead, KT, go)
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        if SHARED and end - begin < KT:
            _combine(total, tile, units, parts, arrivals, place, out, outputs, tokens, None, None, KT, STORED, AT_ONCE)
        else:
            _store(out, total, tile * ROWS, outputs, tokens, None, None, STORED)


@cache
def layouts(rows: int, tokens: int, warps: int) -> tuple[gl.NVMMADistributedLayout, gl.DistributedLayout, gl.DistributedLayout]:
    """Of sums [rows, tokens] as the tensor cores leave them; of words [rows, 32] as they are loaded; of sums as they are stored."""
    sums = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, tokens, 16])
    more = [[r, 0] for r in _powers(16 * warps, rows)]
    of_warps = [[r, 0] for r in _powers(16, 16 * warps)]
    loaded = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *more], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], of_warps, [], [rows, BLOCK]
    )
    if tokens < 16:
        return sums, loaded, sums
    registers = [[1, 0], [2, 0], [4, 0], *([0, t] for t in _powers(16, tokens)), *more]
    lanes = [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]]
    return sums, loaded, gl.DistributedLinearLayout(registers, lanes, of_warps, [], [rows, tokens])


def supports(x: Tensor, weight: Int4Weight) -> bool:
    """Whether `int4_skinny_gemm` takes these: on Hopper, contiguous rows of a multiple of `ALIGNMENT` bytes, up to `MAX_TOKENS`."""
    return (
        x.is_cuda
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and 0 < x.shape[0] <= MAX_TOKENS
        and weight.inputs * x.element_size() % ALIGNMENT == 0
        and x.data_ptr() % ALIGNMENT == 0
        and sm_arch(x.device) == 90
    )


def int4_skinny_gemm(x: Tensor, weight: Int4Weight, tiling: SkinnyInt4Tiling) -> Tensor:
    """x [T, inputs] times `weight`, for operands that `supports` admits -> [T, outputs] in x's dtype.

    Two GEMMs with one weight must not run at the same time: they use the same counters."""
    tokens, inputs = x.shape
    columns = max(8, 1 << (tokens - 1).bit_length())
    steps = weight.words.numel() * 4 // weight.rows // TILE_COLUMNS
    planes, table = weight.scales.shape[1], weight.scales.view(-1, weight.rows)
    units = triton.cdiv(weight.rows, tiling.rows) * steps
    programs = min(tiling.programs, units)
    sums, loaded, stored = layouts(tiling.rows, columns, tiling.warps)
    shared = units % programs != 0 or units // programs % steps != 0
    out = torch.empty((tokens, weight.outputs), dtype=x.dtype, device=x.device)
    parts, arrivals = out, out
    if shared:
        parts = torch.empty(2 * programs * tiling.rows * columns, dtype=torch.float32, device=x.device)
        arrivals = counters(x.device).of(weight.words.data_ptr(), triton.cdiv(weight.rows, tiling.rows))
    words = weight.words.view(-1, RUN)
    each = tiling.rows * columns // (32 * tiling.warps)
    _int4_skinny[(programs,)](
        TensorDescriptor(x, [tokens, inputs], [inputs, 1], [columns, BLOCK], gl.NVMMASharedLayout(64, 16, 2)),
        TensorDescriptor(words, list(words.shape), [RUN, 1], [TILE_ROWS * BLOCK // RUN, RUN], gl.NVMMASharedLayout(0, 16, 2)),
        TensorDescriptor(table, list(table.shape), [weight.rows, 1], [1, tiling.rows], gl.NVMMASharedLayout(0, 32, 2)),
        out, parts, arrivals, tokens, weight.outputs, units, KT=steps, PER=max(1, weight.group // TILE_COLUMNS), ROWS=tiling.rows,
        PLANES=planes, ZEROS=weight.zeros, STAGES=tiling.stages, SUMS=sums, LOADED=loaded, STORED=stored,
        AT_ONCE=max(1, min(4, 128 // each)), SHARED=shared, num_warps=tiling.warps, launch_pdl=True,
    )  # fmt: skip
    return out
