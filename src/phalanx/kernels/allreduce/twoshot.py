# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Two-shot all-reduce: rank r adds up the r-th share of everybody's tensor, then pushes the sum to all.

    share r of out = round(x[0] + ... + x[world - 1]) there, in fp32, in rank order, rounded once
    twoshot_norm: then what `residual_rms_norm` does with it, on every rank for every row: sending norm and residual instead of
    the sum would put more on the wire, which is what a large message waits for
    with scales (fp32 pointers; None without): x[r] stands for round(x[r] * row_scales[:, None] * column_scales)

Two hops, 2 (world - 1) / world tensors out and in per rank. A call's half holds [world - 1][share] parts by `slot`, then the sums
[vectors] in the message's order.

The first `movers` programs of the grid push and sum; the others collect sums as they come. Where all are movers, they collect
when they have moved. A mover pushes all of its parts before it waits for any, and nobody waits for a program that does not run:
the whole grid must fit the GPU at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce.oneshot import gather_sum
from phalanx.kernels.allreduce.signals import at, clear, dependents, draw_ticket, enter, leave, poll, push, seal, slot
from phalanx.kernels.ops.residual_rms_norm import finish_row
from phalanx.kernels.vectors import load, load_product, pack, store, unpack


@triton.jit
def scatter(
    x, row_scales, column_scales, pitch, peers, offset, vectors, share, movers,
    SM: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push each peer's share of my tensor to it."""
    for block in range(tl.program_id(0), tl.cdiv(share, BLOCK), movers):
        index = block * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            source = (RANK + step) % WORLD * share + index
            mask = (index < share) & (source < vectors)
            place = slot((RANK + step) % WORLD, RANK, WORLD) * share.to(tl.int64) * 16
            address = at(peers[(RANK + step) % WORLD] + offset + place, index, mask)
            push(address, seal(load_product(x, row_scales, column_scales, source, pitch, mask, KIND, SM)))


@triton.jit
def _sum_and_push(
    x, row_scales, column_scales, pitch, out, peers, offset, vectors, share, movers,
    SM: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Add up my share and push it to all: with NORM into my own half too, else into out."""
    sums = offset + (WORLD - 1) * share.to(tl.int64) * 16
    for block in range(tl.program_id(0), tl.cdiv(share, BLOCK), movers):
        index = block * BLOCK + tl.arange(0, BLOCK)
        place = RANK * share + index
        mask = (index < share) & (place < vectors)
        own = load_product(x, row_scales, column_scales, place, pitch, mask, KIND, SM)
        total = gather_sum(own, peers[RANK] + offset, index, mask, share, KIND, RANK, WORLD, BLOCK, WARPS)
        words = pack(total, KIND, SM)
        sealed = seal(words)
        for step in tl.static_range(1, WORLD):
            push(at(peers[(RANK + step) % WORLD] + sums, place, mask), sealed)
        if NORM:
            push(at(peers[RANK] + sums, place, mask), sealed)
        else:
            store(out, place, words, mask, SM)


@triton.jit
def _collector(movers, programs):
    """(first, step) of the blocks that this program collects; none of them below zero."""
    own = tl.program_id(0)
    first = tl.where(movers == programs, own, own - movers)
    return tl.where(first < 0, 0x7FFFFFFF, first), tl.where(movers == programs, programs, programs - movers)


@triton.jit(do_not_specialize=["vectors", "share", "half", "movers", "row_scales", "pitch"])
def twoshot(
    x, out, peers, turn, half, vectors, share, movers, row_scales, column_scales, pitch,
    KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of x, `vectors` vectors of 16 bytes.

    share: vectors that each rank adds up, world x share >= vectors; peers: the address of each rank's workspace; half: vectors in
    one of its halves; pitch: vectors of a row, None without scales.
    """
    dependents(SM)
    number = enter(turn, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    moves = tl.program_id(0) < movers
    if moves:
        scatter(x, row_scales, column_scales, pitch, peers, offset, vectors, share, movers, SM, KIND, RANK, WORLD, BLOCK)
    ticket = draw_ticket(turn, programs)
    if moves:
        _sum_and_push(
            x, row_scales, column_scales, pitch, out, peers, offset, vectors, share, movers,
            SM, KIND, RANK, WORLD, BLOCK, WARPS, False,
        )  # fmt: skip
    mine = peers[RANK] + offset + (WORLD - 1) * share.to(tl.int64) * 16
    first, hop = _collector(movers, programs)
    for block in range(first, tl.cdiv(share, BLOCK), hop):
        index = block * BLOCK + tl.arange(0, BLOCK)
        addresses = ()
        for step in tl.static_range(1, WORLD):
            place = (RANK + step) % WORLD * share + index
            addresses = addresses + (at(mine, place, (index < share) & (place < vectors)),)
        words = poll(addresses, BLOCK, WARPS)
        for step in tl.static_range(1, WORLD):
            clear(addresses[step - 1])
            place = (RANK + step) % WORLD * share + index
            store(out, place, words[4 * step - 4 : 4 * step], (index < share) & (place < vectors), SM)
    leave(turn, programs, ticket)


@triton.jit(do_not_specialize=["rows", "hidden", "share", "half", "movers", "row_scales"])
def twoshot_norm(
    x, residual, weight, sinks, scale, peers, turn, half, rows, hidden, share, movers, eps, row_scales, column_scales,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x [rows, hidden], its residual, norm and quantization. BLOCK: vectors that hold a row; FLAT: vectors
    that a program moves at once."""
    dependents(SM)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    vectors = rows * pitch
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    factors = load(weight, column, mask, SM)  # no kernel before this one writes weights
    number = enter(turn, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    moves = tl.program_id(0) < movers
    if moves:
        scatter(x, row_scales, column_scales, pitch, peers, offset, vectors, share, movers, SM, KIND, RANK, WORLD, FLAT)
    ticket = draw_ticket(turn, programs)
    if moves:
        _sum_and_push(
            x, row_scales, column_scales, pitch, x, peers, offset, vectors, share, movers,
            SM, KIND, RANK, WORLD, FLAT, WARPS, True,
        )  # fmt: skip
    mine = peers[RANK] + offset + (WORLD - 1) * share.to(tl.int64) * 16
    first, hop = _collector(movers, programs)
    # Shares fill up side by side: so rows are taken from each share in turn.
    depth = tl.cdiv(rows, WORLD)
    for turn_of in range(first, depth * WORLD, hop):
        row = turn_of % WORLD * depth + turn_of // WORLD
        if row < rows:
            index = row * pitch + column
            old = load(residual, index, mask, SM)
            address = at(mine, index, mask)
            words = poll((address,), BLOCK, WARPS)
            clear(address)
            finish_row(
                unpack(words, KIND), old, factors, row, column, mask, sinks, scale, hidden, eps,
                KIND, QUANT, KEEP_NORM, BLOCK, SM,
            )  # fmt: skip
    leave(turn, programs, ticket)
