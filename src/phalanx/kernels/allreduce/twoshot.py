# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Two-shot all-reduce: rank r reduces the r-th chunk of all ranks' tensors, then pushes the sum to all (reduce-scatter,
all-gather).

    chunk r of out = round(x[0] + ... + x[world - 1]) there, in fp32, in rank order, rounded once
    twoshot_norm: then what `residual_rms_norm` does with it, on every rank for every row: sending norm and residual instead of
    the sum would send more bytes, which bound a large message
    with scales (fp32 pointers; None without): x[r] means round(x[r] * row_scales[:, None] * column_scales)

Two hops, 2 (world - 1) / world tensors out and in per rank. A call's half of the workspace holds [world - 1][chunk] parts by
`slot`, then the sums [vectors] in the message's order.

The first `movers` programs of the grid push and reduce; the others collect sums as they arrive. Where all are movers, they collect
after that. A mover pushes all of its parts before it waits for any, and no program may wait for one that does not run: all
programs of the grid must fit the GPU at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce.oneshot import gather_sum
from phalanx.kernels.allreduce.signals import at, clear, dependents, draw_ticket, enter, leave, poll, push, seal, slot
from phalanx.kernels.ops.residual_rms_norm import finish_row
from phalanx.kernels.vectors import load, load_output, pack, store, unpack


@triton.jit
def scatter(
    x, row_scales, column_scales, pitch, peers, offset, vectors, chunk, movers,
    SM: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push each peer's chunk of this rank's tensor to it."""
    for block in range(tl.program_id(0), tl.cdiv(chunk, BLOCK), movers):
        index = block * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            source = (RANK + step) % WORLD * chunk + index
            mask = (index < chunk) & (source < vectors)
            place = slot((RANK + step) % WORLD, RANK, WORLD) * chunk.to(tl.int64) * 16
            address = at(peers[(RANK + step) % WORLD] + offset + place, index, mask)
            push(address, seal(load_output(x, row_scales, column_scales, source, pitch, mask, KIND, SM)))


@triton.jit
def _sum_and_push(
    x, row_scales, column_scales, pitch, out, peers, offset, vectors, chunk, movers,
    SM: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Reduce this rank's chunk and push the sum to all: with NORM into this rank's own half too, else into out."""
    sums = offset + (WORLD - 1) * chunk.to(tl.int64) * 16
    for block in range(tl.program_id(0), tl.cdiv(chunk, BLOCK), movers):
        index = block * BLOCK + tl.arange(0, BLOCK)
        place = RANK * chunk + index
        mask = (index < chunk) & (place < vectors)
        own = load_output(x, row_scales, column_scales, place, pitch, mask, KIND, SM)
        total = gather_sum(own, peers[RANK] + offset, index, mask, chunk, KIND, RANK, WORLD, BLOCK, WARPS)
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
    """(first, step) of the blocks that this program collects: none of a program that only moves."""
    own = tl.program_id(0)
    first = tl.where(movers == programs, own, own - movers)
    return tl.where(first < 0, 0x7FFFFFFF, first), tl.where(movers == programs, programs, programs - movers)


@triton.jit(do_not_specialize=["vectors", "chunk", "half", "movers", "row_scales", "pitch"])
def twoshot(
    x, out, peers, epoch, half, vectors, chunk, movers, row_scales, column_scales, pitch,
    KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of x, `vectors` vectors of 16 bytes.

    chunk: vectors that each rank reduces, world x chunk >= vectors; peers: the address of each rank's workspace; epoch: see
    `signals.enter`; half: vectors in one half of a workspace; pitch: vectors of a row, None without scales.
    """
    dependents(SM)
    number = enter(epoch, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    moves = tl.program_id(0) < movers
    if moves:
        scatter(x, row_scales, column_scales, pitch, peers, offset, vectors, chunk, movers, SM, KIND, RANK, WORLD, BLOCK)
    ticket = draw_ticket(epoch, programs)
    if moves:
        _sum_and_push(
            x, row_scales, column_scales, pitch, out, peers, offset, vectors, chunk, movers,
            SM, KIND, RANK, WORLD, BLOCK, WARPS, False,
        )  # fmt: skip
    sums = peers[RANK] + offset + (WORLD - 1) * chunk.to(tl.int64) * 16
    first, hop = _collector(movers, programs)
    for block in range(first, tl.cdiv(chunk, BLOCK), hop):
        index = block * BLOCK + tl.arange(0, BLOCK)
        addresses = ()
        for step in tl.static_range(1, WORLD):
            place = (RANK + step) % WORLD * chunk + index
            addresses = addresses + (at(sums, place, (index < chunk) & (place < vectors)),)
        words = poll(addresses, BLOCK, WARPS)
        for step in tl.static_range(1, WORLD):
            clear(addresses[step - 1])
            place = (RANK + step) % WORLD * chunk + index
            store(out, place, words[4 * step - 4 : 4 * step], (index < chunk) & (place < vectors), SM)
    leave(epoch, programs, ticket)


@triton.jit(do_not_specialize=["rows", "hidden", "chunk", "half", "movers", "row_scales"])
def twoshot_norm(
    x, residual, weight, pointers, scale, peers, epoch, half, rows, hidden, chunk, movers, eps, row_scales, column_scales,
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
    weight_words = load(weight, column, mask, SM)  # no kernel before this one writes weights
    number = enter(epoch, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    moves = tl.program_id(0) < movers
    if moves:
        scatter(x, row_scales, column_scales, pitch, peers, offset, vectors, chunk, movers, SM, KIND, RANK, WORLD, FLAT)
    ticket = draw_ticket(epoch, programs)
    if moves:
        _sum_and_push(
            x, row_scales, column_scales, pitch, x, peers, offset, vectors, chunk, movers,
            SM, KIND, RANK, WORLD, FLAT, WARPS, True,
        )  # fmt: skip
    sums = peers[RANK] + offset + (WORLD - 1) * chunk.to(tl.int64) * 16
    first, hop = _collector(movers, programs)
    # Chunks fill up at the same rate: so rows are taken from each chunk alternately.
    chunk_rows = tl.cdiv(rows, WORLD)
    for item in range(first, chunk_rows * WORLD, hop):
        row = item % WORLD * chunk_rows + item // WORLD
        if row < rows:
            index = row * pitch + column
            old = load(residual, index, mask, SM)
            address = at(sums, index, mask)
            words = poll((address,), BLOCK, WARPS)
            clear(address)
            finish_row(
                unpack(words, KIND), old, weight_words, row, column, mask, pointers, scale, hidden, eps,
                KIND, QUANT, KEEP_NORM, BLOCK, SM,
            )  # fmt: skip
    leave(epoch, programs, ticket)
