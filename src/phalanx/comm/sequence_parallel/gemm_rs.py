# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMM_RS on GPUs: `rs_norm_ag` behind a fused GEMM + reduce-scatter. The GEMMs of all ranks have written their outputs straight
into the memory of the rank that reduces the rows, so that the first hop is the GEMM's own output.

    rank r's memory: [world][chunk_rows][hidden], the outputs of each rank's GEMM for r's rows, by rank
    total = round(x[0] + ... + x[world - 1])  of its rows, in fp32, in rank order, rounded once; then as in `rs_norm_ag`

These partial sums come from GEMMs and carry no sentinel: this kernel, which runs behind a rank's GEMMs, sets a flag at each peer.
One such buffer is enough, without halves: a rank writes for its next call when this one has ended there, for which it has collected
every row of every rank, and a rank pushes a row when it has read all partial sums of it.

The bits are those of RS_NORM_AG behind an ordinary GEMM, as far as a GEMM of some of the rows gives the bits of the GEMM of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.comm.chunked import pitch_of
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.sequence_parallel.rs_norm_ag import Outputs, collect, finish_row, launch_of
from phalanx.comm.sequence_parallel.sharded_residual import local_residual
from phalanx.comm.signals import await_flag, dependents, draw_ticket, enter, leave, raise_flag
from phalanx.comm.symmetric import ReduceScatterBuffer, SymmetricWorkspace
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.vectors import add, load, unpack

Targets = Sequence[tuple[slice, Tensor]]
"""As `ScatterTargets.targets`."""
_MAX_CACHED = 256


def scatter_targets(
    tokens: int, hidden: int, dtype: torch.dtype, buffer: ReduceScatterBuffer
) -> list[tuple[slice, Tensor]] | None:  # fmt: skip
    """`ScatterTargets.targets` of a GEMM output [tokens, hidden]. None where it does not fit the buffer, or leaves the last rank
    without rows. The next GEMM may write there once this one's `all_reduce_norm` is launched."""
    rank, world, row_bytes = buffer.rank, buffer.world, hidden * dtype.itemsize
    depth = -(-tokens // world)
    if world * depth * row_bytes > buffer.capacity or tokens <= depth * (world - 1):
        return None  # a GEMM without rows, for a last rank that has none, cannot run
    targets = []
    # Each rank begins with another peer, and ends with itself while what it sent is still on the wire.
    for step in range(1, world + 1):
        peer = (rank + step) % world
        rows = slice(peer * depth, min((peer + 1) * depth, tokens))
        targets.append((rows, buffer.peer_tensor(peer, rows.stop - rows.start, hidden, dtype, rank * depth * row_bytes)))
    return targets


def gathered_rows_fit(tokens: int, row_bytes: int, workspace: SymmetricWorkspace) -> bool:
    """Whether half of the workspace holds what is gathered of `tokens` rows: `row_bytes` and a scale of 4 bytes each."""
    return tokens * (row_bytes + 4) <= 16 * workspace.half


class GemmRs:
    """GEMM_RS of one group. sweeps: its messages are measured one by one, and none has to run like a longer one."""

    def __init__(self, workspace: SymmetricWorkspace, buffer: ReduceScatterBuffer, *, sweeps: bool = False) -> None:
        self._workspace, self._buffer = workspace, buffer
        self._longest_bytes = 0 if sweeps else buffer.max_message_bytes
        self._targets: dict[tuple[int, int, torch.dtype], Targets | None] = {}

    def targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> Targets | None:
        """Where to write a GEMM output [tokens, hidden] for `all_reduce_norm`; None where RS_NORM_AG alone has room."""
        dtype, buffer = fusion.residual.dtype, self._buffer
        row_bytes = hidden * dtype.itemsize
        gathered = hidden if fusion.quant == "fp8" and not fusion.keep_norm else row_bytes
        # Decided by the longest message: if GEMM_RS excluded that one, shorter ones would run a kernel that no start has met.
        if not gathered_rows_fit(max(tokens, self._longest_bytes // row_bytes), gathered, self._workspace):
            return None
        key = (tokens, hidden, dtype)
        if key not in self._targets:
            if len(self._targets) >= _MAX_CACHED:
                self._targets.clear()
            self._targets[key] = scatter_targets(tokens, hidden, dtype, buffer)
        return self._targets[key]

    def all_reduce_norm(self, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """As `RsNormAg.all_reduce_norm`, of a GEMM output like fusion.residual that was written to its `targets`. The residual is a
        tensor, or a ShardedResidual with all rows in one chunk."""
        workspace, buffer, (rows, hidden) = self._workspace, self._buffer, fusion.residual.shape
        residual = local_residual(fusion.residual, rows, rows)
        outputs = Outputs(residual, fusion)
        launch = launch_of(rows, pitch_of(residual), pitch_of(outputs.gathered), workspace.world, workspace.num_sms)
        gemm_rs_norm_ag[(launch.programs,)](
            buffer.local, residual.view(torch.int32), fusion.weight.view(torch.int32), outputs.pointers(0, rows),
            outputs.gathered.view(torch.int32), outputs.residual if fusion.scale is None else fusion.scale, workspace.addresses,
            buffer.flags, (workspace.epoch, *workspace.marks()), workspace.half, rows, hidden, launch.movers, fusion.eps,
            KIND=DTYPE_NAMES[residual.dtype], QUANT=outputs.mode, KEEP_NORM=outputs.keep_norm, RANK=workspace.rank,
            WORLD=workspace.world, BLOCK=launch.block, TAKE=launch.take, WARPS=launch.warps, SM=workspace.sm,
            num_warps=launch.warps, maxnreg=launch.registers, launch_pdl=workspace.sm >= 90,
        )  # fmt: skip
        return outputs.result(rows)


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
