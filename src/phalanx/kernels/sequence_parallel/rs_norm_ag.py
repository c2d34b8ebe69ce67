# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""All-reduce with a norm behind it, where each row has an owner: who adds a row up also adds its residual, norms and quantizes it.

    depth = ceil(rows / world);  rank r owns rows r * depth .. min(rows, (r + 1) * depth) - 1
    total = round(x[0] + ... + x[world - 1])  of its rows, in fp32, in rank order, rounded once
    new residual = total + residual           of its rows: nobody else's new residual is ever written
    norm, its e4m3 and scales                 of its rows, sent to all: as `residual_rms_norm` computes them, bit for bit

Two hops: (world - 1) / world of the tensor out and in per rank, then as much of what the norm left, which in e4m3 is half of it or
less. A rank norms 1 / world of the rows, once for all.

A call's half holds the parts [world - 1][depth * pitch] vectors by `slot`, then what rows became in the message's order: [rows] of
norms or e4m3, whole vectors of 16 bytes each, and for one scale a token [rows] words. Four NaNs in e4m3, or a scale, may look like
the sentinel: they are sent, and kept by their owner, as other NaNs.

As in two-shot the first `movers` programs push all of their parts, then finish their rows, waiting for parts alone; the others
collect rows as they come. Where all are movers, they collect when they have finished theirs. So nobody waits for a program that
waits for him, as long as the whole grid fits the GPU at once. `signals` asks that every rank of a call needs data of every other:
an owner needs parts of all, and who owns no row needs the first rank's, which needed parts of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce.oneshot import gather_sum
from phalanx.kernels.allreduce.signals import at, clear, dependents, draw_ticket, enter, leave, poll, push, seal
from phalanx.kernels.allreduce.twoshot import scatter
from phalanx.kernels.ops.residual_rms_norm import add_residual, normed, square_sum
from phalanx.kernels.quantize import fp8_vector, token_scale
from phalanx.kernels.sequence_parallel.narrow_signals import (
    clear_word,
    poll_words,
    push_codes,
    push_once,
    sealed_codes,
    sealed_word,
)
from phalanx.kernels.vectors import load, load_row, load_scales, rounded, store, unpack


