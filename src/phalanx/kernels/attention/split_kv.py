# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Split-KV planning on the device: which programs share which keys, for lengths that only the device knows.

Decode attention has as many programs beyond one per row as the GPU runs at once (`DecodeTiling.extra_splits`). They go to the
longest rows: all rows are divided into splits of about as many tokens, so that one long row among short ones does not delay the
batch. A plan serves all layers of a forward that have the same window.

Prefill attention plans in each program (`prefill_span`, `prefill_splits`, `prefill_place`), as its kernels may have no launch
before them that reads the begins of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.attention.heuristics import DecodeTiling, row_class

FIELDS = tl.constexpr(8)
"""Of a split, int32: its row; the index of the row's first split; the row's number of splits; its first token, and the one behind
its last; the row's first visible token; the row of its block table, or -1 where there is no split; and in split r, which need not
be one of row r, the index of row r's first split."""
SPLITS_PER_PROGRAM = 32
"""Splits that one program of the planning kernel writes."""


@triton.jit
def visible_range(length, window, RUN: tl.constexpr, WINDOWED: tl.constexpr):
    """-> (the first visible token, where reading begins, and ends)."""
    low = tl.maximum(length - window, 0) if WINDOWED else 0
    return low, low // RUN * RUN, length


@triton.jit
def load_split(splits, item):
    """-> (row, first split, number of splits, begin, end, low, row of the block table): see FIELDS."""
    place = splits + item * FIELDS
    row, first = tl.load(place, cache_modifier=".cg"), tl.load(place + 1, cache_modifier=".cg")
    count, begin = tl.load(place + 2, cache_modifier=".cg"), tl.load(place + 3, cache_modifier=".cg")
    end, low, table_row = (
        tl.load(place + 4, cache_modifier=".cg"),
        tl.load(place + 5, cache_modifier=".cg"),
        tl.load(place + 6, cache_modifier=".cg"),
    )
    return row, first, count, begin, end, low, table_row


@triton.jit
def load_first_split(splits, row):
    """The index of the row's first split."""
    return tl.load(splits + row * FIELDS + 7, cache_modifier=".cg")


