# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,operator,misc"
# Kernels are written in Gluon, Triton's lower language: its types are not Python's.
"""Decode attention of MLA on Hopper, warp-specialized: what `latent_decode` computes, for many heads, over latents of rank 512 and
rope 64 in 16 bit.

A program has a band of 64 heads of one row, and a split of its tokens, 64 at a time. Its warps have roles, as in FlashAttention-3
(Shah et al., 2024):

* A producer, one warp, copies tiles of latents by TMA into a ring of two stages.
* The scorer, a warpgroup, computes a tile's scores and weights, leaves the weights in shared memory, and computes the left half of
  the output's columns.
* The mixer, a warpgroup, computes the right half from the same weights.

A tile is keys and values at once: its stage is taken from the scores to the output. Two stages fill the shared memory. Therefore
the scorer does not begin the next tile's scores before the output of this one: the tile after the next could be copied only behind
both, and nothing would run meanwhile. Each half of a tile (columns of the latents) has its own barriers, so that scores begin when
the left one is there, and copies begin when either is free. The rotated part goes with the right half.

Barriers of each stage: `left_ready` and `right_ready` (TMA completes them), `left_free` (the scorer arrives) and `right_free` (the
mixer, whose weights come behind the scores). Barriers with one phase for each tile: `fade_ready` and `weights_ready` (the scorer
arrives, when the factors of what was summed before, or the weights, are in shared memory) and `weights_free` (the mixer, when it
has read both). No wait can be for ever: in tile n the scorer waits for the mixer's tile n - 1, the mixer for the scorer's tile n,
and the producer for tile n - 2 of both. Behind the last tile `fade_ready` has one more phase, with the divisors of the output: also
of a split without a token, which has no other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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

from phalanx.kernels.attention.heuristics import (
    LATENT_BAND,
    LATENT_RANK,
    LATENT_ROPE,
    LATENT_TILE,
    LatentTiling,
    SplitKvWorkspace,
    select_latent_merge,
)
from phalanx.kernels.attention.split_kv import load_split, plan
from phalanx.kernels.attention.split_reduce import LOG2_E, LOWEST, SCORE_SCALE, merge_apart
from phalanx.kernels.gluon_names import thread_barrier

HEADS = gl.constexpr(LATENT_BAND)
"""Of a program: the rows of wgmma."""
TILE = gl.constexpr(LATENT_TILE)
"""Tokens of a stage."""
STAGES = gl.constexpr(2)
RANK, HALF, ROPE = gl.constexpr(LATENT_RANK), gl.constexpr(LATENT_RANK // 2), gl.constexpr(LATENT_ROPE)
LINE = gl.constexpr(64)
"""Elements of 16 bit that a swizzled line of shared memory holds, 128 bytes; TMA copies a token by as many."""
LINES = gl.constexpr(LATENT_RANK // 64 // 2)
"""Of half a latent."""
PART = gl.constexpr(16)
"""Tokens that are cleaned together."""


@gluon.jit
def _next(stage, phase):
    """The stage after one of a ring, and the parity of its barriers' phase."""
    return 1 - stage, gl.where(stage == 1, 1 - phase, phase)


