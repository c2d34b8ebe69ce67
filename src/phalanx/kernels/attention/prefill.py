# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Prefill attention over the paged KV cache (flash attention for several tokens per row), in one launch that nobody plans on the
host.

    out[t, h] = softmax(scale * query[t, h] . keys[begin:end]) @ values[begin:end]        see `reference.prefill_attention`

A row's tokens are divided into tiles, and a program has a tile's queries, or a half of them, for one KV head and all of its query
heads: up to 128 (token, head) pairs, the rows of a tensor core's GEMM, which read each key and value once. A program finds its row
from the begins of the rows, so that a captured launch serves any rows; programs beyond the last tile return at once. A row's last
tiles, which have the most keys, run first.

Where tiles are fewer than the programs that a GPU runs at once, as those of a short chunk of a long prompt are, several programs
share the keys of a tile (split-KV), and the last of them to arrive merges their results by log-sum-exp. How many is decided on the
device, from the lengths of all rows.

e4m3 and int8 keys and values are widened to fp16, exactly, and queries are divided by powers of two so that fp16 holds them, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.attention.decode import _blocks, _dot, _in_fp16, _places, _with_token_scales
from phalanx.kernels.attention.heuristics import (
    PrefillTiling,
    SplitKvWorkspace,
    max_prefill_tiles,
    tile_tokens,
)
from phalanx.kernels.attention.split_kv import prefill_place, prefill_span, prefill_splits
from phalanx.kernels.attention.split_reduce import LOG2_E, LOWEST, leave_split, merge_splits, with_sinks
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.quantize import widened
from phalanx.kernels.vectors import nearest


