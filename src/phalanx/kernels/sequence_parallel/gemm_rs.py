# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""`owned`, for a product that its makers wrote where its rows are owned: the first hop over the wire is the product's own output.

    rank r's memory: [world][depth][hidden], what each rank's product gave for r's rows, by rank
    total = round(x[0] + ... + x[world - 1])  of its rows, in fp32, in rank order, rounded once; then as in `owned`

No kernel of ours sends parts, so that they carry no signal of their own: who comes behind a rank's products raises a flag at each
peer. One such memory is enough, without halves: a rank writes for its next call when this one has ended there, for which it has
collected every row of every owner, and an owner hands a row out when it has read all parts of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce.signals import await_flag, dependents, draw_ticket, enter, leave, raise_flag
from phalanx.kernels.sequence_parallel.rs_norm_ag import collect, finish_row
from phalanx.kernels.vectors import add, load, unpack


@triton.jit
def _sum_of_parts(landed, index, share, mask, KIND: tl.constexpr, WORLD: tl.constexpr, SM: tl.constexpr):
    """Lanes (fp32) of the vectors `index` of all parts, `share` vectors each, added up in rank order."""
    for source in tl.static_range(WORLD):
        part = unpack(load(landed + source * share.to(tl.int64) * 4, index, mask, SM), KIND)
        if source == 0:
            total = part
        else:
            total = add(total, part)
    return total


@triton.jit
def _finish_landed(
    landed, residual, factors, sinks, scale, peers, outs, words_at, rows, depth, pitch, hidden, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Add up my rows, one program a row at a time, and hand out what they become."""
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    for local in range(tl.program_id(0), depth, movers):
        row = RANK * depth + local
        if row < rows:
            index = row * pitch + column
            old = load(residual, index, mask, SM)
            total = _sum_of_parts(landed, local * pitch + column, depth * pitch, mask, KIND, WORLD, SM)
            finish_row(
                total, old, row, index, mask, factors, sinks, scale, peers, outs, words_at, hidden, eps,
                KIND, QUANT, RANK, WORLD, SM,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "hidden", "half", "movers"])
def gemm_rs_norm_ag(
    landed, residual, weight, sinks, taken, scale, peers, flags, turn, half, rows, hidden, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, TAKE: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """As `owned.rs_norm_ag`, of parts that have landed, or will, in `landed` (int32 pointer, 16-byte aligned) of each rank.

    flags: the address of each rank's flags, one for each rank, 16 bytes apart; the rest as there. A call's half holds what is
    handed out, from its beginning.
    """
    dependents(SM)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    depth = tl.cdiv(rows, WORLD)
    column = tl.arange(0, BLOCK)
    factors = load(weight, column, column < pitch, SM)  # no kernel before this one writes weights
    number = enter(turn, SM)
    outs = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    out_pitch = pitch if QUANT == "none" else hidden // 16
    words_at = outs + rows.to(tl.int64) * out_pitch * 16
    own = tl.program_id(0)
    if own == 0:
        for step in tl.static_range(1, WORLD):
            raise_flag(flags[(RANK + step) % WORLD] + RANK * 16, number)
    ticket = draw_ticket(turn, programs)
    # Only who hands out a row awaits flags: nobody raises the next call's before he has that row.
    if (own < movers) & (own < depth) & (RANK * depth + own < rows):
        for step in tl.static_range(1, WORLD):
            await_flag(flags[RANK] + ((RANK + step) % WORLD) * 16, number)
        _finish_landed(
            landed, residual, factors, sinks, scale, peers, outs, words_at, rows, depth, pitch, hidden, movers, eps,
            KIND, QUANT, RANK, WORLD, BLOCK, SM,
        )  # fmt: skip
    collect(taken, sinks[3], peers[RANK], outs, words_at, rows, depth, out_pitch, movers, QUANT, RANK, WORLD, TAKE, WARPS, SM)
    leave(turn, programs, ticket)
