# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The second half of an adapter's delta, times B, added to a layer's output: of all adapters and all parts in one launch.

    out[order[n], c] += sum over ranks r of (sum over splits s of low[s, n, part of c * R + r]) * b[slot of n, c, r]
    silu_mul: round(silu(gate) * up) of that sum, which is then not stored            see `ops.silu_and_mul`

The inner sum is rounded to the dtype of b, as an output of A would be, and the outer one to that of out. The loop ends at the rank
of the adapter's part: a slot with room for more costs nothing. A tile without an adapter is skipped by the first.

An address is one load away at most: the first factors are loaded before the kernel waits for the layer's GEMM, without asking how
many ranks there are, as what lies beyond a rank within RANKS is zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.adapters.columns import num_parts, num_tiles, tile_columns
from phalanx.kernels.adapters.rows import FEW, AdapterFactors, AdapterRows
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.ops.silu_and_mul import silu_mul_rounded
from phalanx.kernels.vectors import nearest

RANKS = 16
"""That are multiplied at a time."""
COLUMNS, PAIRED_COLUMNS = 128, 64
"""Of the output, that a program computes at a time; of each of gate and up."""
MANY_STEPS = 4
"""How many times a program does so, of a tile of many tokens: it begins once."""


@triton.jit
def _tile_delta(
    low, place, inside, row, is_column, factors, part, rank, tokens, width, room, SPLITS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The delta of tokens `place` [TILE] and of the columns whose factors lie at `row` [RANKS, COLUMNS], in fp32. factors: the
    first RANKS of each, which have been loaded."""
    r = tl.arange(0, RANKS)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for at in range(0, rank, RANKS):
        values = tl.zeros([TILE, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            source = (split * tokens.to(tl.int64) + place)[:, None] * width + part * room + at
            values += tl.load(low + source + r[None, :], inside[:, None] & (at + r < rank)[None, :], 0.0)
        total = tl.dot(nearest(values, factors, SM), factors, total, input_precision="ieee")
        following = at + RANKS
        factors = tl.load(row + following, is_column[None, :] & (following + r < rank)[:, None], 0.0)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    out, low, b, order, tiles, ranks, tokens, outputs, room, RUNS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, RANKS: tl.constexpr, ALIGNED: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """ALIGNED: parts begin and end at multiples of that many columns, so that vectors of out are loaded and stored. STEPS: tiles of
    COLUMNS of a program."""
    if SM >= 90:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    slot, begin, end = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    parts: tl.constexpr = num_parts(RUNS)
    part, first, last = tile_columns(tl.program_id(1), RUNS, COLUMNS * STEPS)
    first, last = tl.multiple_of(first, ALIGNED), tl.multiple_of(last, ALIGNED)
    place, r = begin + tl.arange(0, TILE), tl.arange(0, RANKS)
    inside, some = place < end, (slot >= 0) & (begin < end)
    column = first + tl.arange(0, COLUMNS)
    row = b + (slot * outputs + column)[None, :] * room + r[:, None]
    factors = tl.load(row, (column < last)[None, :] & some, 0.0)
    rank, token = tl.load(ranks + slot * parts + part, some, 0), tl.load(order + place, inside, 0)
    if SM >= 90:
        gdc_wait()
    if rank > 0:
        for step in range(STEPS):
            is_column = column < last
            mask = inside[:, None] & is_column[None, :]
            target = out + token[:, None] * outputs + column[None, :]
            before = tl.load(target, mask, 0.0)
            total = _tile_delta(
                low, place, inside, row, is_column, factors, part, rank, tokens, parts * room, room, SPLITS, TILE, COLUMNS, RANKS,
                SM,
            )  # fmt: skip
            tl.store(target, nearest(before.to(tl.float32) + total, before, SM), mask)
            if STEPS > 1:
                column += COLUMNS
                row += COLUMNS * room
                factors = tl.load(row, ((column < last) & (step + 1 < STEPS))[None, :], 0.0)


@triton.jit(do_not_specialize=["tokens"])
def _expand_silu_mul(
    gate_up, out, low, b, order, tiles, ranks, tokens, width, room, SPLITS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, RANKS: tl.constexpr, GELU: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Of a layer of two parts of `width` outputs each; tokens without an adapter, too."""
    if SM >= 90:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    slot, begin, end = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    place, r = begin + tl.arange(0, TILE), tl.arange(0, RANKS)
    inside, some = place < end, (slot >= 0) & (begin < end)
    column = tl.program_id(1) * (COLUMNS * STEPS) + tl.arange(0, COLUMNS)
    row, to_up = b + (slot * (2 * width) + column)[None, :] * room + r[:, None], width.to(tl.int64) * room
    gate_factors = tl.load(row, (column < width)[None, :] & some, 0.0)
    up_factors = tl.load(row + to_up, (column < width)[None, :] & some, 0.0)
    gate_rank, up_rank = tl.load(ranks + slot * 2, some, 0), tl.load(ranks + slot * 2 + 1, some, 0)
    token = tl.load(order + place, inside, 0)
    if SM >= 90:
        gdc_wait()
    if begin < end:
        for step in range(STEPS):
            is_column = column < width
            mask = inside[:, None] & is_column[None, :]
            source = gate_up + token[:, None] * (2 * width) + column[None, :]
            gate, up = tl.load(source, mask, 0.0), tl.load(source + width, mask, 0.0)
            gate_delta = _tile_delta(
                low, place, inside, row, is_column, gate_factors, 0, gate_rank, tokens, 2 * room, room, SPLITS, TILE, COLUMNS,
                RANKS, SM,
            )  # fmt: skip
            up_delta = _tile_delta(
                low, place, inside, row + to_up, is_column, up_factors, 1, up_rank, tokens, 2 * room, room,
                SPLITS, TILE, COLUMNS, RANKS, SM
            )  # fmt: skip
            gate = nearest(gate.to(tl.float32) + gate_delta, gate, SM)
            up = nearest(up.to(tl.float32) + up_delta, up, SM)
            tl.store(out + token[:, None] * width + column[None, :], silu_mul_rounded(gate, up, SM, GELU), mask)
            if STEPS > 1:
                column += COLUMNS
                row += COLUMNS * room
                follows = ((column < width) & (step + 1 < STEPS) & some)[None, :]
                gate_factors = tl.load(row, follows, 0.0)
                up_factors = tl.load(row + to_up, follows, 0.0)


def expand(out: Tensor, low: Tensor, factors: AdapterFactors, rows: AdapterRows) -> Tensor:
    """out [T, out], contiguous, in place; low: of `shrink`."""
    assert out.is_contiguous()
    sm, steps = sm_arch(out.device), 1 if rows.tile == FEW else MANY_STEPS
    _expand[(len(rows.tiles), num_tiles(factors.columns, COLUMNS * steps))](
        out, low, factors.b, rows.order, rows.tiles, factors.ranks, len(rows.order), out.shape[1], factors.b.shape[2],
        RUNS=factors.columns, SPLITS=len(low), TILE=rows.tile, COLUMNS=COLUMNS, STEPS=steps, RANKS=RANKS,
        ALIGNED=16 if all(begin % 16 == end % 16 == 0 for _, begin, end in factors.columns) else 1, SM=sm,
        num_warps=8, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out


def pairs(factors: AdapterFactors) -> bool:
    """Whether `expand_silu_mul` takes the layer: two parts of one width."""
    width = factors.b.shape[1] // 2
    return factors.columns == ((0, 0, width), (1, width, 2 * width))


def expand_silu_mul(gate_up: Tensor, low: Tensor, factors: AdapterFactors, rows: AdapterRows, *, gelu: bool) -> Tensor:
    """gate_up [T, 2 * I], contiguous, of a layer that `pairs` -> silu(gate) * up [T, I], once the delta has been added."""
    assert gate_up.is_contiguous()
    width = gate_up.shape[1] // 2
    sm, steps = sm_arch(gate_up.device), 1 if rows.tile == FEW else MANY_STEPS
    out = torch.empty((len(gate_up), width), dtype=gate_up.dtype, device=gate_up.device)
    _expand_silu_mul[(len(rows.tiles), triton.cdiv(width, PAIRED_COLUMNS * steps))](
        gate_up, out, low, factors.b, rows.order, rows.tiles, factors.ranks, len(rows.order), width, factors.b.shape[2],
        SPLITS=len(low), TILE=rows.tile, COLUMNS=PAIRED_COLUMNS, STEPS=steps, RANKS=RANKS, GELU=gelu, SM=sm, num_warps=8,
        launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