@triton.jit
def _tile(
    starts, lengths, table_rows, rows, back, programs, waves, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MOST: tl.constexpr, INDIRECT: tl.constexpr, SPLIT: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    """The split of a part of a tile that is `back` before the last -> (the tile's first token among its row's, less than 0 if there
    is no such split; the part's first (token, head) among the tile's; of the row: the first token, the number of tokens, the KV
    length, the block table; the split's index among its part's; where its results are; keys of a split). MOST: a power of two that
    is at least `rows`. SPLIT: keys of a split, at least, where a row has several; 0: each part is one. programs, waves, COST: see
    `prefill_span`."""
    each = tl.arange(0, MOST)
    begin = tl.load(starts + each, each < rows, 0, cache_modifier=".cg")
    count = tl.load(starts + each + 1, each < rows, 0, cache_modifier=".cg") - begin
    # Of all rows, not of this tile's row: so one load does not wait for another.
    length = tl.load(lengths + each, each < rows, 0, cache_modifier=".cg")
    table = tl.load(table_rows + each, each < rows, 0, cache_modifier=".cg").to(tl.int64) if INDIRECT else each.to(tl.int64)
    parts = (tl.minimum(count, TOKENS) * GROUP + ROWS - 1) // ROWS  # of each tile of the row; its last one may have fewer
    items, span, splits = (count + TOKENS - 1) // TOKENS * parts, 0, 1
    if SPLIT > 0:
        longest = tl.max(tl.where(count > 0, length, 0), 0)
        pairs = tl.sum(items.to(tl.float32) * length, 0)
        span = prefill_span(tl.sum(items, 0), longest, pairs, programs, waves, KV_HEADS, KEYS, SPLIT, COST)
        splits, _ = prefill_splits(length, span, KEYS)
    ends = tl.cumsum(items * splits, 0)
    item = tl.max(ends, 0) - 1 - back
    here = (item < ends) & (item >= ends - items * splits)
    place, its_parts = tl.sum(tl.where(here, item - ends + items * splits, 0), 0), tl.sum(tl.where(here, parts, 0), 0)
    its_length, its_parts, split = tl.sum(tl.where(here, length, 0), 0), tl.maximum(its_parts, 1), 0
    if SPLIT > 0:
        its_splits, span = prefill_splits(its_length, span, KEYS)
        place, split, item = prefill_place(item, place, tl.sum(tl.where(here, items, 0), 0), its_splits)
    return (
        tl.where(item < 0, -1, place // its_parts * TOKENS), place % its_parts * ROWS, tl.sum(tl.where(here, begin, 0), 0),
        tl.sum(tl.where(here, count, 0), 0), its_length, tl.sum(tl.where(here, table, 0), 0), split, item, span,
    )  # fmt: skip


@triton.jit
def _finish(
    out, sinks, split_max, totals, outs, arrivals, place, valid, head, member, top, total, mixed, like, split, pieces, item,
    kv_head, slots, value_scale, SPLIT: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Store (maximum [ROWS], sum [ROWS], output [ROWS, WIDTH]) of a tile's part as its output; or where the part has several
    `pieces` leave them, at `item` of the `slots` of this KV head, and the last to arrive merges those of all."""
    if SPLIT > 0 and pieces > 1:
        ROWS: tl.constexpr = mixed.shape[0]
        WIDTH: tl.constexpr = mixed.shape[1]
        group = kv_head * slots + item - split
        if leave_split(split_max, totals, outs, arrivals, group, split, pieces, group, top, total, mixed, None):
            top, total, mixed = merge_splits(split_max, totals, outs, group, pieces, WIDTH, ROWS, ROWS, 1, False)
            _store(out, sinks, place, valid, head, member, top, total, mixed, like, value_scale, SM)
    else:
        _store(out, sinks, place, valid, head, member, top, total, mixed, like, value_scale, SM)


@triton.jit
def _store(out, sinks, place, valid, head, member, top, total, mixed, like, value_scale, SM: tl.constexpr):
    total = with_sinks(sinks, top, total, head, member)
    result = mixed * tl.where(total > 0, value_scale / total, 0.0)[:, None]
    tl.store(out + place, nearest(result, like, SM), valid)


@triton.jit
def _attended(
    query, scales, last, key_cache, value_cache, token_scales, table, block, begin, low, full, end, head, window,
    DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, WINDOWED: tl.constexpr, COPIES: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """query [ROWS, WIDTH] over keys low .. end - 1 of a row, begin <= low a multiple of RUN -> (maximum [ROWS], sum [ROWS], output
    [ROWS, WIDTH], yet to be divided by the sum). scales [ROWS]: of the scores, above 0, log2(e) among them; last [ROWS]: the last
    visible key of each; keys before `full` are visible to all, but for the window. block: of the first KEYS. The scales of int8:
    see `_with_token_scales`."""
    ROWS: tl.constexpr = query.shape[0]
    WIDTH: tl.constexpr = query.shape[1]
    INT8: tl.constexpr = key_cache.dtype.element_ty == tl.int8
    QUANTIZED: tl.constexpr = INT8 or key_cache.dtype.element_ty == tl.uint8
    dim = tl.arange(0, WIDTH)[None, :]
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        token = at + tl.arange(0, KEYS)
        next_block = _blocks(table, at + KEYS, end, KEYS, RUN, BLOCK_SIZE)
        place = _places(block, at, head, 1, KEYS, RUN, BLOCK_SIZE, DIM, KV_HEADS * DIM)[:, None] + dim
        # Keys that are not visible may be read, from any block, as their scores are replaced.
        key = tl.load(key_cache + place) if DIM == WIDTH else tl.load(key_cache + place, dim < DIM, 0)
        # Values that no token attends to are not read: stale memory may contain NaN, which a factor of 0 does not remove.
        read = (token >= low) & (token < end)
        if QUANTIZED:
            key = widened(key, query, SM)
        score = _dot(query, tl.trans(key), tl.zeros([ROWS, KEYS], tl.float32), SM)
        if INT8:
            score, inverse = _with_token_scales(
                score * scales[:, None], 1, token_scales, block, at, head, read, 1, KEYS, RUN, BLOCK_SIZE, KV_HEADS, COPIES, SM
            )  # fmt: skip
        if WINDOWED:
            visible = (token[None, :] <= last[:, None]) & (token[None, :] > last[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        elif at + KEYS > full:
            score = tl.where(token[None, :] <= last[:, None], score, float("-inf"))
        if INT8:
            higher = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - higher[:, None])
            summand = weight * inverse
        else:
            higher = tl.maximum(top, tl.max(score, 1) * scales)
            weight = tl.exp2(score * scales[:, None] - higher[:, None])
            summand = weight
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(summand, 1)
        value = tl.load(value_cache + place, read[:, None] & (dim < DIM) if DIM != WIDTH else read[:, None], 0)
        if QUANTIZED:
            value = widened(value, query, SM)
        out = _dot(nearest(weight, query, SM), value, out * fade[:, None], SM)
        top, block = higher, next_block
    return top, total, out


@triton.jit(
    do_not_specialize=["table_stride", "rows", "window", "programs", "waves"],
    do_not_specialize_on_alignment=["tables", "table_rows", "starts", "lengths"],
)
def _prefill(
    query, key_cache, value_cache, token_scales, tables, table_rows, starts, lengths, sinks, out, split_max, totals, outs, arrivals,
    table_stride, rows, window, programs, waves, score_scale, value_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, MOST: tl.constexpr,
    INDIRECT: tl.constexpr, WINDOWED: tl.constexpr, EARLY: tl.constexpr, COPIES: tl.constexpr, ANCHORED: tl.constexpr,
    SPLIT: tl.constexpr, COST: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Programs count splits of parts of tiles from the last, and KV heads. EARLY: see early_lengths; COPIES:
    see `decode._token_scales`; ANCHORED: see batch_invariant; SPLIT, COST: see
    `_tile`."""
    if SM >= 90:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()  # starts, lengths, tables, queries and the newest keys and values: the kernel before may have written all
    QUANTIZED: tl.constexpr = key_cache.dtype.element_ty == tl.uint8 or key_cache.dtype.element_ty == tl.int8
    kv_head, back = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    first, lead, row_begin, count, length, table_row, split, item, span = _tile(
        starts, lengths, table_rows, rows, back, programs, waves, GROUP, KV_HEADS, TOKENS, ROWS, KEYS, MOST, INDIRECT, SPLIT, COST
    )  # fmt: skip
    if SM >= 90 and EARLY:
        gdc_wait()  # also where there is nothing to do: so a kernel that waits for this one has waited for those before it
    if (first < 0) | (first + lead // GROUP >= count):
        return
    earlier = length - count + first  # keys before the tile's first token
    full = earlier + lead // GROUP + 1
    end = earlier + tl.minimum((tl.minimum(lead + ROWS, TOKENS * GROUP) - 1) // GROUP + 1, count - first)
    low = tl.maximum(full - window, 0) if WINDOWED else 0
    RUN: tl.constexpr = min(BLOCK_SIZE & -BLOCK_SIZE, KEYS)  # keys that certainly lie in one block, from a multiple of it on
    STEP: tl.constexpr = KEYS if ANCHORED else RUN
    begin, pieces = low // STEP * STEP, 1
    if SPLIT > 0:
        pieces = (end + span - 1) // span
        begin = split * span
        if begin >= end:  # of an early tile of its row
            return
        end = tl.minimum(end, begin + span)
    table = tables + table_row * table_stride
    block = _blocks(table, begin, end, KEYS, RUN, BLOCK_SIZE)

    member, dim = lead + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = first + member // GROUP
    place = ((row_begin + token).to(tl.int64) * KV_HEADS + kv_head) * GROUP + member % GROUP
    place = tl.multiple_of(place * DIM, [DIM & -DIM])[:, None] + dim[None, :]
    valid = ((member < TOKENS * GROUP) & (token < count))[:, None] & (dim[None, :] < DIM)
    own = tl.load(query + place, valid, 0.0)
    scales, operand = tl.full([ROWS], score_scale, tl.float32), own
    if QUANTIZED and own.dtype == tl.bfloat16:
        operand, powers = _in_fp16(own)
        scales *= powers
    top, total, mixed = _attended(
        operand, tl.maximum(scales, 1e-30), earlier + member // GROUP, key_cache, value_cache, token_scales, table, block, begin,
        low, full, end, kv_head, window, DIM, KV_HEADS, BLOCK_SIZE, RUN, KEYS, STAGES, WINDOWED, COPIES, SM,
    )  # fmt: skip
    _finish(
        out, sinks, split_max, totals, outs, arrivals, place, valid, kv_head * GROUP + member % GROUP, member < TOKENS * GROUP,
        top, total, mixed, own, split, pieces, item, kv_head, waves * programs // KV_HEADS, value_scale, SPLIT, SM,
    )  # fmt: skip


def prefill_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, query_starts: Tensor,
    kv_lengths: Tensor, *, scale: float, window: int | None, kv_scales: tuple[float, float] | None, tiling: PrefillTiling,
    tiles: int | None = None, early_lengths: bool = False, out: Tensor | None = None, sinks: Tensor | None = None,
    token_scales: Tensor | None = None, least_rows: int = 1, batch_invariant: bool = False,
    workspace: SplitKvWorkspace | None = None,
) -> Tensor:  # fmt: skip
    """The kernel of `reference.prefill_attention`, for contiguous queries and caches; tokens of no row are not set in `out`.
    batch_invariant: the keys of a row are divided alike whatever tokens share a tile, where there is a window, too. workspace: of
    this stream; with one, and without a window, programs may share a tile."""
    tokens, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    rows, group = len(kv_lengths), q_heads // kv_heads
    out = torch.empty_like(query) if out is None else out
    tiles = max_prefill_tiles(tokens, rows, group) if tiles is None else tiles
    if not tiles:
        return out
    sm, fp8, each = sm_arch(query.device), key_cache.dtype == torch.float8_e4m3fn, tile_tokens(group)
    key_scale, value_scale = kv_scales or (1.0, 1.0)
    caches = [cache.view(torch.uint8) if fp8 else cache for cache in (key_cache, value_cache)]
    words = None if token_scales is None else token_scales.view(torch.int32)
    parts, width = triton.cdiv(each * group, tiling.rows), max(16, triton.next_power_of_2(head_dim))
    programs, slots, partial = 0, 0, (None, None, None, None)
    if workspace is not None and window is None and not batch_invariant:
        programs = tiling.splits_per_sm * workspace.num_sms
        slots = tiling.waves * programs // kv_heads
        partial = workspace.take(kv_heads * slots, kv_heads * slots, tiling.rows, width)
    _prefill[(max(tiles * parts, slots) * kv_heads,)](
        query, *caches, words, block_tables, kv_lengths if table_rows is None else table_rows, query_starts, kv_lengths, sinks, out,
        *partial, block_tables.stride(0), rows, window or 0, programs, tiling.waves, scale * key_scale * LOG2_E, value_scale,
        GROUP=group, KV_HEADS=kv_heads, DIM=head_dim, WIDTH=width, BLOCK_SIZE=block_size,
        TOKENS=each, ROWS=tiling.rows, KEYS=tiling.keys, STAGES=tiling.stages, MOST=_padded_rows(max(rows, least_rows)),
        INDIRECT=table_rows is not None, WINDOWED=window is not None, EARLY=early_lengths,
        COPIES=max(32 * tiling.warps // tiling.keys, 1), ANCHORED=batch_invariant,
        SPLIT=tiling.split_keys if slots else 0, COST=tiling.split_cost, SM=sm, num_warps=tiling.warps,
        maxnreg=tiling.registers, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out


def _padded_rows(rows: int) -> int:
    """A power of two that is at least `rows`: one of few, as each is a variant of its own."""
    padded = 32
    while padded < rows:
        padded *= 8
    return padded
