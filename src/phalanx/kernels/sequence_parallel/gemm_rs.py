# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""`rs_norm_ag` behind a fused GEMM + reduce-scatter: the GEMMs of all ranks have written their outputs straight into the memory of
the rank that reduces the rows, so that the first hop is the GEMM's own output.

    rank r's memory: [world][chunk_rows][hidden], the outputs of each rank's GEMM for r's rows, by rank
    total = round(x[0] + ... + x[world - 1])  of its rows, in fp32, in rank order, rounded once; then as in `rs_norm_ag`

These partial sums come from GEMMs and carry no sentinel: this kernel, which runs behind a rank's GEMMs, sets a flag at each peer.
One such buffer is enough, without halves: a rank writes for its next call when this one has ended there, for which it has collected
every row of every rank, and a rank pushes a row when it has read all partial sums of it."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce.signals import await_flag, dependents, draw_ticket, enter, leave, raise_flag
from phalanx.kernels.sequence_parallel.rs_norm_ag import collect, finish_row
from phalanx.kernels.vectors import add, load, unpack


@triton.jit
def _sum_partials(partials, index, chunk, mask, KIND: tl.constexpr, WORLD: tl.constexpr, SM: tl.constexpr):
    """Lanes (fp32) of the vectors `index` of all partial sums, `chunk` vectors each, added up in rank order."""
    for source in tl.static_range(WORLD):
        part = unpack(load(partials + source * chunk.to(tl.int64) * 4, index, mask, SM), KIND)
        if source == 0:
            total = part
        else:
            total = add(total, part)
    return total


@triton.jit
def _reduce_partials(
    partials, residual, weight_words, pointers, scale, peers, outputs_at, scales_at, rows, chunk_rows, pitch, hidden, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Reduce this rank's rows, one row per program at a time, and finish them."""
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    for local in range(tl.program_id(0), chunk_rows, movers):
        row = RANK * chunk_rows + local
        if row < rows:
            index = row * pitch + column
            old = load(residual, index, mask, SM)
            total = _sum_partials(partials, local * pitch + column, chunk_rows * pitch, mask, KIND, WORLD, SM)
            finish_row(
                total, old, row, index, mask, weight_words, pointers, scale, peers, outputs_at, scales_at, hidden, eps,
                KIND, QUANT, KEEP_NORM, RANK, WORLD, SM,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "hidden", "half", "movers"])
def gemm_rs_norm_ag(
    partials, residual, weight, pointers, gathered, scale, peers, flags, epoch, half, rows, hidden, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, TAKE: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """As `rs_norm_ag.rs_norm_ag`, of partial sums that the ranks' GEMMs write into `partials` (int32 pointer, 16-byte aligned).

    flags: the address of each rank's flags, one for each rank, 16 bytes apart; the rest as there. A call's half of the workspace
    holds the outputs, from its beginning."""
    dependents(SM)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    chunk_rows = tl.cdiv(rows, WORLD)
    column = tl.arange(0, BLOCK)
    weight_words = load(weight, column, column < pitch, SM)  # no kernel before this one writes weights
    number = enter(epoch, SM)
    outputs_at = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    out_pitch = pitch if QUANT == "none" or KEEP_NORM else hidden // 16
    scales_at = outputs_at + rows.to(tl.int64) * out_pitch * 16
    own = tl.program_id(0)
    if own == 0:
        for step in tl.static_range(1, WORLD):
            raise_flag(flags[(RANK + step) % WORLD] + RANK * 16, number)
    ticket = draw_ticket(epoch, programs)
    # Only programs that push a row wait for flags: no rank raises the next call's before it has that row.
    if (own < movers) & (own < chunk_rows) & (RANK * chunk_rows + own < rows):
        for step in tl.static_range(1, WORLD):
            await_flag(flags[RANK] + ((RANK + step) % WORLD) * 16, number)
        _reduce_partials(
            partials, residual, weight_words, pointers, scale, peers, outputs_at, scales_at, rows, chunk_rows, pitch,
            hidden, movers, eps, KIND, QUANT, KEEP_NORM, RANK, WORLD, BLOCK, SM,
        )  # fmt: skip
    collect(
        gathered, pointers, scale, peers[RANK], outputs_at, scales_at, rows, chunk_rows, out_pitch, movers,
        KIND, QUANT, KEEP_NORM, RANK, WORLD, TAKE, WARPS, SM,
    )  # fmt: skip
    leave(epoch, programs, ticket)
