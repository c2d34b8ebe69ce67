# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Two-shot all-reduce: rank r adds up the r-th share of everybody's tensor, then pushes the sum to all.

    share r of out = round(x[0] + ... + x[world - 1]) there, in fp32, in rank order, rounded once
    twoshot_norm: then what `residual_rms_norm` does with it, on every rank for every row: sending norm and residual instead of
    the sum would put more on the wire, which is what a large message waits for

Two hops, 2 (world - 1) / world tensors out and in per rank. A call's half holds [world - 1][share] parts by `slot`, then the sums
[vectors] in the message's order. Every program pushes all of its parts before it waits for any, and no program waits for one that
is not running: the grid must fit the GPU at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce_oneshot import gather_sum
from phalanx.kernels.residual_rms_norm import finish_row
from phalanx.kernels.signals import at, clear, dependents, enter, leave, poll, push, seal, slot
from phalanx.kernels.vectors import load, pack, store, unpack


@triton.jit
def _scatter(x, peers, offset, vectors, share, PTX: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Push each peer's share of my tensor to it."""
    for block in range(tl.program_id(0), tl.cdiv(share, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            source = (RANK + step) % WORLD * share + index
            mask = (index < share) & (source < vectors)
            place = slot((RANK + step) % WORLD, RANK, WORLD) * share.to(tl.int64) * 16
            push(at(peers[(RANK + step) % WORLD] + offset + place, index, mask), seal(load(x, source, mask, PTX)))


@triton.jit
def _sum_and_push(
    x, out, peers, offset, vectors, share,
    PTX: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Add up my share and push it to all: with NORM into my own half too, else into out."""
    sums = offset + (WORLD - 1) * share.to(tl.int64) * 16
    for block in range(tl.program_id(0), tl.cdiv(share, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        place = RANK * share + index
        mask = (index < share) & (place < vectors)
        total = gather_sum(load(x, place, mask, PTX), peers[RANK] + offset, index, mask, share, KIND, RANK, WORLD)
        words = pack(total, KIND, PTX)
        sealed = seal(words)
        for step in tl.static_range(1, WORLD):
            push(at(peers[(RANK + step) % WORLD] + sums, place, mask), sealed)
        if NORM:
            push(at(peers[RANK] + sums, place, mask), sealed)
        else:
            store(out, place, words, mask, PTX)


@triton.jit(do_not_specialize=["vectors", "share", "half"])
def twoshot(
    x, out, peers, turn, half, vectors, share,
    KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of x, `vectors` vectors of 16 bytes.

    share: vectors that each rank adds up, world x share >= vectors; peers: the address of each rank's workspace; half: vectors in
    one of its halves.
    """
    dependents(PTX)
    number = enter(turn, PTX)
    offset = (number & 1) * half.to(tl.int64) * 16
    _scatter(x, peers, offset, vectors, share, PTX, RANK, WORLD, BLOCK)
    leave(turn, tl.num_programs(0))
    _sum_and_push(x, out, peers, offset, vectors, share, PTX, KIND, RANK, WORLD, BLOCK, False)
    mine = peers[RANK] + offset + (WORLD - 1) * share.to(tl.int64) * 16
    for block in range(tl.program_id(0), tl.cdiv(share, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        addresses = ()
        for step in tl.static_range(1, WORLD):
            place = (RANK + step) % WORLD * share + index
            addresses = addresses + (at(mine, place, (index < share) & (place < vectors)),)
        words = poll(addresses)
        for step in tl.static_range(1, WORLD):
            clear(addresses[step - 1])
            place = (RANK + step) % WORLD * share + index
            store(out, place, words[4 * step - 4 : 4 * step], (index < share) & (place < vectors), PTX)


@triton.jit(do_not_specialize=["rows", "hidden", "share", "half"])
def twoshot_norm(
    x, residual, weight, sinks, scale, peers, turn, half, rows, hidden, share, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x [rows, hidden], its residual, norm and quantization. BLOCK: vectors that hold a row; FLAT: vectors
    that a program moves at once while it sums."""
    dependents(PTX)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    vectors = rows * pitch
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    factors = load(weight, column, mask, PTX)  # no kernel before this one writes weights
    number = enter(turn, PTX)
    offset = (number & 1) * half.to(tl.int64) * 16
    _scatter(x, peers, offset, vectors, share, PTX, RANK, WORLD, FLAT)
    leave(turn, tl.num_programs(0))
    _sum_and_push(x, x, peers, offset, vectors, share, PTX, KIND, RANK, WORLD, FLAT, True)
    mine = peers[RANK] + offset + (WORLD - 1) * share.to(tl.int64) * 16
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        index = row * pitch + column
        old = load(residual, index, mask, PTX)
        address = at(mine, index, mask)
        words = poll((address,))
        clear(address)
        finish_row(
            unpack(words, KIND), old, factors, row, column, mask, sinks, scale, hidden, eps,
            KIND, QUANT, KEEP_NORM, BLOCK, PTX,
        )  # fmt: skip
