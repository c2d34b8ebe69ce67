# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""ONESHOT on GPUs, over a symmetric workspace: every rank pushes its whole tensor to every peer, and adds up what arrives.

    out = round(x[0] + x[1] + ... + x[world - 1])           in fp32, in rank order, rounded once
    oneshot_norm: then what `residual_rms_norm` does with it
    with scales (fp32 pointers; None without): x[r] means round(x[r] * row_scales[:, None] * column_scales)

One hop over the links, (world - 1) tensors out and in per rank: for small messages. `comm.signals` explains how ranks wait for each
other. A call's half of the workspace holds [world - 1][vectors], by `slot`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from phalanx.comm import chunked
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.signals import (
    at,
    clear,
    dependents,
    draw_ticket,
    enter,
    leave,
    poll,
    push,
    read_board,
    seal,
    slot,
    write_board,
)
from phalanx.comm.symmetric import SymmetricWorkspace
from phalanx.kernels.ops.residual_rms_norm import add_residual, finish_row, normalize, square_sum
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.kernels.vectors import (
    add,
    load,
    load_output,
    load_row,
    load_row_scale,
    load_scales,
    pack,
    rounded,
    scaled,
    store,
    unpack,
)


@dataclass(frozen=True, slots=True)
class OneshotLaunch:
    """programs: of the grid; block: vectors of 16 bytes that a program handles at once, at least 32 x warps, since a vector must
    belong to one thread (with a norm: that hold a row, or a split of one); warps: of a program; loop: programs handle more than
    one block; splits: programs of one row, 1 where one program has the row."""

    programs: int
    block: int
    warps: int
    loop: bool
    splits: int = 1


