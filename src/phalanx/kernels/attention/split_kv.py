# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Which programs of decode attention share which row: a row of one token each, of lengths that only the device knows.

There are as many programs beyond one a row as the GPU has room for (`Split.shares`). They go to the longest rows: all rows are cut
into pieces of about as many tokens, so that one long row among short ones is not waited for. This is found once for all layers of a
forward that look as far back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.attention.split import MOST_PIECES, Split, rows_class

FACTS = tl.constexpr(8)
"""Of a piece, int32: its row; the number of the row's first piece; the row's pieces; where it begins, and
ends; the row's first token that is seen; the row of its table, or -1 where there is no piece; and one that means nothing, so that
a piece lies within 32 bytes."""
AT_ONCE = 32
"""Pieces that one program finds."""


@triton.jit
def seen_of(length, window, RUN: tl.constexpr, WINDOWED: tl.constexpr):
    """-> (the first token that is seen, where reading begins, and ends)."""
    low = tl.maximum(length - window, 0) if WINDOWED else 0
    return low, low // RUN * RUN, length


@triton.jit
def piece_at(pieces_of, item):
    """-> (row, first, pieces, begin, end, low, held): see FACTS."""
    place = pieces_of + item * FACTS
    row, first = tl.load(place, cache_modifier=".cg"), tl.load(place + 1, cache_modifier=".cg")
    pieces, begin = tl.load(place + 2, cache_modifier=".cg"), tl.load(place + 3, cache_modifier=".cg")
    end, low, held = (
        tl.load(place + 4, cache_modifier=".cg"),
        tl.load(place + 5, cache_modifier=".cg"),
        tl.load(place + 6, cache_modifier=".cg"),
    )
    return row, first, pieces, begin, end, low, held


@triton.jit(do_not_specialize=["rows", "shares", "tiles", "window"], do_not_specialize_on_alignment=["lengths", "table_rows"])
def _cut(
    lengths, table_rows, pieces_of, rows, shares, tiles, window,
    ROWS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, WINDOWED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (AT_ONCE pieces). tiles: of a piece, at least, where its row has so many. ROWS: at least `rows`. MOST: pieces of a
    row, at most."""
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, row < rows, 0)
    _, begin, end = seen_of(length, window, RUN, WINDOWED)
    held = tl.cdiv(end - begin, TILE)
    size = tl.maximum(tl.cdiv(tl.sum(held, 0), shares), tl.cdiv(tl.max(held, 0), MOST))
    size = tl.maximum(size, tiles)
    ends = tl.cumsum(tl.where(row < rows, tl.maximum(tl.cdiv(held, size), 1), 0), 0)

    item = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    before = ends[None, :] <= item[:, None]
    mine, first = tl.sum(before.to(tl.int32), 1), tl.max(tl.where(before, ends[None, :], 0), 1)
    there = mine < rows
    length = tl.load(lengths + mine, there, 0)
    low, begin, end = seen_of(length, window, RUN, WINDOWED)
    held = tl.cdiv(end - begin, TILE)
    pieces = tl.maximum(tl.cdiv(held, size), 1)
    each = tl.cdiv(held, pieces) * TILE
    begin += (item - first) * each
    place = pieces_of + item * FACTS
    inside = item < rows + shares
    tl.store(place, mine, inside)
    tl.store(place + 1, first, inside)
    tl.store(place + 2, pieces, inside)
    tl.store(place + 3, begin, inside)
    tl.store(place + 4, tl.minimum(begin + each, end), inside)
    tl.store(place + 5, tl.zeros([AT_ONCE], tl.int32) + low, inside)
    held = mine
    if table_rows is not None:
        held = tl.load(table_rows + mine, there, -1).to(tl.int32)
    tl.store(place + 6, tl.where(there, held, -1), inside)


def cut(kv_lengths: Tensor, table_rows: Tensor | None, split: Split, *, window: int | None, block_size: int) -> Tensor:
    """kv_lengths [R] int32, table_rows [R] -> the pieces of the rows, int32 [R + split.shares, FACTS]; by a kernel that lets none
    behind it begin early."""
    rows = len(kv_lengths)
    pieces = torch.empty(rows + split.shares, FACTS.value, dtype=torch.int32, device=kv_lengths.device)
    _cut[(triton.cdiv(len(pieces), AT_ONCE),)](
        kv_lengths, table_rows, pieces, rows, split.shares, triton.cdiv(split.chunk, split.tile), window or 0,
        ROWS=rows_class(rows), MOST=MOST_PIECES, TILE=split.tile, RUN=16 if block_size % 16 == 0 else 1,
        WINDOWED=window is not None, AT_ONCE=AT_ONCE, num_warps=4,
    )  # fmt: skip
    return pieces
