# SPDX-License-Identifier: Apache-2.0
"""TWOSHOT+OWNED on GPUs: `kernels.rows.owned` over a symmetric workspace, with its launches.

rows of rank r: out = round(x of rank 0 + x of rank 1 + ...), then the fusion, on rank r; norm or e4m3 and scales go to all
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.chunked import pitch_of, whole_rows
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.oneshot import row_block
from phalanx.comm.rows.ownership import OwnedRows, same_owners
from phalanx.comm.symmetric import Workspace
from phalanx.kernels.reference import Unscaled


@dataclass(frozen=True, slots=True)
class Launch:
    """programs: of the grid, all of which must run at once; block: vectors of 16 bytes that hold a row of the sum; flat: vectors
    that a program pushes at once; take: vectors that hold a row of what is handed out; warps: of a program; block, flat and take
    are powers of two, at least 32 x warps; movers: programs that push, add up and finish rows, the others collect (none: movers
    collect when they have finished); registers: of a thread at most, so that all programs fit."""

    programs: int
    block: int
    flat: int
    take: int
    warps: int
    movers: int
    registers: int | None = None


def launch_of(rows: int, pitch: int, take: int, world: int, sms: int, shape: tuple[int, int, int] | None = None) -> Launch:
    """For a chunk of `rows` rows of `pitch` vectors, which become `take` vectors each. shape: (warps of a program, programs on a
    multiprocessor, movers among these) to try instead of those that follow from the size: one program where a rank owns few rows,
    or has so many peers that sums take its registers; else two, which both move."""
    block, depth = row_block(pitch), -(-rows // world)
    if shape is None:
        shape = (16, 1, 1) if depth <= sms or world > 4 else (16, 2, 2)
    warps, per_sm, moving = min(shape[0], block // 32), shape[1], shape[2]
    flat = 32 * warps
    work = max(-(-depth * pitch // flat), depth)
    movers = min(work if per_sm > moving else max(work, rows - depth), moving * sms)
    collectors = min(max(rows - depth, 1), (per_sm - moving) * sms)
    registers = min(65536 // (per_sm * flat) // 8 * 8, 248) if per_sm > 1 else None
    return Launch(movers + collectors, block, flat, max(row_block(take), flat), warps, movers, registers)


def rows_at_once(pitch: int, workspace: Workspace) -> int:
    """Rows of a chunk: whole shares, of a size that hangs on the tensor's rows and on the workspace alone, so that a row has the
    same owner in every call that it goes through. What a two-shot of them takes holds the parts and, at most, the norms."""
    return whole_rows(workspace.twoshot_vectors, pitch, workspace.world)


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: Workspace, shape: tuple[int, int, int] | None = None
) -> tuple[Tensor, ...]:
    """The sum over ranks of x [T, H] (contiguous, 16-byte aligned; H a multiple of 16) and its fusion (none or fp8, without
    keep_norm), in new tensors: whole ones, but for the new residual, which is OwnedRows. fusion.residual: whole, or OwnedRows of
    such a call. shape: see `launch_of`."""
    from phalanx.kernels.residual_rms_norm import Sinks, quant_mode
    from phalanx.kernels.rows.owned import owned_norm
    from phalanx.kernels.vectors import KINDS

    values, row_scales, column_scales = Unscaled.parts(x)
    mode = quant_mode(fusion.quant, fusion.scale)
    sinks = Sinks(values, mode, False)
    (tokens, hidden), pitch = values.shape, pitch_of(values)
    taken = sinks.norm if sinks.quantized is None else sinks.quantized
    assert taken is not None
    take, at_once = pitch_of(taken), rows_at_once(pitch, workspace)
    residual = fusion.residual
    if isinstance(residual, OwnedRows):
        if not same_owners(tokens, residual.at_once, at_once):
            raise ValueError(f"the residual's rows have owners by {residual.at_once} rows, and this all-reduce's by {at_once}")
        residual = residual.held
    for first in range(0, tokens, at_once):
        last = min(tokens, first + at_once)
        run = launch_of(last - first, pitch, take, workspace.world, workspace.sms, shape)
        owned_norm[(run.programs,)](
            values[first:last].view(torch.int32), None if row_scales is None else row_scales[first:last], column_scales,
            residual[first:last].view(torch.int32), fusion.weight.view(torch.int32), sinks.pointers(first, last),
            taken[first:last].view(torch.int32), sinks.residual if fusion.scale is None else fusion.scale, workspace.addresses,
            workspace.turn, workspace.half, last - first, hidden, run.movers, fusion.eps,
            KIND=KINDS[values.dtype], QUANT=mode, RANK=workspace.rank, WORLD=workspace.world, BLOCK=run.block, FLAT=run.flat,
            TAKE=run.take, WARPS=run.warps, PTX=workspace.ptx, num_warps=run.warps, maxnreg=run.registers,
            launch_pdl=workspace.ptx >= 90,
        )  # fmt: skip
    *others, new = sinks.outputs()
    return (*others, OwnedRows.of(new, at_once))
