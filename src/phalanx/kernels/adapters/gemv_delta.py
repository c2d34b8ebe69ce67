# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The delta of one token's adapter inside the GEMV of the layer: no launch more, and the ops fused behind the GEMV stay.

    low[p * R + r] = round(sum over k of x[k] * a[slot, p * R + r, k])
    out[n] = round(sum over k of x[k] * weight[n, k] + bias[n] + sum over r of low[part of n * R + r] * b[slot, n, r])

The first programs compute `low` (`publish_sums`), as others compute rows of the weight. Those add it up with their rows of b, which
they load before the kernel waits for the one before it.

A sum travels in one word with the number of the step, which is the upper half of an int64. A program reads words until all have the
number of its step: it needs no barrier, and no word is ever cleared. The programs that it waits for have begun before it, as a GPU
begins programs in their order. Each layer has words of its own; the kernel that writes them again waits for all that read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.gemv import row_sums, tile
from phalanx.kernels.gemm.heuristics import GemvTiling
from phalanx.kernels.scaled_tensors import GemvArgs
from phalanx.kernels.vectors import nearest

RANKS = tl.constexpr(16)
"""That are added at a time."""


@triton.jit
def programs_of_sums(adapter, ROWS: tl.constexpr):
    """How many programs compute `low`, ROWS of it each. adapter: a tuple of what `GemvDelta` has."""
    _, _, _, _, _, _, _, parts, room = adapter
    return parts * room // ROWS


@triton.jit
def publish_sums(x, adapter, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    """Such a program. Ranks that the adapter does not have are neither computed nor written."""
    a, _, sums, _, tiles, ranks, step, parts, room = adapter
    slot, begin, end = tl.load(tiles).to(tl.int64), tl.load(tiles + 1), tl.load(tiles + 2)
    at = tl.program_id(0) * ROWS
    part = at // room
    first, rank = at - part * room, tl.load(ranks + slot * parts + part)
    if (first < rank) & (begin < end):
        row, valid = at + tl.arange(0, ROWS), first + tl.arange(0, ROWS) < rank
        number = tl.load(step).to(tl.int64)
        column, inside, place, next_values = tile(a + slot * (parts * room) * COLUMNS, row, valid, COLUMNS, BLOCK)
        if SM >= 90:
            gdc_wait()
        total = row_sums(x, column, inside, place, next_values, COLUMNS, ROWS, BLOCK)
        low = nearest(total, tl.zeros([ROWS], a.dtype.element_ty), SM).to(tl.float32)
        word = (number << 32) | (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.atomic_xchg(sums + row, word, valid, sem="relaxed")


@triton.jit
def factors_of(adapter, row, valid, outputs):
    """What is ready before the kernel waits, of outputs `row` [ROWS]: (their parts, the ranks of these, the addresses of the first
    RANKS factors [ROWS, RANKS], the factors)."""
    _, b, _, part_of, tiles, ranks, _, parts, room = adapter
    slot, begin, end = tl.load(tiles).to(tl.int64), tl.load(tiles + 1), tl.load(tiles + 2)
    part = tl.load(part_of + row, valid, 0).to(tl.int32)
    rank = tl.load(ranks + slot * parts + part, valid & (begin < end), 0)
    r = tl.arange(0, RANKS)[None, :]
    place = b + (slot * outputs + row)[:, None] * room + r
    return part, rank, place, tl.load(place, r < rank[:, None], 0.0)


@triton.jit
def words_of(adapter, part, rank, at):
    """RANKS words of each part [ROWS] from `at` on; those beyond its rank are ready, and 0."""
    _, _, sums, _, _, _, step, _, room = adapter
    r = at + tl.arange(0, RANKS)[None, :]
    return tl.load(sums + part[:, None] * room + r, r < rank[:, None], tl.load(step).to(tl.int64) << 32, volatile=True)


@triton.jit
def add_delta(total, words, factors, adapter, part, rank, place):
    """total [ROWS] fp32 + b low. words, factors: those of the first RANKS ranks."""
    _, _, _, _, _, _, step, _, _ = adapter
    number = tl.load(step)
    for at in range(0, tl.max(rank, 0), RANKS):
        while tl.min(tl.min(((words >> 32) == number).to(tl.int32), 1), 0) == 0:
            words = words_of(adapter, part, rank, at)
        low = words.to(tl.int32).to(tl.float32, bitcast=True)
        total += tl.sum(factors.to(tl.float32) * low, 1)
        following = at + RANKS
        factors = tl.load(place + following, following + tl.arange(0, RANKS)[None, :] < rank[:, None], 0.0)
        words = words_of(adapter, part, rank, following)
    return total


@triton.jit
def _gemv(
    x, weight, bias, out, rows, a, b, sums, part_of, tiles, ranks, step, parts, room, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
    adapter = (a, b, sums, part_of, tiles, ranks, step, parts, room)
    program = tl.program_id(0) - programs_of_sums(adapter, ROWS)
    if program < 0:
        publish_sums(x, adapter, COLUMNS, ROWS, BLOCK, SM)
        return
    row = program * ROWS + tl.arange(0, ROWS)
    column, inside, place, next_values = tile(weight, row, row < rows, COLUMNS, BLOCK)
    part, rank, place_b, factors = factors_of(adapter, row, row < rows, rows)
    if bias is not None:
        added = tl.load(bias + row, row < rows, 0.0).to(tl.float32)
    if SM >= 90:
        gdc_wait()
    words = words_of(adapter, part, rank, 0)
    total = row_sums(x, column, inside, place, next_values, COLUMNS, ROWS, BLOCK)
    if bias is not None:
        total += added
    total = add_delta(total, words, factors, adapter, part, rank, place_b)
    tl.store(out + row, nearest(total, tl.zeros([ROWS], out.dtype.element_ty), SM), row < rows)


def gemv(args: GemvArgs, out: Tensor | None, tiling: GemvTiling) -> Tensor:
    """args: in 16 or 32 bit, with a delta. Returns [1, out] in args.dtype, in `out` where one is given."""
    assert args.delta is not None
    outputs, inputs = args.weight.shape
    out = torch.empty((1, outputs), dtype=args.dtype, device=args.x.device) if out is None else out
    sm = sm_arch(args.x.device)
    _gemv[(args.delta.programs(tiling.rows) + triton.cdiv(outputs, tiling.rows),)](
        args.x, args.weight, args.bias, out, outputs, *args.delta, COLUMNS=inputs, ROWS=tiling.rows, BLOCK=tiling.block, SM=sm,
        num_warps=tiling.warps, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
