# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The second half of an adapter's delta, times B, added to a layer's output: of all adapters and all parts in one launch.

    out[order[n], c] += sum over ranks r of (sum over splits s of low[s, n, part of c * R + r]) * b[slot of n, c, r]

The inner sum is rounded to the dtype of b, as an output of A would be, and the outer one to that of out. The loop ends at the rank
of the adapter's part: a slot with room for more costs nothing. A tile without tokens is skipped. The first factors are loaded
before the kernel waits for the layer's GEMM."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.adapters.rows import COLUMNS, AdapterFactors, AdapterRows
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.vectors import nearest

RANKS = 16
"""That are multiplied at a time."""


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    out, low, b, order, tiles, columns, ranks, tokens, outputs, parts, room, SPLITS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, ALIGNED: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """ALIGNED: parts begin and end at multiples of that many columns, so that vectors of out are loaded and stored."""
    if SM >= 90:
        gdc_launch_dependents()
    tile, run = tl.program_id(0), tl.program_id(1)
    slot, begin, end = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    part, first, last = tl.load(columns + 3 * run), tl.load(columns + 3 * run + 1), tl.load(columns + 3 * run + 2)
    first, last = tl.multiple_of(first, ALIGNED), tl.multiple_of(last, ALIGNED)
    place, column = begin + tl.arange(0, TILE), first + tl.arange(0, COLUMNS)
    inside, is_column = place < end, column < last
    rank, token = tl.load(ranks + slot * parts + part), tl.load(order + place, inside, 0)
    r = tl.arange(0, RANKS)
    row = b + (slot * outputs + column)[None, :] * room + r[:, None]
    factors = tl.load(row, is_column[None, :] & (r < rank)[:, None] & (begin < end), 0.0)
    if SM >= 90:
        gdc_wait()
    if (rank > 0) & (begin < end):
        mask = inside[:, None] & is_column[None, :]
        target = out + token[:, None] * outputs + column[None, :]
        before = tl.load(target, mask, 0.0)
        total = tl.zeros([TILE, COLUMNS], tl.float32)
        for at in range(0, rank, RANKS):
            values = tl.zeros([TILE, RANKS], tl.float32)
            for split in tl.static_range(SPLITS):
                source = (split * tokens.to(tl.int64) + place)[:, None] * (parts * room) + part * room + at
                values += tl.load(low + source + r[None, :], inside[:, None] & (at + r < rank)[None, :], 0.0)
            total = tl.dot(nearest(values, factors, SM), factors, total, input_precision="ieee")
            following = at + RANKS
            factors = tl.load(row + following, is_column[None, :] & (following + r < rank)[:, None], 0.0)
        tl.store(target, nearest(before.to(tl.float32) + total, before, SM), mask)


def expand(out: Tensor, low: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """out [T, out], contiguous, in place; low: of `shrink`."""
    assert out.is_contiguous()
    sm = sm_arch(out.device)
    _expand[(len(rows.tiles), len(factors.tiles))](
        out, low, factors.b, rows.order, rows.tiles, factors.tiles, factors.ranks, len(rows.order), out.shape[1],
        factors.ranks.shape[1], factors.b.shape[2], SPLITS=len(low), TILE=rows.tile, COLUMNS=COLUMNS, RANKS=RANKS,
        ALIGNED=16 if all(begin % 16 == end % 16 == 0 for _, begin, end in factors.columns) else 1, SM=sm,
        num_warps=8, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
