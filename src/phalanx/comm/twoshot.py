# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""TWOSHOT on GPUs, over a symmetric workspace: rank r reduces the r-th chunk of all ranks' tensors, then pushes the sum to all
(reduce-scatter, all-gather).

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

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from phalanx.comm import chunked
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.oneshot import gather_sum
from phalanx.comm.signals import at, clear, dependents, draw_ticket, enter, leave, poll, push, seal, slot
from phalanx.comm.symmetric import SymmetricWorkspace, part_vectors
from phalanx.kernels.ops.residual_rms_norm import finish_row
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.kernels.vectors import load, load_output, pack, store, unpack


@dataclass(frozen=True, slots=True)
class TwoshotLaunch:
    """programs: of the grid, all of which must run at once; flat: vectors of 16 bytes that a program moves at once; block: vectors
    that hold a row (0 without a norm); warps: of a program; flat and block are at least 32 x warps; movers: programs that move, the
    others collect (none: movers collect when they have moved); registers: of a thread at most, so that all programs fit."""

    programs: int
    flat: int
    block: int
    warps: int
    movers: int
    registers: int | None = None


def flat_launch(vectors: int, world: int, num_sms: int) -> TwoshotLaunch:
    """For a sum alone: small programs while the parts are small, at most one per multiprocessor; then larger ones; then collectors
    too."""
    part = part_vectors(vectors, world)
    if part <= 256 * num_sms:
        programs = min(-(-part // 128), num_sms)
        return TwoshotLaunch(programs, 128, 0, 4, programs)
    if part <= 3072 * num_sms:
        programs = min(-(-part // 512), num_sms)
        return TwoshotLaunch(programs, 512, 0, 16, programs)
    if world == 2:
        return TwoshotLaunch(3 * num_sms, 512, 0, 16, 2 * num_sms, _registers(3, 16))
    return TwoshotLaunch(2 * num_sms, 512, 0, 16, num_sms, _registers(2, 16))


def row_launch(rows: int, pitch: int, world: int, num_sms: int) -> TwoshotLaunch:
    """For a sum with a norm, `pitch` vectors a row: one program per row, then two per multiprocessor, then collectors too."""
    block = chunked.row_block(pitch)
    if rows <= num_sms:
        warps = min(16 if rows <= num_sms // 4 else 32, block // 32)
        programs = max(rows, min(-(-part_vectors(rows * pitch, world) // (32 * warps)), num_sms))
        return TwoshotLaunch(programs, 32 * warps, block, warps, programs)
    warps = min(16, block // 32)
    if rows <= 8 * num_sms:
        programs = min(2 * num_sms, rows)
        return TwoshotLaunch(programs, 32 * warps, block, warps, programs, _registers(2, 16))
    if world <= 4:
        return TwoshotLaunch(3 * num_sms, 32 * warps, block, warps, num_sms, _registers(3, 16))
    return TwoshotLaunch(2 * num_sms, 32 * warps, block, warps, num_sms, _registers(2, 16))


def _registers(per_sm: int, warps: int) -> int:
    """With at most so many registers a thread, `per_sm` programs of `warps` warps run on a multiprocessor at once."""
    return 65536 // (per_sm * warps * 32) // 8 * 8


def all_reduce(x: Tensor | Unscaled, workspace: SymmetricWorkspace, launch: TwoshotLaunch | None = None) -> Tensor:
    """The sum over ranks of x (contiguous, a multiple of 16 bytes, 16-byte aligned), in a new tensor; of an Unscaled, whose
    rows are such multiples, the sum with the scales applied (the columns' scales are aligned the same way)."""

    def one(source: Tensor, target: Tensor, vectors: int, constants: dict[str, Any]) -> None:
        run = launch or flat_launch(vectors, workspace.world, workspace.num_sms)
        twoshot[(run.programs,)](
            source, target, workspace.addresses, (workspace.epoch, *workspace.marks()), workspace.half, vectors,
            part_vectors(vectors, workspace.world), run.movers,
            BLOCK=run.flat, WARPS=run.warps, num_warps=run.warps, maxnreg=run.registers, **constants,
        )  # fmt: skip

    return chunked.all_reduce(x, workspace, workspace.twoshot_vectors, one)


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: SymmetricWorkspace, launch: TwoshotLaunch | None = None
) -> tuple[Tensor, ...]:
    """The sum over ranks of x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) and its fusion, in new tensors."""
    values = Unscaled.parts(x)[0]
    hidden, pitch = values.shape[1], chunked.pitch_of(values)

    def one(arguments: tuple[Any, ...], rows: int, constants: dict[str, Any]) -> None:
        run = launch or row_launch(rows, pitch, workspace.world, workspace.num_sms)
        twoshot_norm[(run.programs,)](
            *arguments, workspace.half, rows, hidden, part_vectors(rows * pitch, workspace.world), run.movers, fusion.eps,
            BLOCK=run.block, FLAT=run.flat, WARPS=run.warps, num_warps=run.warps, maxnreg=run.registers, **constants,
        )  # fmt: skip

    return chunked.all_reduce_norm(x, fusion, workspace, workspace.twoshot_vectors, one)


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
    `signals`; half: vectors in one half of a workspace; pitch: vectors of a row, None without scales.
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
