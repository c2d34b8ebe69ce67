# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Two-shot all-reduce: rank r adds up the r-th share of everybody's tensor, then pushes the sum to all.

    share r of out = round(x[0] + ... + x[world - 1]) there, in fp32, in rank order, rounded once
    twoshot_norm: then what `residual_rms_norm` does with it, on every rank for every row: sending norm and residual instead of
    the sum would put more on the wire, which is what a large message waits for

Two hops, 2 (world - 1) / world tensors out and in per rank. A call's half holds [world - 1][share] parts by `slot`, then the sums
[vectors] in the message's order.

The first `movers` programs of the grid push and sum; the others collect sums as they come. Where all are movers, they collect
when they have moved. A mover pushes all of its parts before it waits for any (or keeps AHEAD of what it waits for), and nobody
waits for a program that does not run: the whole grid must fit the GPU at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce_oneshot import gather_sum
from phalanx.kernels.residual_rms_norm import finish_row
from phalanx.kernels.signals import at, clear, dependents, draw_ticket, enter, leave, poll, push, seal, slot
from phalanx.kernels.vectors import load, pack, store, unpack


@triton.jit
def _peer(peers, hop, RANK: tl.constexpr, WORLD: tl.constexpr):
    """The address of the workspace of the rank that stands `hop` (1 .. WORLD - 1) behind mine; hop may be a value."""
    base = peers[(RANK + 1) % WORLD]
    for step in tl.static_range(2, WORLD):
        base = tl.where(hop == step, peers[(RANK + step) % WORLD], base)
    return base