@triton.jit(
    do_not_specialize=["rows", "extra_splits", "min_tiles", "window"], do_not_specialize_on_alignment=["lengths", "table_rows"]
)
def _plan(
    lengths, table_rows, splits, rows, extra_splits, min_tiles, window,
    ROWS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, WINDOWED: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (SPLITS_PER_PROGRAM splits). min_tiles: of a split, at least, where its row has so many. ROWS: at least `rows`. MOST:
    splits of a row, at most."""
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, row < rows, 0)
    _, begin, end = visible_range(length, window, RUN, WINDOWED)
    tiles = tl.cdiv(end - begin, TILE)
    size = tl.maximum(tl.cdiv(tl.sum(tiles, 0), extra_splits), tl.cdiv(tl.max(tiles, 0), MOST))
    size = tl.maximum(size, min_tiles)
    counts = tl.where(row < rows, tl.maximum(tl.cdiv(tiles, size), 1), 0)
    ends = tl.cumsum(counts, 0)
    if tl.program_id(0) == 0:
        tl.store(splits + row * FIELDS + 7, ends - counts, row < rows)

    item = tl.program_id(0) * SPLITS_PER_PROGRAM + tl.arange(0, SPLITS_PER_PROGRAM)
    before = ends[None, :] <= item[:, None]
    item_row, first = tl.sum(before.to(tl.int32), 1), tl.max(tl.where(before, ends[None, :], 0), 1)
    valid = item_row < rows
    length = tl.load(lengths + item_row, valid, 0)
    low, begin, end = visible_range(length, window, RUN, WINDOWED)
    tiles = tl.cdiv(end - begin, TILE)
    count = tl.maximum(tl.cdiv(tiles, size), 1)
    tokens = tl.cdiv(tiles, count) * TILE
    begin += (item - first) * tokens
    place = splits + item * FIELDS
    inside = item < rows + extra_splits
    tl.store(place, item_row, inside)
    tl.store(place + 1, first, inside)
    tl.store(place + 2, count, inside)
    tl.store(place + 3, begin, inside)
    tl.store(place + 4, tl.minimum(begin + tokens, end), inside)
    tl.store(place + 5, tl.zeros([SPLITS_PER_PROGRAM], tl.int32) + low, inside)
    table_row = item_row
    if table_rows is not None:
        table_row = tl.load(table_rows + item_row, valid, -1).to(tl.int32)
    tl.store(place + 6, tl.where(valid, table_row, -1), inside)


@triton.jit
def prefill_span(
    items, longest, pairs, programs, waves, KV_HEADS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr,
    OVERHEAD: tl.constexpr,
):  # fmt: skip
    """Keys of a split, at least, where `items` programs for each KV head would have all keys of their queries: so many that the
    splits of all rows are at most waves * programs // KV_HEADS, and that they end soon. longest: keys of the longest row; pairs,
    fp32: sum over the items of their rows' keys; programs: that the GPU runs at once; waves: so many times that many splits, at
    most; 0: nothing is split. A split has LEAST keys or more where its row has several. OVERHEAD: keys for which a program computes
    as long as it takes to begin, to end, and to be merged.

    With w waves of programs each item may have w * programs // (items * KV_HEADS) splits, and ends after w of them: 100 items of
    132 programs take 1 as long as one item in 1 wave, and 4/5 in 4."""
    span = longest + KEYS
    cost = tl.cdiv(items * KV_HEADS, programs).to(tl.float32) * (longest + OVERHEAD)
    for wave in range(1, waves + 1):
        slots = wave * programs // KV_HEADS
        if slots > items:
            # Either bound leaves no more splits than slots: as many for each item, or each item less than one more than its share.
            share = tl.minimum((longest // (slots // tl.maximum(items, 1))).to(tl.float32), pairs / (slots - items))
            least = tl.maximum((share * 1.0001).to(tl.int32) + KEYS, LEAST)
            estimate = wave * (least + OVERHEAD).to(tl.float32)
            span = tl.where(estimate < cost, least, span)
            cost = tl.minimum(estimate, cost)
    return span


@triton.jit
def prefill_splits(length, least, KEYS: tl.constexpr):
    """Of rows of so many keys -> (number of splits, keys of each but the last: a multiple of KEYS). least: see `prefill_span`."""
    splits = tl.maximum((length + least - 1) // least, 1)
    return splits, ((length + splits - 1) // splits + KEYS - 1) // KEYS * KEYS


@triton.jit
def prefill_place(item, place, items, splits):
    """Program `place` of a row, which is program `item` of all -> (the program's item among the row's `items`, its split, where the
    results of that split are). Programs of one split begin one after the other, so that the items read the same keys at about the
    same time; results of an item lie side by side."""
    items = tl.maximum(items, 1)
    own, split = place % items, place // items
    return own, split, item - place + own * splits + split


def plan(kv_lengths: Tensor, table_rows: Tensor | None, tiling: DecodeTiling, *, window: int | None, block_size: int) -> Tensor:
    """kv_lengths [R] int32, table_rows [R] -> the splits of the rows, int32 [R + tiling.extra_splits, FIELDS]; by a kernel that
    lets none behind it begin early."""
    rows = len(kv_lengths)
    splits = torch.empty(rows + tiling.extra_splits, FIELDS.value, dtype=torch.int32, device=kv_lengths.device)
    _plan[(triton.cdiv(len(splits), SPLITS_PER_PROGRAM),)](
        kv_lengths, table_rows, splits, rows, tiling.extra_splits, triton.cdiv(tiling.chunk, tiling.tile), window or 0,
        ROWS=row_class(rows), MOST=tiling.max_splits, TILE=tiling.tile, RUN=16 if block_size % 16 == 0 else 1,
        WINDOWED=window is not None, SPLITS_PER_PROGRAM=SPLITS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return splits