@gluon.jit
def _rows(table, at, end, BLOCK_SIZE: gl.constexpr):
    """Of the cache, for each piece of the tile from token `at` on: its first row, or one before the cache where it has no token."""
    PIECE: gl.constexpr = min(BLOCK_SIZE, TILE)
    rows = ()
    for piece in gl.static_range(TILE // PIECE):
        token = at + piece * PIECE
        block = gl.load(table + token // BLOCK_SIZE, mask=token < end, other=-1)
        rows = rows + (gl.where(token < end, block * BLOCK_SIZE + token % BLOCK_SIZE, -TILE),)  # noqa: RUF005
    return rows


@gluon.jit
def _copy(desc, rows, column, lines, first, COUNT: gl.constexpr, barrier):
    """Start to copy a tile's columns from `column` on into COUNT of `lines`, from `first` on. TMA writes zeros for rows outside of
    the cache."""
    PIECES: gl.constexpr = len(rows)
    PIECE: gl.constexpr = TILE // PIECES
    for piece in gl.static_range(PIECES):
        for line in gl.static_range(COUNT):
            target = lines.index(first + line).slice(piece * PIECE, PIECE, 0)
            tma.async_copy_global_to_shared(desc, [rows[piece], column + line * LINE], barrier, target)


@gluon.jit
def _produce(desc, rings, barriers, table, begin, end, BLOCK_SIZE: gl.constexpr):
    """One warp. rings, as lines: latents [STAGES * 2 * LINES, TILE, LINE], their rotated parts [STAGES, TILE, LINE]."""
    latents, keys = rings
    left_ready, right_ready, left_free, right_free = barriers
    LINE_BYTES: gl.constexpr = TILE * LINE * 2
    stage, phase = 0, 1
    rows = _rows(table, begin, end, BLOCK_SIZE)
    for at in range(begin, end, TILE):
        following = _rows(table, at + TILE, end, BLOCK_SIZE)  # read while the stage is not yet free
        mbarrier.wait(left_free.index(stage), phase)
        barrier = left_ready.index(stage)
        mbarrier.expect(barrier, LINES * LINE_BYTES)
        _copy(desc, rows, 0, latents, stage * 2 * LINES, LINES, barrier)
        mbarrier.wait(right_free.index(stage), phase)
        barrier = right_ready.index(stage)
        mbarrier.expect(barrier, (LINES + 1) * LINE_BYTES)
        _copy(desc, rows, HALF, latents, (stage * 2 + 1) * LINES, LINES, barrier)
        _copy(desc, rows, RANK, keys, stage, 1, barrier)
        rows = following
        stage, phase = _next(stage, phase)


@gluon.jit
def _clean(lines, half, at, end, BLOCK_SIZE: gl.constexpr):
    """Stale memory may contain NaN, which a weight of 0 does not remove: 0 for the tokens from `end` on of the last block that TMA
    copied into a half of a stage. Four warps. The scores of these tokens are read meanwhile, or not: they are masked."""
    PIECE: gl.constexpr = min(BLOCK_SIZE, TILE)
    PARTS: gl.constexpr = TILE // PART
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    parts = lines._reinterpret(lines.dtype, [STAGES * 2 * LINES * PARTS, PART, LINE], lines.layout)
    for part in range((end - at) // PART, (end - at + PIECE - 1) // PIECE * (PIECE // PART)):
        visible = at + part * PART + gl.arange(0, PART, gl.SliceLayout(1, LAYOUT)) < end
        values = ()
        for line in gl.static_range(LINES):
            value = parts.index((half * LINES + line) * PARTS + part).load(LAYOUT)
            values = values + (gl.where(visible[:, None], value, gl.zeros_like(value)),)  # noqa: RUF005
        for line in gl.static_range(LINES):
            parts.index((half * LINES + line) * PARTS + part).store(values[line])


@gluon.jit
def _band(source, first_column, row_stride, head_stride, row, first_head, members, COLUMNS: gl.constexpr):
    """[HEADS, COLUMNS] of a row's queries; zeros for heads that there are not."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    place = (row.to(gl.int64) * row_stride + head.to(gl.int64) * head_stride)[:, None] + column[None, :]
    return gl.load(source + gl.multiple_of(place, [1, 8]), (head < members)[:, None] & (column[None, :] >= 0), 0.0)


@gluon.jit
def _ready(barrier):
    """What a warpgroup has stored in shared memory may be read by the other one."""
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _store_output(result, own, mixed, factor, INDEX: gl.constexpr):
    """Half INDEX of the output's columns of a row that has one split, times `factor`, by way of `own`."""
    out, _, _, row, _, first_head, members = result
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    own.store((mixed * factor[:, None]).to(own.dtype))
    thread_barrier()
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    column = INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    place = (row.to(gl.int64) * members + head)[:, None] * RANK + column[None, :]
    gl.store(out + place, own.load(LAYOUT), (head < members)[:, None] & (column[None, :] >= 0))


@gluon.jit
def _store_partial(result, mixed, INDEX: gl.constexpr):
    """Half INDEX of a split's output into the workspace."""
    _, outs, place, _, _, first_head, members = result
    OUT: gl.constexpr = mixed.type.layout
    lane = gl.arange(0, HEADS, gl.SliceLayout(1, OUT))
    column = INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(0, OUT))
    target = (place * HEADS + lane)[:, None] * RANK + column[None, :]
    gl.store(outs + target, mixed, (first_head + lane < members)[:, None] & (column[None, :] >= 0))


@gluon.jit
def _tile_scores(buffers, left_ready, right_ready, stage, phase, at, end):
    """[HEADS, TILE] of the tokens from `at` on; -inf from `end` on."""
    queries, own_rotated, latents, keys, _, _ = buffers
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([HEADS, TILE], gl.float32, SUMS)
    mbarrier.wait(left_ready.index(stage), phase)
    left, right = latents.index(stage * 2).permute((1, 0)), latents.index(stage * 2 + 1).permute((1, 0))
    score = warpgroup_mma(queries.index(0), left, zeros, use_acc=False, is_async=True)
    mbarrier.wait(right_ready.index(stage), phase)
    score = warpgroup_mma(queries.index(1), right, score, is_async=True)
    score = warpgroup_mma(own_rotated, keys.index(stage).permute((1, 0)), score, is_async=True)
    score = warpgroup_mma_wait(0, deps=(score,))
    if at + TILE > end:
        token = at + gl.arange(0, TILE, gl.SliceLayout(0, SUMS))
        score = gl.where(token[None, :] < end, score, float("-inf"))
    return score


@gluon.jit
def _score(shared, BLOCK_SIZE: gl.constexpr):
    """A warpgroup: the scores and weights of its tokens, and the left half of the output."""
    buffers = shared[0]
    queries, _, latents, _, weights, fades = buffers
    query_ready, left_ready, right_ready, left_free, fade_ready, weights_ready, weights_free = shared[1]
    query, row_stride, head_stride, begin, end, score_scale, split_max, totals, lse = shared[2]
    _, _, place, row, count, first_head, members = shared[3]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    lines = latents._reinterpret(latents.dtype, [STAGES * 2 * LINES, TILE, LINE], latents.layout)
    queries.index(0).store(_band(query, 0, row_stride, head_stride, row, first_head, members, HALF))
    fence_async_shared()
    _ready(query_ready)

    top = gl.full([HEADS], LOWEST, gl.float32, gl.SliceLayout(1, SUMS))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, SUMS))
    mixed = gl.zeros([HEADS, HALF], gl.float32, OUT)
    stage, phase, turn = 0, 0, 0
    mbarrier.wait(query_ready, 0)
    for at in range(begin, end, TILE):
        score = _tile_scores(buffers, left_ready, right_ready, stage, phase, at, end)
        higher = gl.maximum(top, gl.max(score, 1) * score_scale)
        fade = gl.exp2(top - higher)
        mbarrier.wait(weights_free, 1 - turn)
        fades.store(fade)
        _ready(fade_ready)  # the mixer fades its half meanwhile
        weight = gl.exp2(score * score_scale - higher[:, None])
        rounded = weight.to(weights.dtype)
        weights.store(rounded)
        if at + TILE > end:
            _clean(lines, stage * 2, at, end, BLOCK_SIZE)
        fence_async_shared()
        _ready(weights_ready)
        total, top = total * fade + gl.sum(weight, 1), higher
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        operand = gl.convert_layout(rounded, WEIGHTS)
        moving = warpgroup_mma(operand, latents.index(stage * 2), mixed, is_async=True)
        mixed, operand = warpgroup_mma_wait(0, deps=(moving, operand))
        mbarrier.arrive(left_free.index(stage), count=1)
        stage, phase = _next(stage, phase)
        turn = 1 - turn

    mbarrier.wait(weights_free, 1 - turn)
    factor = gl.where(total > 0, 1.0 / total, 0.0)
    fades.store(factor)
    _ready(fade_ready)
    if count == 1:
        _store_output(shared[3], queries.index(0), mixed, gl.convert_layout(factor, gl.SliceLayout(1, OUT)), 0)
        if lse is not None:
            head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, SUMS))
            log = (top + gl.log2(gl.where(total > 0, total, 1.0))) / SCORE_SCALE
            gl.store(lse + row.to(gl.int64) * members + head, gl.where(total > 0, log, LOWEST), head < members)
    else:
        left_at = place * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, SUMS))
        gl.store(split_max + left_at, top)
        gl.store(totals + left_at, total)
        _store_partial(shared[3], mixed, 0)


