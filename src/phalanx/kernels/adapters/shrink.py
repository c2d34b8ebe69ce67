# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The first half of an adapter's delta, x times A: of all adapters and all parts of a layer in one launch.

    low[s, n, p * R + r] = sum over columns k of split s of x[order[n], k] * a[slot of n, p * R + r, k]        in fp32

Programs share the columns (split-K): few tokens would leave most of a GPU idle. `expand` adds the splits up, always in the same
order. Their number depends on the layer alone. Ranks that a part does not have are neither computed nor written.

It is launched before the layer's own GEMM, behind the kernel that writes x: it waits for that one, but has the first factors
loaded, which no kernel writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.adapters.rows import FEW, AdapterFactors, AdapterRows
from phalanx.kernels.capabilities import sm_arch

SPLIT_COLUMNS, MAX_SPLITS = 1024, 8


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x, a, low, order, tiles, ranks, tokens, inputs, parts, room, TILE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """RANKS: rows of a that a program computes, of one part or of several. SPLIT: columns of a split, a multiple of BLOCK."""
    if SM >= 90:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(2)
    slot, begin, end = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    part = rank // room
    computed = (rank - part * room < tl.load(ranks + slot * parts + part, part < parts, 0)) & (begin < end)
    place = begin + tl.arange(0, TILE)
    inside = place < end
    token = tl.load(order + place, inside, 0)
    k = split * SPLIT + tl.arange(0, BLOCK)
    row = a + (slot * (parts * room) + rank)[None, :] * inputs
    factors = tl.load(row + k[:, None], computed[None, :] & (k < inputs)[:, None], 0.0)
    if SM >= 90:
        gdc_wait()
    if tl.max(computed.to(tl.int32), 0) > 0:
        total = tl.zeros([TILE, RANKS], tl.float32)
        for _ in range(SPLIT // BLOCK):
            values = tl.load(x + token[:, None] * inputs + k[None, :], inside[:, None] & (k < inputs)[None, :], 0.0)
            total = tl.dot(values, factors, total, input_precision="ieee")
            k += BLOCK
            in_split = (k < inputs) & (k < (split + 1) * SPLIT)
            factors = tl.load(row + k[:, None], computed[None, :] & in_split[:, None], 0.0)
        target = (split.to(tl.int64) * tokens + place)[:, None] * (parts * room) + rank[None, :]
        tl.store(low + target, total, inside[:, None] & computed[None, :])


def shrink(x: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """x [T, in], contiguous -> low [splits, N, parts * R] fp32; what no part's rank reaches is not written."""
    inputs, width = x.shape[1], factors.a.shape[1]
    split = split_columns(inputs)
    splits = triton.cdiv(inputs, split)
    low = torch.empty((splits, len(rows.order), width), dtype=torch.float32, device=x.device)
    ranks, block = tile_sizes(rows.tile, width, x.dtype.itemsize)
    sm = sm_arch(x.device)
    _shrink[(len(rows.tiles), triton.cdiv(width, ranks), splits)](
        x, factors.a, low, rows.order, rows.tiles, factors.ranks, len(rows.order), inputs, factors.ranks.shape[1],
        factors.b.shape[2], TILE=rows.tile, RANKS=ranks, BLOCK=min(block, split), SPLIT=split, SM=sm, num_warps=4,
        launch_pdl=sm >= 90,
    )  # fmt: skip
    return low


def split_columns(inputs: int) -> int:
    """How many of a layer's inputs each split has: a power of two times 128, so that few variants are compiled."""
    wanted = max(128, min(SPLIT_COLUMNS, inputs), triton.cdiv(inputs, MAX_SPLITS))
    return int(triton.next_power_of_2(wanted))


def tile_sizes(tokens: int, width: int, itemsize: int) -> tuple[int, int]:
    """(RANKS, BLOCK) of a program with a tile of so many tokens. Of few tokens, which wait for memory alone, programs are many, and
    load as much at once as registers hold; of many, programs read x once for all parts, up to 64 ranks."""
    if tokens == FEW:
        return 16, 512 if itemsize == 2 else 64
    return min(64, int(triton.next_power_of_2(width))), 256 // itemsize
