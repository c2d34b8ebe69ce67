# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The second half of an adapter's delta, times B, added to a layer's output: of all adapters and all parts in one launch.

    out[order[n], c] += sum over ranks r of (sum over splits s of low[s, n, part of c * R + r]) * b[slot of n, c, r]

The inner sum is rounded to the dtype of b, as an output of A would be, and the outer one to that of out. The loop ends at the rank
of the adapter's part: a slot with room for more costs nothing. A tile without tokens is skipped."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.adapters.rows import COLUMNS, AdapterFactors, AdapterRows
from phalanx.kernels.adapters.shrink import RANKS
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.vectors import nearest


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    out, low, b, order, tiles, columns, ranks, tokens, outputs, parts, room, SPLITS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    tile, run = tl.program_id(0), tl.program_id(1)
    slot, begin, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    part, first, last = tl.load(columns + 3 * run), tl.load(columns + 3 * run + 1), tl.load(columns + 3 * run + 2)
    rank = tl.load(ranks + slot * parts + part)
    if (rank > 0) & (begin < end):
        place = begin + tl.arange(0, TILE)
        column = first + tl.arange(0, COLUMNS)
        inside, is_column = place < end, column < last
        total = tl.zeros([TILE, COLUMNS], tl.float32)
        for at in range(0, rank, RANKS):
            r = at + tl.arange(0, RANKS)
            values = tl.zeros([TILE, RANKS], tl.float32)
            for split in tl.static_range(SPLITS):
                row = (split * tokens.to(tl.int64) + place)[:, None] * (parts * room) + part * room
                values += tl.load(low + row + r[None, :], inside[:, None], 0.0)
            row = (slot.to(tl.int64) * outputs + column)[None, :] * room
            factors = tl.load(b + row + r[:, None], is_column[None, :], 0.0)
            total = tl.dot(nearest(values, factors, SM), factors, total, input_precision="ieee")
        token = tl.load(order + place, inside, 0)
        target = out + token[:, None] * outputs + column[None, :]
        mask = inside[:, None] & is_column[None, :]
        before = tl.load(target, mask, 0.0)
        tl.store(target, nearest(before.to(tl.float32) + total, before, SM), mask)


def expand(out: Tensor, low: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """out [T, out], contiguous, in place; low: of `shrink`."""
    assert out.is_contiguous()
    sm = sm_arch(out.device)
    _expand[(len(rows.tiles), len(factors.tiles))](
        out, low, factors.b, rows.order, rows.tiles, factors.tiles, factors.ranks, len(rows.order), out.shape[1],
        factors.ranks.shape[1], factors.b.shape[2], SPLITS=len(low), TILE=rows.tile, COLUMNS=COLUMNS, RANKS=RANKS, SM=sm,
        num_warps=4, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