@gluon.jit
def _mix(shared, BLOCK_SIZE: gl.constexpr):
    """A warpgroup: the right half of the output."""
    queries, own_rotated, latents, _, weights, fades = shared[0]
    query_ready, right_ready, right_free, fade_ready, weights_ready, weights_free = shared[1]
    query, row_stride, head_stride, rotated, rotated_row_stride, rotated_head_stride, begin, end = shared[2]
    _, _, _, row, count, first_head, members = shared[3]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    lines = latents._reinterpret(latents.dtype, [STAGES * 2 * LINES, TILE, LINE], latents.layout)
    right = _band(query, HALF, row_stride, head_stride, row, first_head, members, HALF)
    own_rotated.store(_band(rotated, 0, rotated_row_stride, rotated_head_stride, row, first_head, members, ROPE))
    queries.index(1).store(right)
    fence_async_shared()
    _ready(query_ready)

    mixed = gl.zeros([HEADS, HALF], gl.float32, OUT)
    stage, phase, turn = 0, 0, 0
    for at in range(begin, end, TILE):
        mbarrier.wait(right_ready.index(stage), phase)
        if at + TILE > end:
            _clean(lines, stage * 2 + 1, at, end, BLOCK_SIZE)
            fence_async_shared()
            thread_barrier()
        mbarrier.wait(fade_ready, turn)
        mixed = mixed * fades.load(gl.SliceLayout(1, OUT))[:, None]
        mbarrier.wait(weights_ready, turn)
        moving = warpgroup_mma(weights, latents.index(stage * 2 + 1), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(moving,))
        mbarrier.arrive(weights_free, count=1)
        mbarrier.arrive(right_free.index(stage), count=1)
        stage, phase = _next(stage, phase)
        turn = 1 - turn
    mbarrier.wait(fade_ready, turn)
    factor = fades.load(gl.SliceLayout(1, OUT))
    if count == 1:
        _store_output(shared[3], queries.index(1), mixed, factor, 1)
    else:
        _store_partial(shared[3], mixed, 1)


