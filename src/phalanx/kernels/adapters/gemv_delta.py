# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The delta of one token's adapter inside the GEMV of the layer: no launch more, and the ops fused behind the GEMV stay.

    low[p * R + r] = round(sum over k of x[k] * a[slot, p * R + r, k])
    out[n] = round(sum over k of x[k] * weight[n, k] + bias[n] + sum over r of low[part of n * R + r] * b[slot, n, r])

The first programs compute `low`, one number each (`publish_sum`), as others compute rows of the weight. Those add it up with their
rows of b, which they load before the kernel waits for the one before it.

A sum travels in one word with the number of the step, which is the upper half of an int64. A thread reads its words until they have
the number of its step: it needs no barrier, and no word is ever cleared. The programs that it waits for have begun before it, as a
GPU begins programs in their order. Each layer has words of its own; the kernel that writes them again waits for all that read them.

A program is short, and so nothing may delay the loads of its weight: an address is one load away at most, and what lies beyond a
rank within RANKS is zero in b, and published as zero, rather than left out by a mask that would have to be loaded first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.adapters.columns import num_parts, part_of
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.gemv import row_sums, tile
from phalanx.kernels.gemm.heuristics import GemvTiling
from phalanx.kernels.scaled_tensors import GemvArgs
from phalanx.kernels.vectors import nearest

RANKS = tl.constexpr(16)
"""That are added at a time."""
PUBLISHED_BLOCK = 32
"""Columns for each thread that a program of `low` loads at once: a whole row of 4,096 for four warps."""

_UNTIL_READY = tl.constexpr("""{
  .reg .pred %wait;
  .reg .b64 %word;
  .reg .b32 %low, %number;
  mov.b64 %word, $1;
  mov.b64 {%low, %number}, %word;
  setp.ne.b32 %wait, %number, $3;
  @!%wait bra READY;
AGAIN:
  ld.volatile.global.b64 %word, [$2];
  mov.b64 {%low, %number}, %word;
  setp.ne.b32 %wait, %number, $3;
  @%wait bra AGAIN;
READY:
  mov.b32 $0, %low;
}""")


@triton.jit
def occupant(tiles):
    """The slot of the one token's adapter, and whether it has one; 0 where it has none."""
    slot, begin, end = tl.load(tiles).to(tl.int64), tl.load(tiles + 1), tl.load(tiles + 2)
    has = (slot >= 0) & (begin < end)
    return tl.where(has, slot, 0), has


