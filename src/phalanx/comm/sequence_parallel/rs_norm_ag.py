# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""RS_NORM_AG on GPUs: reduce-scatter, residual add, RMSNorm and quantization, all-gather, in one kernel over a symmetric workspace.
The rank that reduces a row also adds its residual, norms and quantizes it. The new residual stays sharded (`sharded_residual`).

    chunk_rows = ceil(rows / world);  rank r has rows r * chunk_rows .. min(rows, (r + 1) * chunk_rows) - 1
    total = round(x[0] + ... + x[world - 1])  of its rows, in fp32, in rank order, rounded once
    new residual = total + residual           of its rows: a rank never writes the new residual of other rows
    norm, its e4m3 and scales                 of its rows, sent to all: as `residual_rms_norm` computes them, bit for bit

Two hops: (world - 1) / world of the tensor out and in per rank, then the same fraction of the norm, which in e4m3 has half of the
bytes or less. A rank norms 1 / world of the rows, once for all ranks. Where the norm is needed beside its e4m3 (KEEP_NORM), it
alone is sent, and every rank quantizes all rows from the words that were sent: e4m3 beside them would be half as many bytes again.

A call's half of the workspace holds the parts [world - 1][chunk_rows * pitch] vectors by `slot`, then the outputs in the message's
order: [rows] of norms or e4m3, in vectors of 16 bytes, and with one scale per token [rows] words. Four NaNs in e4m3, or a scale,
may equal the sentinel: they are sent, and kept by their own rank, as other NaNs.

As in two-shot the first `movers` programs push all of their parts, then finish their rows, waiting for parts alone; the others
collect rows as they arrive. Where all are movers, they collect when they have finished their rows. So no two programs wait for each
other, as long as all programs of the grid fit the GPU at once. `signals` requires that every rank of a call needs data of every
other: a rank with rows needs parts of all, and a rank without rows needs those of the first rank, which needed parts of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.comm.chunked import row_block, whole_rows
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.oneshot import gather_sum
from phalanx.comm.sequence_parallel.narrow_signals import (
    clear_word,
    poll_words,
    push_codes,
    push_once,
    sealed_codes,
    sealed_word,
)
from phalanx.comm.sequence_parallel.sharded_residual import ShardedResidual, local_residual
from phalanx.comm.signals import at, clear, dependents, draw_ticket, enter, leave, poll, push, seal
from phalanx.comm.symmetric import SymmetricWorkspace
from phalanx.comm.twoshot import scatter
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.ops.residual_rms_norm import add_residual, normed, square_sum
from phalanx.kernels.quantize import fp8_vector, token_scale
from phalanx.kernels.scaled_tensors import FP8, Unscaled
from phalanx.kernels.vectors import load, load_row, load_scales, rounded, store, unpack


@dataclass(frozen=True, slots=True)
class RsNormAgLaunch:
    """programs: of the grid, all of which must run at once; block: vectors of 16 bytes that hold a row of the sum; flat: vectors
    that a program pushes at once; take: vectors that hold a row of what is gathered; warps: of a program; block, flat and take are
    powers of two, at least 32 x warps; movers: programs that push, add up and finish rows, the others collect (none: the movers
    collect when they have finished); registers: of a thread at most, so that all programs fit."""

    programs: int
    block: int
    flat: int
    take: int
    warps: int
    movers: int
    registers: int | None = None