@gluon.jit
def _barrier(COUNT: gl.constexpr):
    """That so many arrivals complete."""
    one = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(one, count=COUNT)
    return one


@gluon.jit
def _barriers():
    """One for each stage, which one arrival completes."""
    both = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(both.index(stage), count=1)
    return both


@gluon.jit(
    do_not_specialize=[
        "table_stride", "row_stride", "head_stride", "rotated_row_stride", "rotated_head_stride", "members", "early",
    ],
    do_not_specialize_on_alignment=["tables"],
)  # fmt: skip
def _latent_decode_bands(
    query, rotated, cache_desc, tables, splits, out, lse, split_max, totals, outs,
    table_stride, row_stride, head_stride, rotated_row_stride, rotated_head_stride, members, early, score_scale,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Program (band of HEADS of the `members` heads, split). row_stride, head_stride: of `query`,
    multiples of 8, as those of `rotated`. early: see early_lengths of `decode_attention`. A variant takes seconds to compile, so
    there is one for both, and for all numbers of heads."""
    gdc_launch_dependents()
    if early == 0:
        gdc_wait()  # splits, tables, queries and the newest latents: the kernel before may have written all of them
    item, band = gl.program_id(1), gl.program_id(0)
    row, _, count, begin, end, _, table_row = load_split(splits, item)
    if table_row >= 0:
        # Every row has a first split, which waits: so a kernel that waits for this one has waited for those before it, too.
        if early != 0:
            gdc_wait()
        table = tables + table_row.to(gl.int64) * table_stride
        place = band * gl.num_programs(1) + item  # of its results in the workspace
        OPERAND: gl.constexpr = cache_desc.dtype
        SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        queries = gl.allocate_shared_memory(OPERAND, [2, HEADS, HALF], SWIZZLED)
        own_rotated = gl.allocate_shared_memory(OPERAND, [HEADS, ROPE], SWIZZLED)
        latents = gl.allocate_shared_memory(OPERAND, [STAGES * 2, TILE, HALF], SWIZZLED)
        keys = gl.allocate_shared_memory(OPERAND, [STAGES, TILE, ROPE], SWIZZLED)
        weights = gl.allocate_shared_memory(OPERAND, [HEADS, TILE], SWIZZLED)
        fades = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        query_ready, fade_ready, weights_ready, weights_free = _barrier(2), _barrier(1), _barrier(1), _barrier(1)
        left_ready, right_ready, left_free, right_free = _barriers(), _barriers(), _barriers(), _barriers()
        fence_async_shared()
        thread_barrier()
        buffers = (queries, own_rotated, latents, keys, weights, fades)
        result = (out, outs, place, row, count, band * HEADS, members)
        rings = (latents._reinterpret(OPERAND, [STAGES * 2 * LINES, TILE, LINE], SWIZZLED), keys)
        scored = (
            buffers, (query_ready, left_ready, right_ready, left_free, fade_ready, weights_ready, weights_free),
            (query, row_stride, head_stride, begin, end, score_scale, split_max, totals, lse), result,
        )  # fmt: skip
        mixed = (
            buffers, (query_ready, right_ready, right_free, fade_ready, weights_ready, weights_free),
            (query, row_stride, head_stride, rotated, rotated_row_stride, rotated_head_stride, begin, end), result,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (_score, (scored, BLOCK_SIZE)), (_mix, (mixed, BLOCK_SIZE)),
                (_produce, (cache_desc, rings, (left_ready, right_ready, left_free, right_free), table, begin, end, BLOCK_SIZE)),
            ], [4, 1], [200, 56],  # 248 remain to the scorer
        )  # fmt: skip


def latent_decode_attention(
    query: Tensor, rotated: Tensor, cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor, *,
    scale: float, workspace: SplitKvWorkspace, tiling: LatentTiling, splits: Tensor | None = None, early_lengths: bool = False,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `latent_decode.latent_decode_attention`, where `dispatch.supports_warp_specialized_latent` says so, with a tiling of
    `heuristics.select_latent_bands`."""
    members, out = query.shape[1], query.new_empty(query.shape) if out is None else out
    if not len(query):
        return out
    block_size = cache.shape[1]
    if splits is None:
        splits, early_lengths = plan(kv_lengths, table_rows, tiling.split, window=None, block_size=block_size), False
    query, rotated = (each if _in_lines(each) else each.contiguous() for each in (query, rotated))
    bands = triton.cdiv(members, HEADS.value)
    *partial, _ = workspace.take(bands, bands * len(splits), HEADS.value, RANK.value)
    _latent_decode_bands[(bands, len(splits))](
        query, rotated, _descriptor(cache), block_tables, splits, out, lse, *partial, block_tables.stride(0), *query.stride()[:2],
        *rotated.stride()[:2], members, int(early_lengths), scale * LOG2_E, BLOCK_SIZE=block_size, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    lanes, at_once, block = select_latent_merge(len(query))
    merge_apart(
        splits, out, None, *partial, kv_heads=1, heads=HEADS.value, width=RANK.value, lanes=lanes, at_once=at_once, block=block,
        value_scale=1.0, early_lengths=early_lengths, sm=90, lse=lse,
    )  # fmt: skip
    return out


def _in_lines(query: Tensor) -> bool:
    """Whether 16 bytes can be read at a time."""
    return all(stride % 8 == 0 for stride in query.stride()[:2])


def _descriptor(cache: Tensor) -> Any:
    """Of a cache [blocks, block_size, 1, RANK + ROPE], as lines of so many elements."""
    piece = min(cache.shape[1], TILE.value)
    return TensorDescriptor.from_tensor(cache.view(-1, cache.shape[3]), [piece, LINE.value], line_layout())


@cache
def line_layout() -> Any:
    """How a line of a stage lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=LINE.value * 2, element_bitwidth=16, rank=2)