@triton.jit
def publish_sum(x, adapter, RUNS: tl.constexpr, ROOM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    """Program number n of such a kernel publishes low[n]: 0 beyond the rank, which costs no more than that. adapter: a tuple of the
    tensors of `GemvDelta`."""
    a, _, sums, tiles, ranks, step = adapter
    slot, has = occupant(tiles)
    parts: tl.constexpr = num_parts(RUNS)
    at = tl.program_id(0)
    row = at + tl.arange(0, 1)
    number = tl.load(step).to(tl.int64)
    valid = (row % ROOM < tl.load(ranks + slot * parts + at // ROOM)) & has
    column, inside, place, next_values = tile(a + slot * (parts * ROOM) * COLUMNS, row, valid, COLUMNS, BLOCK)
    if SM >= 90:
        gdc_wait()
    total = row_sums(x, column, inside, place, next_values, COLUMNS, 1, BLOCK)
    low = nearest(total, tl.zeros([1], a.dtype.element_ty), SM).to(tl.float32)
    word = (number << 32) | (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(sums + row, word, sem="relaxed")


@triton.jit
def factors_of(adapter, row, valid, outputs, RUNS: tl.constexpr, ROOM: tl.constexpr):
    """What is ready before the kernel waits, of outputs `row` [ROWS]: (their parts, the addresses of the first RANKS factors [ROWS,
    RANKS], the factors)."""
    _, b, _, tiles, _, _ = adapter
    slot, has = occupant(tiles)
    place = b + (slot * outputs + row)[:, None] * ROOM + tl.arange(0, RANKS)[None, :]
    return part_of(row, RUNS), place, tl.load(place, (valid & has)[:, None], 0.0)


@triton.jit
def words_of(adapter, part, ROOM: tl.constexpr):
    """(The addresses of the first RANKS words of each part [ROWS], what they hold now, the number of the step)."""
    place = adapter[2] + part[:, None] * ROOM + tl.arange(0, RANKS)[None, :]
    return place, tl.load(place, volatile=True), tl.load(adapter[5])


@triton.jit
def _ready(place, word, number, SM: tl.constexpr):
    """The sums in words, which are read again until they are those of step `number`; an interpreter's programs run in turn."""
    if SM > 0:
        low = tl.inline_asm_elementwise(
            _UNTIL_READY, "=r,l,l,r", [word, place, number + (word * 0).to(tl.int32)], tl.int32, is_pure=False, pack=1
        )
    else:
        low = word.to(tl.int32)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def add_delta(total, words, factors, adapter, part, place, RUNS: tl.constexpr, ROOM: tl.constexpr, SM: tl.constexpr):
    """total [ROWS] fp32 + b low. words: of `words_of`; part, place, factors: of `factors_of`."""
    _, _, _, tiles, ranks, _ = adapter
    word_place, word, number = words
    total += tl.sum(factors.to(tl.float32) * _ready(word_place, word, number, SM), 1)
    if ROOM > RANKS:
        slot, has = occupant(tiles)
        rank = tl.load(ranks + slot * num_parts(RUNS) + part, has, 0)
        for at in range(RANKS, tl.max(rank, 0), RANKS):
            more = tl.load(place + at, at + tl.arange(0, RANKS)[None, :] < rank[:, None], 0.0)
            word = tl.load(word_place + at, volatile=True)
            total += tl.sum(more.to(tl.float32) * _ready(word_place + at, word, number, SM), 1)
    return total


@triton.jit
def _gemv(
    x, weight, bias, out, rows, a, b, sums, tiles, ranks, step, RUNS: tl.constexpr, ROOM: tl.constexpr, PUBLISHED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
    adapter = (a, b, sums, tiles, ranks, step)
    program = tl.program_id(0) - num_parts(RUNS) * ROOM
    if program < 0:
        publish_sum(x, adapter, RUNS, ROOM, COLUMNS, PUBLISHED, SM)
        return
    row = program * ROWS + tl.arange(0, ROWS)
    column, inside, place, next_values = tile(weight, row, row < rows, COLUMNS, BLOCK)
    part, place_b, factors = factors_of(adapter, row, row < rows, rows, RUNS, ROOM)
    total = tl.zeros([ROWS], tl.float32)
    if bias is not None:
        total += tl.load(bias + row, row < rows, 0.0).to(tl.float32)
    if SM >= 90:
        gdc_wait()
    words = words_of(adapter, part, ROOM)
    total += row_sums(x, column, inside, place, next_values, COLUMNS, ROWS, BLOCK)
    total = add_delta(total, words, factors, adapter, part, place_b, RUNS, ROOM, SM)
    tl.store(out + row, nearest(total, tl.zeros([ROWS], out.dtype.element_ty), SM), row < rows)


def published_block(inputs: int, warps: int) -> int:
    """How many columns a program of `low` loads at once."""
    return int(min(triton.next_power_of_2(inputs), PUBLISHED_BLOCK * 32 * warps))


def gemv(args: GemvArgs, out: Tensor | None, tiling: GemvTiling) -> Tensor:
    """args: in 16 or 32 bit, with a delta. Returns [1, out] in args.dtype, in `out` where one is given."""
    assert args.delta is not None
    outputs, inputs = args.weight.shape
    out = torch.empty((1, outputs), dtype=args.dtype, device=args.x.device) if out is None else out
    sm = sm_arch(args.x.device)
    _gemv[(args.delta.programs + triton.cdiv(outputs, tiling.rows),)](
        args.x, args.weight, args.bias, out, outputs, *args.delta.tensors, RUNS=args.delta.runs, ROOM=args.delta.room,
        PUBLISHED=published_block(inputs, tiling.warps), COLUMNS=inputs, ROWS=tiling.rows, BLOCK=tiling.block, SM=sm,
        num_warps=tiling.warps, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