@triton.jit
def _hand_out(
    norm, row, index, mask, sinks, scale, peers, outs, words_at,
    KIND: tl.constexpr, QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Quantize a row's norm, keep what comes of it, and push it to all. index: of the row's vectors in the message; outs, words_at:
    where rows, and their scales, begin in everybody's workspace."""
    if QUANT == "none":
        sealed = seal(norm)
        for step in tl.static_range(1, WORLD):
            push(at(peers[(RANK + step) % WORLD] + outs, index, mask), sealed)
        store(sinks[0], index, sealed, mask, SM)
    else:
        lanes = unpack(norm, KIND)
        if QUANT == "fp8_token":
            found = token_scale(lanes)
            inverse = tl.div_rn(1.0, found)
            word = sealed_word(found.to(tl.int32, bitcast=True))
            for step in tl.static_range(1, WORLD):
                push_once(peers[(RANK + step) % WORLD] + words_at + row.to(tl.int64) * 4, word)
            tl.store(sinks[3] + row, word.to(tl.float32, bitcast=True))
        else:
            inverse = tl.div_rn(1.0, tl.load(scale))
        codes = sealed_codes(fp8_vector(lanes, inverse, SM))
        for step in tl.static_range(1, WORLD):
            push_codes(peers[(RANK + step) % WORLD] + outs, index, mask, codes)
        tl.store(sinks[2] + index, codes, mask)


@triton.jit
def finish_row(
    total, old, row, index, mask, factors, sinks, scale, peers, outs, words_at, hidden, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Add the residual (words) to a row's sum (lanes, fp32), norm it, and hand it out as `_hand_out` says."""
    lanes = add_residual(rounded(total, KIND, SM), old, index, mask, sinks[1], KIND, SM)
    norm = normed(lanes, square_sum(lanes), factors, hidden, eps, KIND, SM)
    _hand_out(norm, row, index, mask, sinks, scale, peers, outs, words_at, KIND, QUANT, RANK, WORLD, SM)


@triton.jit
def _finish_own(
    x, row_scales, column_scales, residual, factors, sinks, scale, peers, offset, outs, words_at, rows, depth, pitch, hidden,
    movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Add up my rows, one program a row at a time, and hand out what they become."""
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    for local in range(tl.program_id(0), depth, movers):
        row = RANK * depth + local
        if row < rows:
            index = row * pitch + column
            old = load(residual, index, mask, SM)
            own = load_row(x, row_scales, load_scales(column_scales, column, mask, KIND, SM), row, index, mask, KIND, SM)
            total = gather_sum(
                own, peers[RANK] + offset, local * pitch + column, mask, depth * pitch, KIND, RANK, WORLD, BLOCK, WARPS
            )  # fmt: skip
            finish_row(
                total, old, row, index, mask, factors, sinks, scale, peers, outs, words_at, hidden, eps,
                KIND, QUANT, RANK, WORLD, SM,
            )  # fmt: skip


@triton.jit
def _collect(
    target, mine, rows, depth, pitch, first, hop,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Take the others' rows, `pitch` vectors each, as they come: owners work side by side, so rows are taken from each in turn."""
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    for turn_of in range(first, depth * (WORLD - 1), hop):
        row = (RANK + 1 + turn_of % (WORLD - 1)) % WORLD * depth + turn_of // (WORLD - 1)
        if row < rows:
            index = row * pitch + column
            address = at(mine, index, mask)
            words = poll((address,), BLOCK, WARPS)
            clear(address)
            store(target, index, words, mask, SM)


@triton.jit
def _collect_scales(scales, mine, rows, depth, first, hop, RANK: tl.constexpr, WARPS: tl.constexpr):
    """Take the scales of the others' rows, one each thread."""
    BLOCK: tl.constexpr = 32 * WARPS
    for block in range(first, tl.cdiv(rows, BLOCK), hop):
        row = block * BLOCK + tl.arange(0, BLOCK)
        mask = (row < rows) & (row // depth != RANK)
        address = tl.where(mask, mine + row.to(tl.int64) * 4, 0)
        words = poll_words(address)
        clear_word(address)
        tl.store(scales + row, words.to(tl.float32, bitcast=True), mask)


@triton.jit
def collect(
    taken, scales, mine, outs, words_at, rows, depth, pitch, movers,
    QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, TAKE: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Take what the others hand out, into taken and scales: by the programs that are no movers; where all are, by all, once they
    have finished their rows. mine: the address of my workspace; pitch: vectors of a row there."""
    own, programs = tl.program_id(0), tl.num_programs(0)
    if (movers == programs) | (own >= movers):
        # Where all are movers, the last ones have finished first, if they had a row at all.
        first = tl.where(movers == programs, programs - 1 - own, own - movers)
        hop = tl.where(movers == programs, programs, programs - movers)
        _collect(taken, mine + outs, rows, depth, pitch, first, hop, RANK, WORLD, TAKE, WARPS, SM)
        if QUANT == "fp8_token":
            _collect_scales(scales, mine + words_at, rows, depth, first, hop, RANK, WARPS)


@triton.jit(do_not_specialize=["rows", "hidden", "half", "movers", "row_scales"])
def rs_norm_ag(
    x, row_scales, column_scales, residual, weight, sinks, taken, scale, peers, turn, half, rows, hidden, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, TAKE: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x [rows, hidden], its residual, norm and quantization, each row by its owner.

    row_scales, column_scales: scales that x still lacks, or None (`vectors.load_product`). sinks: pointers (norm, new residual,
    quantized by the vector, scales), written as the sum's vectors lie; taken: norm or quantized as int32, written by 16 bytes.
    peers: the address of each rank's workspace; half: vectors in one of its halves. BLOCK: vectors that hold a row of x; FLAT:
    vectors that a program moves at once; TAKE: vectors that hold a row of what is handed out. Each is at least 32 x WARPS, since a
    vector must belong to one thread. hidden is a multiple of 16.
    """
    dependents(SM)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    depth = tl.cdiv(rows, WORLD)
    share = depth * pitch
    column = tl.arange(0, BLOCK)
    factors = load(weight, column, column < pitch, SM)  # no kernel before this one writes weights
    number = enter(turn, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    outs = offset + (WORLD - 1) * share.to(tl.int64) * 16
    out_pitch = pitch if QUANT == "none" else hidden // 16
    words_at = outs + rows.to(tl.int64) * out_pitch * 16
    moves = tl.program_id(0) < movers
    if moves:
        scatter(x, row_scales, column_scales, pitch, peers, offset, rows * pitch, share, movers, SM, KIND, RANK, WORLD, FLAT)
    ticket = draw_ticket(turn, programs)
    if moves:
        _finish_own(
            x, row_scales, column_scales, residual, factors, sinks, scale, peers, offset, outs, words_at, rows, depth, pitch,
            hidden, movers, eps, KIND, QUANT, RANK, WORLD, BLOCK, WARPS, SM,
        )  # fmt: skip
    collect(taken, sinks[3], peers[RANK], outs, words_at, rows, depth, out_pitch, movers, QUANT, RANK, WORLD, TAKE, WARPS, SM)
    leave(turn, programs, ticket)