def flat_launch(vectors: int, num_sms: int) -> OneshotLaunch:
    """For a sum alone: small programs on many multiprocessors while all fit at once, else as many as fit, in a loop."""
    warps = 1 if vectors <= 1 << 13 else 4
    if vectors <= 4 * num_sms * 128:
        return OneshotLaunch(-(-vectors // (32 * warps)), 32 * warps, warps, False)
    programs = min(-(-vectors // 512), 2 * num_sms)
    return OneshotLaunch(programs, 512, 16, programs * 512 < vectors)


def row_launch(rows: int, pitch: int, world: int, num_sms: int, *, whole_rows: bool = False) -> OneshotLaunch:
    """For a sum with a norm, `pitch` vectors a row: one program per row. With many peers to read from, few rows are split over
    more multiprocessors, as long as all splits run at once. whole_rows: one program must have a row."""
    splits = -(-pitch // SPLIT_VECTORS)
    if world > 2 and not whole_rows and splits > 1 and rows * splits <= 4 * num_sms:
        return OneshotLaunch(rows * splits, SPLIT_VECTORS, SPLIT_VECTORS // 32, False, splits)
    block = chunked.row_block(pitch)
    warps = min(16 if 16 < rows <= num_sms else 8, block // 32)
    programs = min(rows, 4 * num_sms)
    return OneshotLaunch(programs, block, warps, programs < rows)


SPLIT_VECTORS = 128
"""Vectors of a split of a row."""


def all_reduce(x: Tensor | Unscaled, workspace: SymmetricWorkspace, launch: OneshotLaunch | None = None) -> Tensor:
    """The sum over ranks of x (contiguous, a multiple of 16 bytes, 16-byte aligned), in a new tensor; of an Unscaled, whose
    rows are such multiples, the sum with the scales applied (the columns' scales are aligned the same way)."""

    def one(source: Tensor, target: Tensor, vectors: int, constants: dict[str, Any]) -> None:
        run = launch or flat_launch(vectors, workspace.num_sms)
        oneshot[(run.programs,)](
            source, target, workspace.addresses, (workspace.epoch, *workspace.marks()), workspace.half, vectors,
            BLOCK=run.block, WARPS=run.warps, LOOP=run.loop, num_warps=run.warps, **constants,
        )  # fmt: skip

    return chunked.all_reduce(x, workspace, workspace.oneshot_vectors, one)


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: SymmetricWorkspace, launch: OneshotLaunch | None = None
) -> tuple[Tensor, ...]:
    """The sum over ranks of x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) and its fusion, in new tensors."""
    values = Unscaled.parts(x)[0]
    hidden, pitch = values.shape[1], chunked.pitch_of(values)

    def one(arguments: tuple[Any, ...], rows: int, constants: dict[str, Any]) -> None:
        run = launch or row_launch(rows, pitch, workspace.world, workspace.num_sms, whole_rows=constants["QUANT"] == "fp8_token")
        if run.splits > 1:
            oneshot_norm_split[(run.programs,)](
                *arguments, workspace.board, workspace.half, rows, hidden, fusion.eps,
                SPLIT=run.block, SPLITS=1 << (run.splits - 1).bit_length(), WARPS=run.warps, num_warps=run.warps, **constants,
            )  # fmt: skip
        else:
            oneshot_norm[(run.programs,)](
                *arguments, workspace.half, rows, hidden, fusion.eps,
                BLOCK=run.block, LOOP=run.loop, WARPS=run.warps, num_warps=run.warps, **constants,
            )  # fmt: skip

    return chunked.all_reduce_norm(x, fusion, workspace, workspace.oneshot_vectors, one)


@triton.jit
def push_to_peers(words, peers, offset, index, mask, pitch, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Push this rank's words to every peer, into this rank's slot of `pitch` vectors there."""
    sealed = seal(words)
    for step in tl.static_range(1, WORLD):
        place = slot((RANK + step) % WORLD, RANK, WORLD) * pitch.to(tl.int64) * 16
        push(at(peers[(RANK + step) % WORLD] + offset + place, index, mask), sealed)


@triton.jit
def sum_in_rank_order(own, words, KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Lanes (fp32) of the sum of this rank's words and those of the peers, which come by slot."""
    for source in tl.static_range(WORLD):
        if source == RANK:
            part = unpack(own, KIND)
        else:
            part = unpack(words[4 * slot(RANK, source, WORLD) : 4 * slot(RANK, source, WORLD) + 4], KIND)
        if source == 0:
            total = part
        else:
            total = add(total, part)
    return total


@triton.jit
def gather_sum(
    own, inbox, index, mask, pitch,
    KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' vectors in this rank's half of the workspace (address `inbox`), clear them, and add them to this rank's
    own words: lanes, fp32."""
    addresses = ()
    for place in tl.static_range(WORLD - 1):
        addresses = addresses + (at(inbox + place * pitch.to(tl.int64) * 16, index, mask),)
    words = poll(addresses, BLOCK, WARPS)
    for place in tl.static_range(WORLD - 1):
        clear(addresses[place])
    return sum_in_rank_order(own, words, KIND, RANK, WORLD)


@triton.jit(do_not_specialize=["vectors", "half", "row_scales", "pitch"])
def oneshot(
    x, out, peers, epoch, half, vectors, row_scales, column_scales, pitch,
    KIND: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr, LOOP: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of x, `vectors` vectors of 16 bytes.

    peers: the address of each rank's workspace; epoch: see `signals`; half: vectors in one half of a workspace; pitch:
    vectors of a row, None without scales; LOOP: there are more blocks than programs."""
    dependents(SM)
    number = enter(epoch, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inbox = peers[RANK] + offset
    if LOOP:
        blocks = tl.cdiv(vectors, BLOCK)
        for block in range(first, blocks, programs):
            index = block * BLOCK + lane
            mask = index < vectors
            own = load_output(x, row_scales, column_scales, index, pitch, mask, KIND, SM)
            push_to_peers(own, peers, offset, index, mask, vectors, RANK, WORLD)
        ticket = draw_ticket(epoch, programs)
        for block in range(first, blocks, programs):
            index = block * BLOCK + lane
            mask = index < vectors
            own = load_output(x, row_scales, column_scales, index, pitch, mask, KIND, SM)
            total = gather_sum(own, inbox, index, mask, vectors, KIND, RANK, WORLD, BLOCK, WARPS)
            store(out, index, pack(total, KIND, SM), mask, SM)
        leave(epoch, programs, ticket)
    else:
        index = first * BLOCK + lane
        mask = index < vectors
        own = load_output(x, row_scales, column_scales, index, pitch, mask, KIND, SM)
        push_to_peers(own, peers, offset, index, mask, vectors, RANK, WORLD)
        ticket = draw_ticket(epoch, programs)
        total = gather_sum(own, inbox, index, mask, vectors, KIND, RANK, WORLD, BLOCK, WARPS)
        store(out, index, pack(total, KIND, SM), mask, SM)
        leave(epoch, programs, ticket)


@triton.jit
def _load_row(x, row_scales, column_scales, row, column, index, mask, KIND: tl.constexpr, SM: tl.constexpr):
    """One of many rows. Its column scales are loaded again, rather than kept in registers while the row waits for peers."""
    lanes = load_scales(column_scales, column, mask, KIND, SM)
    return load_row(x, row_scales, lanes, row, index, mask, KIND, SM)


@triton.jit
def _finish_rows(
    x, row_scales, column_scales, residual, weight_words, pointers, scale, peers, offset, first, step, rows, hidden, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' parts of rows first, first + step, ..., and finish these rows."""
    pitch = hidden // (4 if KIND == "fp32" else 8)
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    for row in range(first, rows, step):
        index = row * pitch + column
        own = _load_row(x, row_scales, column_scales, row, column, index, mask, KIND, SM)
        old = load(residual, index, mask, SM)
        total = gather_sum(own, peers[RANK] + offset, index, mask, rows * pitch, KIND, RANK, WORLD, BLOCK, WARPS)
        finish_row(
            rounded(total, KIND, SM), old, weight_words, row, column, mask, pointers, scale, hidden, eps,
            KIND, QUANT, KEEP_NORM, BLOCK, SM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "hidden", "half", "row_scales"])
def oneshot_norm(
    x, residual, weight, pointers, scale, peers, epoch, half, rows, hidden, eps, row_scales, column_scales,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, LOOP: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x [rows, hidden], its residual, norm and quantization, one program per row (LOOP: per several rows)."""
    dependents(SM)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    weight_words = load(weight, column, mask, SM)  # no kernel before this one writes weights
    if not LOOP:
        lanes = load_scales(column_scales, column, mask, KIND, SM)
    number = enter(epoch, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    if LOOP:
        for row in range(first, rows, programs):
            index = row * pitch + column
            own = _load_row(x, row_scales, column_scales, row, column, index, mask, KIND, SM)
            push_to_peers(own, peers, offset, index, mask, rows * pitch, RANK, WORLD)
        ticket = draw_ticket(epoch, programs)
        _finish_rows(
            x, row_scales, column_scales, residual, weight_words, pointers, scale, peers, offset, first, programs, rows, hidden,
            eps,
            KIND, QUANT, KEEP_NORM, RANK, WORLD, BLOCK, WARPS, SM,
        )  # fmt: skip
    else:
        index = first * pitch + column
        own = load(x, index, mask, SM)
        unit = load_row_scale(row_scales, first)
        old = load(residual, index, mask, SM)
        own = scaled(own, unit, lanes, KIND, SM)
        push_to_peers(own, peers, offset, index, mask, rows * pitch, RANK, WORLD)
        ticket = draw_ticket(epoch, programs)
        total = gather_sum(own, peers[RANK] + offset, index, mask, rows * pitch, KIND, RANK, WORLD, BLOCK, WARPS)
        finish_row(
            rounded(total, KIND, SM), old, weight_words, first, column, mask, pointers, scale, hidden, eps,
            KIND, QUANT, KEEP_NORM, BLOCK, SM,
        )  # fmt: skip
    leave(epoch, programs, ticket)


@triton.jit(do_not_specialize=["rows", "hidden", "half", "row_scales"])
def oneshot_norm_split(
    x, residual, weight, pointers, scale, peers, epoch, board, half, rows, hidden, eps, row_scales, column_scales,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """As oneshot_norm, for few rows: a row is split over several programs, of SPLIT vectors each, which exchange their sums of
    squares through the board. One multiprocessor would take longer to read a row from every peer than that exchange takes.

    The grid is rows x ceil(vectors of a row / SPLIT), all of which must run at once; SPLITS is a power of two, at least that many.
    QUANT is not "fp8_token", which would need a second exchange.
    """
    dependents(SM)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    splits = tl.cdiv(pitch, SPLIT)
    row = tl.program_id(0) // splits
    column = tl.program_id(0) % splits * SPLIT + tl.arange(0, SPLIT)
    mask = column < pitch
    weight_words = load(weight, column, mask, SM)  # no kernel before this one writes weights
    lanes = load_scales(column_scales, column, mask, KIND, SM)
    number = enter(epoch, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    index = row * pitch + column
    own = load(x, index, mask, SM)
    unit = load_row_scale(row_scales, row)
    old = load(residual, index, mask, SM)
    own = scaled(own, unit, lanes, KIND, SM)
    push_to_peers(own, peers, offset, index, mask, rows * pitch, RANK, WORLD)
    ticket = draw_ticket(epoch, programs)
    total = gather_sum(own, peers[RANK] + offset, index, mask, rows * pitch, KIND, RANK, WORLD, SPLIT, WARPS)
    new = add_residual(rounded(total, KIND, SM), old, index, mask, pointers[1], KIND, SM)
    write_board(board, tl.program_id(0), square_sum(new), number)
    split = tl.arange(0, SPLITS)
    squares = tl.sum(read_board(board, row * splits + split, split < splits, number), 0)
    normalize(
        new, squares, weight_words, row, column, mask, pointers, scale, hidden, eps, KIND, QUANT, KEEP_NORM, SPLIT, SM
    )  # fmt: skip
    leave(epoch, programs, ticket)