@triton.jit
def _scatter_block(
    x, peers, offset, vectors, share, block,
    PTX: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, SPREAD: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Push to each peer a block of its share of my tensor, into my slot there. SPREAD: blocks begin with different peers, so that
    at no time all of them go one way."""
    index = block * BLOCK + tl.arange(0, BLOCK)
    pitch = share.to(tl.int64) * 16
    words = ()
    if TOGETHER:
        for step in tl.static_range(1, WORLD):
            source = (RANK + step) % WORLD * share + index
            words = words + (load(x, source, (index < share) & (source < vectors), PTX),)
    for step in tl.static_range(1, WORLD):
        if SPREAD and not TOGETHER:
            hop = 1 + (step - 1 + block) % (WORLD - 1)
            source = (RANK + hop) % WORLD * share + index
            mask = (index < share) & (source < vectors)
            # slot(RANK + hop, RANK, WORLD) is WORLD - 1 - hop.
            address = at(_peer(peers, hop, RANK, WORLD) + offset + (WORLD - 1 - hop) * pitch, index, mask)
            push(address, seal(load(x, source, mask, PTX)))
        else:
            source = (RANK + step) % WORLD * share + index
            mask = (index < share) & (source < vectors)
            address = at(peers[(RANK + step) % WORLD] + offset + slot((RANK + step) % WORLD, RANK, WORLD) * pitch, index, mask)
            if TOGETHER:
                push(address, seal(words[step - 1]))
            else:
                push(address, seal(load(x, source, mask, PTX)))


@triton.jit
def _sum_block(
    x, out, peers, offset, vectors, share, block,
    PTX: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
    NORM: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Add up a block of my share and push it to all: with NORM into my own half too, else into out."""
    sums = offset + (WORLD - 1) * share.to(tl.int64) * 16
    index = block * BLOCK + tl.arange(0, BLOCK)
    place = RANK * share + index
    mask = (index < share) & (place < vectors)
    own = load(x, place, mask, PTX)
    total = gather_sum(own, peers[RANK] + offset, index, mask, share, KIND, RANK, WORLD, BLOCK, WARPS)
    words = pack(total, KIND, PTX)
    sealed = seal(words)
    for step in tl.static_range(1, WORLD):
        if SPREAD:
            push(at(_peer(peers, 1 + (step - 1 + block) % (WORLD - 1), RANK, WORLD) + sums, place, mask), sealed)
        else:
            push(at(peers[(RANK + step) % WORLD] + sums, place, mask), sealed)
    if NORM:
        push(at(peers[RANK] + sums, place, mask), sealed)
    else:
        store(out, place, words, mask, PTX)


@triton.jit
def _move(
    x, out, peers, turn, offset, vectors, share, movers,
    PTX: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
    NORM: tl.constexpr, AHEAD: tl.constexpr, SPREAD: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A mover's part, and every program's ticket. With AHEAD a block is summed when so many more of the mover's blocks have been
    pushed: what it waits for, the same mover of each peer has pushed before it waits for anything later, so nobody waits in a
    circle."""
    first = tl.program_id(0)
    moves = first < movers
    blocks = tl.cdiv(share, BLOCK)
    if AHEAD == 0:
        if moves:
            for block in range(first, blocks, movers):
                _scatter_block(x, peers, offset, vectors, share, block, PTX, RANK, WORLD, BLOCK, SPREAD, TOGETHER)
        ticket = draw_ticket(turn, tl.num_programs(0))
        if moves:
            for block in range(first, blocks, movers):
                _sum_block(x, out, peers, offset, vectors, share, block, PTX, KIND, RANK, WORLD, BLOCK, WARPS, NORM, SPREAD)
    else:
        ticket = draw_ticket(turn, tl.num_programs(0))
        if moves:
            for block in range(first, blocks + AHEAD * movers, movers):
                if block < blocks:
                    _scatter_block(x, peers, offset, vectors, share, block, PTX, RANK, WORLD, BLOCK, SPREAD, TOGETHER)
                late = block - AHEAD * movers
                if late >= 0:
                    _sum_block(x, out, peers, offset, vectors, share, late, PTX, KIND, RANK, WORLD, BLOCK, WARPS, NORM, SPREAD)
    return ticket


@triton.jit
def _collector(movers, programs):
    """(first, step) of the blocks that this program collects; none of them below zero."""
    own = tl.program_id(0)
    first = tl.where(movers == programs, own, own - movers)
    return tl.where(first < 0, 0x7FFFFFFF, first), tl.where(movers == programs, programs, programs - movers)


@triton.jit(do_not_specialize=["vectors", "share", "half", "movers"])
def twoshot(
    x, out, peers, turn, half, vectors, share, movers,
    KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, SPREAD: tl.constexpr, TOGETHER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of x, `vectors` vectors of 16 bytes.

    share: vectors that each rank adds up, world x share >= vectors; peers: the address of each rank's workspace; half: vectors in
    one of its halves.
    """
    dependents(PTX)
    number = enter(turn, PTX)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    ticket = _move(
        x, out, peers, turn, offset, vectors, share, movers, PTX, KIND, RANK, WORLD, BLOCK, WARPS, False, AHEAD, SPREAD, TOGETHER
    )
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
            store(out, place, words[4 * step - 4 : 4 * step], (index < share) & (place < vectors), PTX)
    leave(turn, programs, ticket)


@triton.jit(do_not_specialize=["rows", "hidden", "share", "half", "movers"])
def twoshot_norm(
    x, residual, weight, sinks, scale, peers, turn, half, rows, hidden, share, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, SPREAD: tl.constexpr,
    TOGETHER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x [rows, hidden], its residual, norm and quantization. BLOCK: vectors that hold a row; FLAT: vectors
    that a program moves at once."""
    dependents(PTX)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    vectors = rows * pitch
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    factors = load(weight, column, mask, PTX)  # no kernel before this one writes weights
    number = enter(turn, PTX)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    ticket = _move(
        x, x, peers, turn, offset, vectors, share, movers, PTX, KIND, RANK, WORLD, FLAT, WARPS, True, AHEAD, SPREAD, TOGETHER
    )
    mine = peers[RANK] + offset + (WORLD - 1) * share.to(tl.int64) * 16
    first, hop = _collector(movers, programs)
    # Shares fill up side by side: so rows are taken from each share in turn.
    depth = tl.cdiv(rows, WORLD)
    for turn_of in range(first, depth * WORLD, hop):
        row = turn_of % WORLD * depth + turn_of // WORLD
        if row < rows:
            index = row * pitch + column
            old = load(residual, index, mask, PTX)
            address = at(mine, index, mask)
            words = poll((address,), BLOCK, WARPS)
            clear(address)
            finish_row(
                unpack(words, KIND), old, factors, row, column, mask, sinks, scale, hidden, eps,
                KIND, QUANT, KEEP_NORM, BLOCK, PTX,
            )  # fmt: skip
    leave(turn, programs, ticket)
