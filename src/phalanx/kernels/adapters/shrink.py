# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The first half of an adapter's delta, x times A: of all adapters and all parts of a layer in one launch.

    low[s, n, p * R + r] = sum over columns k of split s of x[order[n], k] * a[slot of n, p * R + r, k]        in fp32

Programs share the columns (split-K): few tokens would leave most of a GPU idle. `expand` adds the splits up, always in the same
order. Their number depends on the layer alone, and so does every bit of the result. Ranks that a part does not have are neither
computed nor written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.adapters.rows import AdapterFactors, AdapterRows
from phalanx.kernels.capabilities import sm_arch

RANKS = 16
"""That one program computes."""
SPLIT_COLUMNS, MAX_SPLITS = 1024, 8


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x, a, low, order, tiles, ranks, tokens, inputs, parts, room, TILE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """SPLIT: columns of a split, a multiple of BLOCK."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    tile, column, split = tl.program_id(0), tl.program_id(1) * RANKS, tl.program_id(2)
    slot, begin, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    part = column // room
    if (column - part * room < tl.load(ranks + slot * parts + part)) & (begin < end):
        place = begin + tl.arange(0, TILE)
        inside = place < end
        token = tl.load(order + place, inside, 0)
        rank = column + tl.arange(0, RANKS)
        total = tl.zeros([TILE, RANKS], tl.float32)
        for step in range(SPLIT // BLOCK):
            k = split * SPLIT + step * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x + token[:, None] * inputs + k[None, :], inside[:, None] & (k < inputs)[None, :], 0.0)
            row = (slot.to(tl.int64) * parts * room + rank)[None, :] * inputs
            factors = tl.load(a + row + k[:, None], (k < inputs)[:, None], 0.0)
            total = tl.dot(values, factors, total, input_precision="ieee")
        row = (split.to(tl.int64) * tokens + place)[:, None] * (parts * room)
        tl.store(low + row + rank[None, :], total, inside[:, None])


def shrink(x: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """x [T, in], contiguous -> low [splits, N, parts * R] fp32; what no part's rank reaches is not written."""
    inputs, width = x.shape[1], factors.a.shape[1]
    split, block = split_columns(inputs), 64 if x.dtype == torch.float32 else 128
    splits = triton.cdiv(inputs, split)
    low = torch.empty((splits, len(rows.order), width), dtype=torch.float32, device=x.device)
    sm = sm_arch(x.device)
    _shrink[(len(rows.tiles), width // RANKS, splits)](
        x, factors.a, low, rows.order, rows.tiles, factors.ranks, len(rows.order), inputs, factors.ranks.shape[1],
        factors.b.shape[2], TILE=rows.tile, RANKS=RANKS, BLOCK=block, SPLIT=split, SM=sm, num_warps=4, launch_pdl=sm >= 90,
    )  # fmt: skip
    return low


def split_columns(inputs: int) -> int:
    """How many of a layer's inputs each split has: a power of two times 128, so that few variants are compiled."""
    wanted = max(128, min(SPLIT_COLUMNS, inputs), triton.cdiv(inputs, MAX_SPLITS))
    return int(triton.next_power_of_2(wanted))
