# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,operator,misc"
# Kernels are written in Gluon, Triton's lower language: its types are not Python's.
"""Prefill attention over the paged KV cache on Hopper, warp-specialized: what `prefill` computes, for long rows.

A program has a tile of 128 (token, head) pairs, as there. Its warps have roles, as in FlashAttention-3 (Shah et al., 2024):

* A producer, one warp, copies blocks of keys and values by TMA into a ring of two stages each. Over a cache in e4m3 those are
  rings of their own, from which four warps widen what has arrived to fp16, as wgmma multiplies it with queries of 16 bit.
* Two consumer warpgroups have 64 pairs each. A consumer starts the GEMM of its queries with the next keys and that of its last
  weights with their values, and takes exponentials meanwhile. While one waits for its scores, the other's GEMMs go on.

A program takes a whole multiprocessor, so nothing runs while it begins and ends: rows of few keys are `prefill`'s. Programs share
the keys of a tile (split-KV) as there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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

from phalanx.kernels.attention.heuristics import (
    LONG_SPLIT,
    LONG_SPLIT_COST,
    LONG_WAVES,
    MAX_LONG_ROWS,
    SplitKvWorkspace,
    max_prefill_tiles,
    tile_tokens,
)
from phalanx.kernels.attention.split_kv import prefill_place, prefill_span, prefill_splits
from phalanx.kernels.attention.split_reduce import LOG2_E, LOWEST
from phalanx.kernels.gluon_names import thread_barrier

ROWS = gl.constexpr(128)
"""(token, head) pairs of a program: two warpgroups' of 64."""
MOST_ROWS = gl.constexpr(MAX_LONG_ROWS)
"""Rows among which a program looks for its own."""
KEYS = gl.constexpr(128)
"""Keys of a stage."""
SPLIT, SPLIT_COST = gl.constexpr(LONG_SPLIT), gl.constexpr(LONG_SPLIT_COST)
STAGES = gl.constexpr(2)
LINE = gl.constexpr(64)
"""Elements of 16 bit that a swizzled line of shared memory holds, 128 bytes; TMA copies a row by as many."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tile(starts, lengths, table_rows, rows, back, programs, waves, KV_HEADS: gl.constexpr, PARTS: gl.constexpr,
          TOKENS: gl.constexpr, INDIRECT: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """As `prefill._tile`, where all tiles have so many parts. programs, waves: see `prefill_span`. SHARED: programs may share the
    keys of a tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    each = gl.arange(0, MOST_ROWS, LAYOUT)
    begin = gl.load(starts + each, each < rows, 0, cache_modifier=".cg")
    count = gl.load(starts + each + 1, each < rows, 0, cache_modifier=".cg") - begin
    length = gl.load(lengths + each, each < rows, 0, cache_modifier=".cg")
    if INDIRECT:
        table = gl.load(table_rows + each, each < rows, 0, cache_modifier=".cg").to(gl.int64)
    else:
        table = each.to(gl.int64)
    items = (count + TOKENS - 1) // TOKENS * PARTS
    units, least = items, 0
    if SHARED:
        longest, pairs = gl.max(gl.where(count > 0, length, 0), 0), gl.sum(items.to(gl.float32) * length, 0)
        least = prefill_span(gl.sum(items, 0), longest, pairs, programs, waves, KV_HEADS, KEYS, SPLIT, SPLIT_COST)
        splits, _ = prefill_splits(length, least, KEYS)
        units = items * splits
    ends = gl.associative_scan(units, 0, _add)
    item = gl.max(ends, 0) - 1 - back
    here = (item < ends) & (item >= ends - units)
    own, length = gl.sum(gl.where(here, item - ends + units, 0), 0), gl.sum(gl.where(here, length, 0), 0)
    split, span = 0, length
    if SHARED:
        splits, span = prefill_splits(length, least, KEYS)
        own, split, item = prefill_place(item, own, gl.sum(gl.where(here, items, 0), 0), splits)
    return (
        gl.where(item < 0, -1, own // PARTS * TOKENS), own % PARTS * ROWS, gl.sum(gl.where(here, begin, 0), 0),
        gl.sum(gl.where(here, count, 0), 0), length, gl.sum(gl.where(here, table, table * 0), 0), split, item, span,
    )  # fmt: skip


@gluon.jit
def _next(stage, phase):
    """The stage after one of a ring, and the parity of its barriers' phase."""
    return 1 - stage, gl.where(stage == 1, 1 - phase, phase)


@gluon.jit
def _copy(desc, lines, stage, barriers, table, at, end, head, BLOCK_SIZE: gl.constexpr):
    """Start to copy the KEYS tokens from `at` on into a stage of lines [STAGES * DIM / LINE, KEYS, LINE]; the tokens from `end` on
    are of any block."""
    PIECE: gl.constexpr = min(BLOCK_SIZE, KEYS)
    LINES: gl.constexpr = lines.shape[0] // STAGES
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, LINES * KEYS * LINE * lines.dtype.primitive_bitwidth // 8)
    for piece in gl.static_range(KEYS // PIECE):
        token = gl.minimum(at + piece * PIECE, end - 1) // PIECE * PIECE
        row = gl.load(table + token // BLOCK_SIZE) * BLOCK_SIZE + token % BLOCK_SIZE
        for line in gl.static_range(LINES):
            target = lines.index(stage * LINES + line).slice(piece * PIECE, PIECE, 0)
            tma.async_copy_global_to_shared(desc, [row, (head * LINES + line) * LINE], barrier, target)


@gluon.jit
def _produce(descriptors, rings, barriers, table, begin, end, head, BLOCK_SIZE: gl.constexpr):
    """One warp: the keys and values begin .. end - 1, begin a multiple of KEYS. descriptors, rings (as lines): of keys and values.
    barriers: where keys and values are ready, and where their stages are free."""
    key_desc, value_desc = descriptors
    keys, values = rings
    key_ready, value_ready, key_free, value_free = barriers
    stage, phase = 0, 1
    for at in range(begin, end, KEYS):
        mbarrier.wait(key_free.index(stage), phase)
        _copy(key_desc, keys, stage, key_ready, table, at, end, head, BLOCK_SIZE)
        mbarrier.wait(value_free.index(stage), phase)
        _copy(value_desc, values, stage, value_ready, table, at, end, head, BLOCK_SIZE)
        stage, phase = _next(stage, phase)


@gluon.jit
def _clean(values, stage, at, end):
    """Stale memory may contain NaN, which a weight of 0 does not remove: 0 for tokens from `end` on. One warp."""
    PART: gl.constexpr = 16
    LINES: gl.constexpr = values.shape[0] // STAGES
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for part in gl.static_range(KEYS // PART):
        if at + (part + 1) * PART > end:
            token = at + part * PART + gl.arange(0, PART, gl.SliceLayout(1, LAYOUT))
            for line in gl.static_range(LINES):
                place = values.index(stage * LINES + line).slice(part * PART, PART, 0)
                value = place.load(LAYOUT)
                place.store(gl.where(token[:, None] < end, value, gl.zeros_like(value)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _produce_clean(descriptors, rings, barriers, last_values, table, begin, end, head, BLOCK_SIZE: gl.constexpr):
    """As `_produce`, where consumers read what was copied. last_values: the barriers of the last values."""
    key_desc, value_desc = descriptors
    keys, values = rings
    key_ready, value_ready, key_free, value_free = barriers
    last_at = (end - 1) // KEYS * KEYS
    _produce(descriptors, rings, barriers, table, begin, last_at, head, BLOCK_SIZE)
    before = (last_at - begin) // KEYS
    stage, phase = before % STAGES, 1 - before // STAGES % 2
    mbarrier.wait(key_free.index(stage), phase)
    _copy(key_desc, keys, stage, key_ready, table, last_at, end, head, BLOCK_SIZE)
    mbarrier.wait(value_free.index(stage), phase)
    _copy(value_desc, values, stage, last_values, table, last_at, end, head, BLOCK_SIZE)
    mbarrier.wait(last_values.index(stage), 0)
    _clean(values, stage, last_at, end)
    mbarrier.arrive(value_ready.index(stage), count=1)


@gluon.jit
def _widen(copied, lines, stage, at, end):
    """A stage that TMA copied in e4m3, in fp16 where consumers read it; 0 for tokens from `end` on: see `_clean`."""
    PART: gl.constexpr = 64
    LINES: gl.constexpr = lines.shape[0] // STAGES
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    for part in gl.static_range(KEYS // PART):
        for line in gl.static_range(LINES):
            value = copied.index(stage * LINES + line).slice(part * PART, PART, 0).load(LAYOUT).to(lines.dtype)
            if at + (part + 1) * PART > end:
                token = at + part * PART + gl.arange(0, PART, gl.SliceLayout(1, LAYOUT))
                value = gl.where(token[:, None] < end, value, gl.zeros_like(value))
            lines.index(stage * LINES + line).slice(part * PART, PART, 0).store(value)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _convert(rings8, barriers8, rings, barriers, begin, end):
    """Four warps, over a cache in e4m3. rings8, barriers8: between the producer and this; rings, barriers: between this and the
    consumers."""
    keys8, values8 = rings8
    keys, values = rings
    key_copied, value_copied, key8_free, value8_free = barriers8
    key_ready, value_ready, key_free, value_free = barriers
    stage, phase = 0, 0
    for at in range(begin, end, KEYS):
        mbarrier.wait(key_copied.index(stage), phase)
        mbarrier.wait(key_free.index(stage), 1 - phase)
        _widen(keys8, keys, stage, at, end)
        mbarrier.arrive(key_ready.index(stage), count=1)
        mbarrier.arrive(key8_free.index(stage), count=1)
        mbarrier.wait(value_copied.index(stage), phase)
        mbarrier.wait(value_free.index(stage), 1 - phase)
        _widen(values8, values, stage, at, end)
        mbarrier.arrive(value_ready.index(stage), count=1)
        mbarrier.arrive(value8_free.index(stage), count=1)
        stage, phase = _next(stage, phase)


@gluon.jit
def _softmax(score, scales, top, total, last, at, full, SUMS: gl.constexpr):
    """score [64, KEYS] of the keys from `at` on -> (maximum [64], sum [64], factor of what was summed before, weights). Keys before
    `full` are visible to all; last [64]: the last that is visible to each."""
    if at + KEYS > full:
        token = at + gl.arange(0, KEYS, gl.SliceLayout(0, SUMS))
        score = gl.where(token[None, :] <= last[:, None], score, float("-inf"))
    higher = gl.maximum(top, gl.max(score, 1) * scales)
    weight = gl.exp2(score * scales[:, None] - higher[:, None])
    fade = gl.exp2(top - higher)
    return higher, total * fade + gl.sum(weight, 1), fade, weight


@gluon.jit
def _places(lead, first, row_begin, count, head, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr,
            DIM: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Of the 64 pairs from `lead` on: the places [64, DIM] of their elements in queries and output, and which there are."""
    member = lead + gl.arange(0, ROWS // 2, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    token = first + member // GROUP
    place = (((row_begin + token).to(gl.int64) * KV_HEADS + head) * GROUP + member % GROUP) * DIM
    valid = ((member < TOKENS * GROUP) & (token < count))[:, None] & (dim[None, :] < DIM)
    return gl.multiple_of(place[:, None] + dim[None, :], [1, 8]), valid


@gluon.jit
def _store(own, query, LAYOUT: gl.constexpr):
    """Queries [64, DIM] for wgmma -> the powers of two [64] by which they were divided: over a cache in e4m3 bf16 becomes fp16, as
    by `decode._in_fp16`."""
    if query.dtype != own.dtype:
        exact = query.to(gl.float32)
        power = gl.max(gl.abs(exact), 1).to(gl.int32, bitcast=True) & 0x7F800000
        own.store((exact * (0x7F000000 - power).to(gl.float32, bitcast=True)[:, None]).to(own.dtype))
        powers = gl.convert_layout(power.to(gl.float32, bitcast=True), LAYOUT)
    else:
        own.store(query)
        powers = gl.full([ROWS // 2], 1.0, gl.float32, LAYOUT)
    fence_async_shared()
    thread_barrier()
    return powers


@gluon.jit
def _merged(splits, PART: gl.constexpr, top, total, mixed):
    """(maximum [64], sum [64], output [64, DIM]) of a warpgroup's pairs over the keys of a split. Where it is the only one, or the
    last of several to arrive -> (sum, output, True) over the keys of all. Else they are left in the workspace -> (.., .., False).
    splits: the buffers of the workspace; where the results of the split are, its index, and how many there are."""
    split_max, totals, outs, arrivals, result, split, count = splits
    OUT: gl.constexpr = mixed.type.layout
    DIM: gl.constexpr = mixed.shape[1]
    last = True if arrivals is None else count == 1
    if arrivals is not None and count > 1:
        lane, dim = gl.arange(0, ROWS // 2, gl.SliceLayout(1, OUT)), gl.arange(0, DIM, gl.SliceLayout(0, OUT))
        first = (result - split) * ROWS + PART * (ROWS // 2)
        left = first + split * ROWS + lane
        gl.store(split_max + left, top)
        gl.store(totals + left, total)
        gl.store(outs + left[:, None] * DIM + dim[None, :], mixed)
        thread_barrier()  # all warps have stored before one of them releases what they stored
        counted = arrivals + (result - split) * 2 + PART
        last = gl.atomic_add(counted, 1, sem="acq_rel") == count - 1
        if last:
            gl.store(counted, 0)
            top, total, mixed = gl.full_like(top, LOWEST), gl.zeros_like(total), gl.zeros_like(mixed)
            for each in range(count):
                left = first + each * ROWS + lane
                split_top = gl.load(split_max + left, cache_modifier=".cg")
                split_total = gl.load(totals + left, cache_modifier=".cg")
                split_mixed = gl.load(outs + left[:, None] * DIM + dim[None, :], cache_modifier=".cg")
                higher = gl.maximum(top, split_top)
                fade, weight = gl.exp2(top - higher), gl.exp2(split_top - higher)
                total = total * fade + split_total * weight
                mixed = mixed * fade[:, None] + split_mixed * weight[:, None]
                top = higher
    return total, mixed, last


@gluon.jit
def _consume(shared, PART: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """A warpgroup: half PART of the program's pairs."""
    query, out, queries, keys, values = shared[0]
    key_ready, value_ready, key_free, value_free = shared[1]
    lead, first, row_begin, count, length, begin, end, head, score_scale, value_scale = shared[2]
    DIM: gl.constexpr = keys.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    own = queries.index(PART)
    lead += PART * (ROWS // 2)
    earlier = length - count + first  # keys before the tile's first token
    full = earlier + lead // GROUP + 1
    last = earlier + (lead + gl.arange(0, ROWS // 2, gl.SliceLayout(1, SUMS))) // GROUP
    place, valid = _places(lead, first, row_begin, count, head, GROUP, KV_HEADS, TOKENS, DIM, LOAD)
    scales = score_scale * _store(own, gl.load(query + place, valid, 0.0), gl.SliceLayout(1, SUMS))
    scales = gl.maximum(scales, 1e-30)

    top = gl.full([ROWS // 2], LOWEST, gl.float32, gl.SliceLayout(1, SUMS))
    total = gl.zeros([ROWS // 2], gl.float32, gl.SliceLayout(1, SUMS))
    zeros = gl.zeros([ROWS // 2, KEYS], gl.float32, SUMS)
    mixed = gl.zeros([ROWS // 2, DIM], gl.float32, OUT)
    mbarrier.wait(key_ready.index(0), 0)
    score = warpgroup_mma(own, keys.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(key_free.index(0), count=1)
    top, total, fade, weight = _softmax(score, scales, top, total, last, begin, full, SUMS)
    weights = gl.convert_layout(weight.to(keys.dtype), WEIGHTS)
    stage, phase = 0, 0
    for at in range(begin + KEYS, end, KEYS):
        after, after_phase = _next(stage, phase)
        mbarrier.wait(key_ready.index(after), after_phase)
        ahead = warpgroup_mma(own, keys.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(value_ready.index(stage), phase)
        moving = warpgroup_mma(weights, values.index(stage), mixed, is_async=True)
        score = warpgroup_mma_wait(1, deps=(ahead,))
        mbarrier.arrive(key_free.index(after), count=1)
        top, total, fade, weight = _softmax(score, scales, top, total, last, at, full, SUMS)
        mixed, weights = warpgroup_mma_wait(0, deps=(moving, weights))
        mbarrier.arrive(value_free.index(stage), count=1)
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        weights = gl.convert_layout(weight.to(keys.dtype), WEIGHTS)
        stage, phase = after, after_phase
    mbarrier.wait(value_ready.index(stage), phase)
    moving = warpgroup_mma(weights, values.index(stage), mixed, is_async=True)
    mixed, weights = warpgroup_mma_wait(0, deps=(moving, weights))

    top, total = gl.convert_layout(top, gl.SliceLayout(1, OUT)), gl.convert_layout(total, gl.SliceLayout(1, OUT))
    total, mixed, last_split = _merged(shared[3], PART, top, total, mixed)
    if last_split:
        staged = own._reinterpret(query.dtype.element_ty, own.shape, own.layout)
        staged.store((mixed * gl.where(total > 0, value_scale / total, 0.0)[:, None]).to(query.dtype.element_ty))
        thread_barrier()
        target, there = _places(lead, first, row_begin, count, head, GROUP, KV_HEADS, TOKENS, DIM, LOAD)
        gl.store(out + target, staged.load(LOAD), there)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """A barrier for each stage, which so many arrivals complete."""
    both = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(both.index(stage), count=COUNT)
    return both


@gluon.jit(
    do_not_specialize=["table_stride", "rows", "programs", "waves", "early"],
    do_not_specialize_on_alignment=["tables", "table_rows", "starts", "lengths"],
)
def _prefill_long_rows(
    query, key_desc, value_desc, tables, table_rows, starts, lengths, out, split_max, totals, outs, arrivals,
    table_stride, rows, programs, waves, early, score_scale, value_scale,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr,
    INDIRECT: gl.constexpr,
):  # fmt: skip
    """Programs and constants: as of `prefill._prefill`. programs, waves: see `prefill_span`; early: see early_lengths. A variant
    takes seconds to compile, so there is one for all of these, and for all numbers of rows."""
    gdc_launch_dependents()
    if early == 0:
        gdc_wait()
    PARTS: gl.constexpr = (TOKENS * GROUP + ROWS - 1) // ROWS
    head, back = gl.program_id(0) % KV_HEADS, gl.program_id(0) // KV_HEADS
    first, lead, row_begin, count, length, table_row, split, result, span = _tile(
        starts, lengths, table_rows, rows, back, programs, waves, KV_HEADS, PARTS, TOKENS, INDIRECT, arrivals is not None
    )  # fmt: skip
    if early != 0:
        gdc_wait()
    begin, end = split * span, length - count + first
    end += gl.minimum((gl.minimum(lead + ROWS, TOKENS * GROUP) - 1) // GROUP + 1, count - first)
    if not ((first < 0) | (first + lead // GROUP >= count) | (begin >= end)):
        pieces, end = (end + span - 1) // span, gl.minimum(end, begin + span)
        table = tables + table_row * table_stride
        CACHED: gl.constexpr = key_desc.dtype
        QUANTIZED: gl.constexpr = CACHED.primitive_bitwidth == 8
        OPERAND: gl.constexpr = gl.float16 if QUANTIZED else CACHED
        SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        queries = gl.allocate_shared_memory(OPERAND, [2, ROWS // 2, DIM], SWIZZLED)
        keys = gl.allocate_shared_memory(OPERAND, [STAGES, KEYS, DIM], SWIZZLED)
        values = gl.allocate_shared_memory(OPERAND, [STAGES, KEYS, DIM], SWIZZLED)
        barriers = (_barriers(1), _barriers(1), _barriers(2), _barriers(2))
        copied = (_barriers(1), _barriers(1), _barriers(1), _barriers(1))
        fence_async_shared()
        thread_barrier()
        RING: gl.constexpr = [STAGES * DIM // LINE, KEYS, LINE]
        rings = (keys._reinterpret(OPERAND, RING, SWIZZLED), values._reinterpret(OPERAND, RING, SWIZZLED))
        descriptors = (key_desc, value_desc)
        shared = (
            (query, out, queries, keys, values), barriers,
            (lead, first, row_begin, count, length, begin, end, head, score_scale, value_scale),
            (split_max, totals, outs, arrivals, head * (waves * programs // KV_HEADS) + result, split, pieces),
        )  # fmt: skip
        if QUANTIZED:
            keys8 = gl.allocate_shared_memory(CACHED, RING, key_desc.layout)
            values8 = gl.allocate_shared_memory(CACHED, RING, key_desc.layout)
            gl.warp_specialize(
                [
                    (_consume, (shared, 0, GROUP, KV_HEADS, TOKENS)), (_consume, (shared, 1, GROUP, KV_HEADS, TOKENS)),
                    (_convert, ((keys8, values8), copied, rings, barriers, begin, end)),
                    (_produce, (descriptors, (keys8, values8), copied, table, begin, end, head, BLOCK_SIZE)),
                ], [4, 4, 1], [208, 64, 32],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_consume, (shared, 0, GROUP, KV_HEADS, TOKENS)), (_consume, (shared, 1, GROUP, KV_HEADS, TOKENS)),
                    (_produce_clean, (descriptors, rings, barriers, copied[1], table, begin, end, head, BLOCK_SIZE)),
                ], [4, 1], [232, 40],
            )  # fmt: skip


def prefill_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, query_starts: Tensor,
    kv_lengths: Tensor, *, scale: float, kv_scales: tuple[float, float] | None = None, tiles: int | None = None,
    early_lengths: bool = False, out: Tensor | None = None, workspace: SplitKvWorkspace | None = None, waves: int = LONG_WAVES,
) -> Tensor:  # fmt: skip
    """As `prefill.prefill_attention`, where `dispatch.supports_warp_specialized_prefill` says so, for up to MAX_LONG_ROWS rows
    without a window or sinks. workspace: as there; waves: see `split_kv.prefill_span`."""
    tokens, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    rows, group = len(kv_lengths), q_heads // kv_heads
    out = torch.empty_like(query) if out is None else out
    tiles = max_prefill_tiles(tokens, rows, group) if tiles is None else tiles
    if not tiles:
        return out
    each, (key_scale, value_scale) = tile_tokens(group), kv_scales or (1.0, 1.0)
    descriptors = [_descriptor(cache) for cache in (key_cache, value_cache)]
    programs, slots, partial = 0, 0, (None, None, None, None)
    if workspace is not None and waves:
        programs = workspace.num_sms
        slots = waves * programs // kv_heads
        partial = workspace.take(2 * kv_heads * slots, kv_heads * slots, ROWS.value, head_dim)
    _prefill_long_rows[(max(tiles * triton.cdiv(each * group, ROWS.value), slots) * kv_heads,)](
        query, *descriptors, block_tables, kv_lengths if table_rows is None else table_rows, query_starts, kv_lengths, out,
        *partial, block_tables.stride(0), rows, programs, waves, int(early_lengths), scale * key_scale * LOG2_E, value_scale,
        GROUP=group, KV_HEADS=kv_heads, DIM=head_dim, BLOCK_SIZE=block_size, TOKENS=each, INDIRECT=table_rows is not None,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def _descriptor(cache: Tensor) -> Any:
    """Of a cache [blocks, block_size, kv_heads, head_dim], as lines of so many elements."""
    block_size, kv_heads, head_dim = cache.shape[1:]
    return TensorDescriptor.from_tensor(
        cache.view(-1, kv_heads * head_dim), [min(block_size, KEYS.value), LINE.value], line_layout(cache.element_size())
    )


@cache
def line_layout(itemsize: int) -> Any:
    """How a line of a stage lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=LINE.value * itemsize, element_bitwidth=8 * itemsize, rank=2)
