# SPDX-License-Identifier: Apache-2.0
"""GEMM_RS on GPUs: the GEMM writes each rank's rows straight into that rank's memory (fused GEMM + reduce-scatter), and
`kernels.sequence_parallel.gemm_rs` continues from there with the sum, the norm and the all-gather.

    rows of rank r: sum = round(x of rank 0 + x of rank 1 + ...), then the fusion, on rank r
    all ranks:      the norm, or its e4m3 values and scales, or all of these, of all rows

The bits are those of RS_NORM_AG behind an ordinary GEMM, as far as a GEMM of some of the rows gives the bits of the GEMM of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.chunked import pitch_of
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.sequence_parallel.rs_norm_ag import Outputs, launch_of, local_residual
from phalanx.comm.symmetric import ReduceScatterBuffer, SymmetricWorkspace

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
        from phalanx.kernels.dtypes import DTYPE_NAMES
        from phalanx.kernels.sequence_parallel.gemm_rs import gemm_rs_norm_ag

        workspace, buffer, (rows, hidden) = self._workspace, self._buffer, fusion.residual.shape
        residual = local_residual(fusion.residual, rows, rows)
        outputs = Outputs(residual, fusion)
        launch = launch_of(rows, pitch_of(residual), pitch_of(outputs.gathered), workspace.world, workspace.num_sms)
        gemm_rs_norm_ag[(launch.programs,)](
            buffer.local, residual.view(torch.int32), fusion.weight.view(torch.int32), outputs.pointers(0, rows),
            outputs.gathered.view(torch.int32), outputs.residual if fusion.scale is None else fusion.scale, workspace.addresses,
            buffer.flags, workspace.epoch, workspace.half, rows, hidden, launch.movers, fusion.eps,
            KIND=DTYPE_NAMES[residual.dtype], QUANT=outputs.mode, KEEP_NORM=outputs.keep_norm, RANK=workspace.rank,
            WORLD=workspace.world, BLOCK=launch.block, TAKE=launch.take, WARPS=launch.warps, SM=workspace.sm,
            num_warps=launch.warps, maxnreg=launch.registers, launch_pdl=workspace.sm >= 90,
        )  # fmt: skip
        return outputs.result(rows)