@lru_cache(maxsize=1 << 12)
def launch_of(
    rows: int, pitch: int, take: int, world: int, num_sms: int, shape: tuple[int, int, int] | None = None
) -> RsNormAgLaunch:  # fmt: skip
    """For a chunk of `rows` rows of `pitch` vectors, of which `take` vectors each are gathered. shape: (warps of a program,
    programs on a multiprocessor, movers among these) to try instead of those that follow from the size: one program where a rank
    has few rows, or has so many peers that sums take its registers; else two, which both move."""
    block, depth = row_block(pitch), -(-rows // world)
    if shape is None:
        shape = (16, 1, 1) if depth <= num_sms or world > 4 else (16, 2, 2)
    warps, per_sm, moving = min(shape[0], block // 32), shape[1], shape[2]
    flat = 32 * warps
    work = max(-(-depth * pitch // flat), depth)
    movers = min(work if per_sm > moving else max(work, rows - depth), moving * num_sms)
    collectors = min(max(rows - depth, 1), (per_sm - moving) * num_sms)
    registers = min(65536 // (per_sm * flat) // 8 * 8, 248) if per_sm > 1 else None
    return RsNormAgLaunch(movers + collectors, block, flat, max(row_block(take), flat), warps, movers, registers)


@lru_cache(maxsize=1 << 12)
def chunk_rows_of(pitch: int, twoshot_vectors: int, world: int) -> int:
    """Rows of a chunk, a multiple of the number of ranks. It depends on the row's length and on the workspace alone, so that a row
    belongs to the same rank in every call that it goes through. The part of a half that a two-shot of so many rows takes holds the
    parts and at most the norms."""
    return whole_rows(twoshot_vectors, pitch, world)


class Outputs:
    """The tensors that the kernel writes for a sum like `like` [T, H]: the new residual, and the norm, its quantization, or both.
    gathered: the one of these two that the ranks send to each other, the norm where both are written."""

    def __init__(self, like: Tensor, fusion: ResidualRmsNorm) -> None:
        self.residual = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.mode: Literal["none", "fp8", "fp8_token"] = "none"
        self.norm = self.quantized = self.scales = None
        if fusion.quant != "none":
            self.mode = "fp8" if fusion.scale is not None else "fp8_token"
            self.quantized = torch.empty(like.shape, dtype=FP8, device=like.device)
        self.keep_norm = fusion.keep_norm and self.quantized is not None
        if self.quantized is None or self.keep_norm:
            self.norm = torch.empty_like(self.residual)
        if self.mode == "fp8_token":
            self.scales = torch.empty(len(like), 1, dtype=torch.float32, device=like.device)

    @property
    def gathered(self) -> Tensor:
        gathered = self.quantized if self.norm is None else self.norm
        assert gathered is not None
        return gathered

    def pointers(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(norm, new residual, quantized, scales) of rows first .. last - 1, viewed as the kernel writes them. The residual stands
        for those that are not written."""
        residual = self.residual[first:last].view(torch.int32)
        norm = residual if self.norm is None else self.norm[first:last].view(torch.int32)
        # One store holds the e4m3 values of one vector of the sum: 8 values of 16 bit, or 4 of 32 bit.
        codes = torch.int64 if self.residual.element_size() == 2 else torch.int32
        quantized = residual if self.quantized is None else self.quantized[first:last].view(codes)
        return norm, residual, quantized, residual if self.scales is None else self.scales[first:last]

    def result(self, chunk_rows: int) -> tuple[Tensor, ...]:
        """(norm, quantized, scales, residual), without those that are not written."""
        written = (output for output in (self.norm, self.quantized, self.scales) if output is not None)
        return (*written, ShardedResidual.of(self.residual, chunk_rows))


class RsNormAg:
    """RS_NORM_AG of one group."""

    def __init__(self, workspace: SymmetricWorkspace) -> None:
        self.workspace = workspace

    def chunk_rows(self, hidden: int, dtype: torch.dtype) -> int:
        """Rows by which `all_reduce_norm` of a tensor [T, hidden] shards."""
        return chunk_rows_of(hidden * dtype.itemsize // 16, self.workspace.twoshot_vectors, self.workspace.world)

    def all_reduce_norm(
        self, x: Tensor | Unscaled, fusion: ResidualRmsNorm, shape: tuple[int, int, int] | None = None
    ) -> tuple[Tensor, ...]:
        """The sum over ranks of x [T, H] (contiguous, 16-byte aligned; H a multiple of 16) and its fusion (none or fp8), in new
        tensors. All ranks get all rows, but of the new residual, which is a ShardedResidual. fusion.residual: a
        tensor, or the ShardedResidual of such a call. shape: see `launch_of`."""
        values, row_scales, column_scales = x if isinstance(x, Unscaled) else (x, None, None)
        workspace, outputs, (tokens, hidden) = self.workspace, Outputs(values, fusion), values.shape
        pitch, take = hidden * values.element_size() // 16, hidden * outputs.gathered.element_size() // 16
        chunk_rows = self.chunk_rows(hidden, values.dtype)
        residual = local_residual(fusion.residual, tokens, chunk_rows)
        for first in range(0, tokens, chunk_rows):
            last = min(tokens, first + chunk_rows)
            launch = launch_of(last - first, pitch, take, workspace.world, workspace.num_sms, shape)
            rs_norm_ag[(launch.programs,)](
                values[first:last].view(torch.int32), None if row_scales is None else row_scales[first:last], column_scales,
                residual[first:last].view(torch.int32), fusion.weight.view(torch.int32), outputs.pointers(first, last),
                outputs.gathered[first:last].view(torch.int32), outputs.residual if fusion.scale is None else fusion.scale,
                workspace.addresses, (workspace.epoch, *workspace.marks()), workspace.half, last - first, hidden, launch.movers,
                fusion.eps,
                KIND=DTYPE_NAMES[values.dtype], QUANT=outputs.mode, KEEP_NORM=outputs.keep_norm, RANK=workspace.rank,
                WORLD=workspace.world, BLOCK=launch.block, FLAT=launch.flat, TAKE=launch.take, WARPS=launch.warps,
                SM=workspace.sm, num_warps=launch.warps, maxnreg=launch.registers, launch_pdl=workspace.sm >= 90,
            )  # fmt: skip
        return outputs.result(chunk_rows)


@triton.jit
def _quantize_sent(
    words, row, index, mask, pointers, scale, KIND: tl.constexpr, QUANT: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """Quantize a row's norm, in the words that are sent, and store its e4m3 and its scale: each rank does so with the same words,
    so that all have the same bits."""
    lanes = unpack(words, KIND)
    if QUANT == "fp8_token":
        row_scale = token_scale(lanes)
        tl.store(pointers[3] + row, row_scale)
        inverse = tl.div_rn(1.0, row_scale)
    else:
        inverse = tl.div_rn(1.0, tl.load(scale))
    tl.store(pointers[2] + index, fp8_vector(lanes, inverse, SM), mask)


@triton.jit
def _quantize_and_push(
    norm, row, index, mask, pointers, scale, peers, outputs_at, scales_at,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Quantize a row's norm, store the result, and push it to all; or the norm itself. index: of the row's vectors in the message;
    outputs_at, scales_at: where outputs, and their scales, begin in every rank's workspace."""
    if QUANT == "none" or KEEP_NORM:
        sealed = seal(norm)
        for step in tl.static_range(1, WORLD):
            push(at(peers[(RANK + step) % WORLD] + outputs_at, index, mask), sealed)
        store(pointers[0], index, sealed, mask, SM)
        if KEEP_NORM:
            _quantize_sent(sealed, row, index, mask, pointers, scale, KIND, QUANT, SM)
    else:
        lanes = unpack(norm, KIND)
        if QUANT == "fp8_token":
            row_scale = token_scale(lanes)
            inverse = tl.div_rn(1.0, row_scale)
            word = sealed_word(row_scale.to(tl.int32, bitcast=True))
            for step in tl.static_range(1, WORLD):
                push_once(peers[(RANK + step) % WORLD] + scales_at + row.to(tl.int64) * 4, word)
            tl.store(pointers[3] + row, word.to(tl.float32, bitcast=True))
        else:
            inverse = tl.div_rn(1.0, tl.load(scale))
        codes = sealed_codes(fp8_vector(lanes, inverse, SM))
        for step in tl.static_range(1, WORLD):
            push_codes(peers[(RANK + step) % WORLD] + outputs_at, index, mask, codes)
        tl.store(pointers[2] + index, codes, mask)


@triton.jit
def finish_row(
    total, old, row, index, mask, weight_words, pointers, scale, peers, outputs_at, scales_at, hidden, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Add the residual (words) to a row's sum (lanes, fp32), norm it, then `_quantize_and_push`."""
    lanes = add_residual(rounded(total, KIND, SM), old, index, mask, pointers[1], KIND, SM)
    norm = normed(lanes, square_sum(lanes), weight_words, hidden, eps, KIND, SM)
    _quantize_and_push(
        norm, row, index, mask, pointers, scale, peers, outputs_at, scales_at, KIND, QUANT, KEEP_NORM, RANK, WORLD, SM
    )  # fmt: skip


@triton.jit
def _reduce_rows(
    x, row_scales, column_scales, residual, weight_words, pointers, scale, peers, offset, outputs_at, scales_at, rows,
    chunk_rows, pitch, hidden, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Reduce this rank's rows, one row per program at a time, and finish them."""
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    for local in range(tl.program_id(0), chunk_rows, movers):
        row = RANK * chunk_rows + local
        if row < rows:
            index = row * pitch + column
            old = load(residual, index, mask, SM)
            own = load_row(x, row_scales, load_scales(column_scales, column, mask, KIND, SM), row, index, mask, KIND, SM)
            total = gather_sum(
                own, peers[RANK] + offset, local * pitch + column, mask, chunk_rows * pitch, KIND, RANK, WORLD, BLOCK, WARPS
            )  # fmt: skip
            finish_row(
                total, old, row, index, mask, weight_words, pointers, scale, peers, outputs_at, scales_at, hidden, eps,
                KIND, QUANT, KEEP_NORM, RANK, WORLD, SM,
            )  # fmt: skip


@triton.jit
def _collect(
    target, pointers, scale, inbox, rows, chunk_rows, pitch, first, step,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Take the other ranks' outputs, rows of `pitch` vectors, as they arrive, and quantize those that came as norms: ranks work at
    the same rate, so rows are gathered from each rank alternately."""
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    for item in range(first, chunk_rows * (WORLD - 1), step):
        row = (RANK + 1 + item % (WORLD - 1)) % WORLD * chunk_rows + item // (WORLD - 1)
        if row < rows:
            index = row * pitch + column
            address = at(inbox, index, mask)
            words = poll((address,), BLOCK, WARPS)
            clear(address)
            store(target, index, words, mask, SM)
            if KEEP_NORM:
                _quantize_sent(words, row, index, mask, pointers, scale, KIND, QUANT, SM)


@triton.jit
def _collect_scales(scales, inbox, rows, chunk_rows, first, step, RANK: tl.constexpr, WARPS: tl.constexpr):
    """Take the scales of the other ranks' rows, one per thread."""
    BLOCK: tl.constexpr = 32 * WARPS
    for block in range(first, tl.cdiv(rows, BLOCK), step):
        row = block * BLOCK + tl.arange(0, BLOCK)
        mask = (row < rows) & (row // chunk_rows != RANK)
        address = tl.where(mask, inbox + row.to(tl.int64) * 4, 0)
        words = poll_words(address)
        clear_word(address)
        tl.store(scales + row, words.to(tl.float32, bitcast=True), mask)


@triton.jit
def collect(
    gathered, pointers, scale, workspace, outputs_at, scales_at, rows, chunk_rows, pitch, movers,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    TAKE: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Take the other ranks' outputs, into gathered, and what belongs to them, into pointers: by the programs that are no movers;
    where all are, by all, once they have finished their rows. workspace: the address of this rank's; pitch: vectors of a row
    there."""
    own, programs = tl.program_id(0), tl.num_programs(0)
    if (movers == programs) | (own >= movers):
        # Where all are movers, the last ones have finished first, if they had a row at all, so they begin.
        first = tl.where(movers == programs, programs - 1 - own, own - movers)
        step = tl.where(movers == programs, programs, programs - movers)
        _collect(
            gathered, pointers, scale, workspace + outputs_at, rows, chunk_rows, pitch, first, step,
            KIND, QUANT, KEEP_NORM, RANK, WORLD, TAKE, WARPS, SM,
        )  # fmt: skip
        if QUANT == "fp8_token" and not KEEP_NORM:
            _collect_scales(pointers[3], workspace + scales_at, rows, chunk_rows, first, step, RANK, WARPS)


@triton.jit(do_not_specialize=["rows", "hidden", "half", "movers", "row_scales"])
def rs_norm_ag(
    x, row_scales, column_scales, residual, weight, pointers, gathered, scale, peers, epoch, half, rows, hidden, movers, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, TAKE: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of x [rows, hidden], its residual, norm and quantization, each row by one rank.

    row_scales, column_scales: scales that x still lacks, or None (`vectors.load_output`). pointers: of (norm, new residual,
    quantized by the vector, scales), written as the sum's vectors lie; gathered: the norm, or quantized where the norm is not
    written, as int32, written by 16 bytes. KEEP_NORM: QUANT is "fp8" or "fp8_token", and the norm is written, too.
    peers: the address of each rank's workspace; epoch: see `signals`; half: vectors in one half of a workspace. BLOCK:
    vectors that hold a row of x; FLAT: vectors that a program moves at once; TAKE: vectors that hold a row of the outputs. Each is
    at least 32 x WARPS, since a vector must belong to one thread. hidden is a multiple of 16."""
    dependents(SM)
    pitch = hidden // (4 if KIND == "fp32" else 8)
    chunk_rows = tl.cdiv(rows, WORLD)
    chunk = chunk_rows * pitch
    column = tl.arange(0, BLOCK)
    weight_words = load(weight, column, column < pitch, SM)  # no kernel before this one writes weights
    number = enter(epoch, SM)
    offset = (number & 1) * half.to(tl.int64) * 16
    programs = tl.num_programs(0)
    outputs_at = offset + (WORLD - 1) * chunk.to(tl.int64) * 16
    out_pitch = pitch if QUANT == "none" or KEEP_NORM else hidden // 16
    scales_at = outputs_at + rows.to(tl.int64) * out_pitch * 16
    moves = tl.program_id(0) < movers
    if moves:
        scatter(x, row_scales, column_scales, pitch, peers, offset, rows * pitch, chunk, movers, SM, KIND, RANK, WORLD, FLAT)
    ticket = draw_ticket(epoch, programs)
    if moves:
        _reduce_rows(
            x, row_scales, column_scales, residual, weight_words, pointers, scale, peers, offset, outputs_at, scales_at, rows,
            chunk_rows, pitch, hidden, movers, eps, KIND, QUANT, KEEP_NORM, RANK, WORLD, BLOCK, WARPS, SM,
        )  # fmt: skip
    collect(
        gathered, pointers, scale, peers[RANK], outputs_at, scales_at, rows, chunk_rows, out_pitch, movers,
        KIND, QUANT, KEEP_NORM, RANK, WORLD, TAKE, WARPS, SM,
    )  # fmt: skip
    leave(epoch, programs, ticket)
