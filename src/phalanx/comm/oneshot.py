# SPDX-License-Identifier: Apache-2.0
"""ONESHOT on GPUs: `kernels.allreduce_oneshot` over a symmetric workspace, with its launches.

out = round(x of rank 0 + x of rank 1 + ...)            in fp32, in rank order; then the fusion, in the same kernel
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import Workspace


@dataclass(frozen=True, slots=True)
class Launch:
    """programs: of the grid; block: vectors of 16 bytes that a program handles at once, at least 32 x warps, since a vector must
    belong to one thread (with a norm: that hold a row, or a piece of one); warps: of a program; loop: programs handle more than
    one block; pieces: programs of one row, 1 where a row lies on one."""

    programs: int
    block: int
    warps: int
    loop: bool
    pieces: int = 1


def flat_launch(vectors: int, sms: int) -> Launch:
    """For a sum alone: small programs on many multiprocessors while all fit at once, else as many as fit, in a loop."""
    warps = 1 if vectors <= 1 << 13 else 4
    if vectors <= 4 * sms * 128:
        return Launch(-(-vectors // (32 * warps)), 32 * warps, warps, False)
    programs = min(-(-vectors // 512), 2 * sms)
    return Launch(programs, 512, 16, programs * 512 < vectors)


def row_block(pitch: int) -> int:
    """The least power of two that holds a row of `pitch` vectors and feeds a warp."""
    return max(32, 1 << (pitch - 1).bit_length())


def row_launch(rows: int, pitch: int, world: int, sms: int, *, whole_rows: bool = False) -> Launch:
    """For a sum with a norm, `pitch` vectors a row: one program a row; with many peers to read from, a few rows in pieces, on as
    many multiprocessors, while all pieces run at once. whole_rows: a row must lie on one program."""
    pieces = -(-pitch // PIECE)
    if world > 2 and not whole_rows and pieces > 1 and rows * pieces <= 4 * sms:
        return Launch(rows * pieces, PIECE, PIECE // 32, False, pieces)
    block = row_block(pitch)
    warps = min(16 if 16 < rows <= sms else 8, block // 32)
    programs = min(rows, 4 * sms)
    return Launch(programs, block, warps, programs < rows)


PIECE = 128
"""Vectors of a piece of a row."""


def all_reduce(x: Tensor, workspace: Workspace, launch: Launch | None = None) -> Tensor:
    """The sum over ranks of x (contiguous, a multiple of 16 bytes, 16-byte aligned), in a new tensor."""
    from phalanx.kernels.allreduce_oneshot import oneshot
    from phalanx.kernels.vectors import KINDS

    out = torch.empty_like(x)
    source, target = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    vectors = source.numel() // 4
    for first in range(0, vectors, workspace.oneshot_vectors):
        count = min(vectors - first, workspace.oneshot_vectors)
        run = launch or flat_launch(count, workspace.sms)
        oneshot[(run.programs,)](
            source[4 * first :], target[4 * first :], workspace.addresses, workspace.turn, workspace.half, count,
            KIND=KINDS[x.dtype], RANK=workspace.rank, WORLD=workspace.world, BLOCK=run.block, WARPS=run.warps,
            LOOP=run.loop, PTX=workspace.ptx, num_warps=run.warps, launch_pdl=workspace.ptx >= 90,
        )  # fmt: skip
    return out


def all_reduce_norm(x: Tensor, fusion: ResidualRmsNorm, workspace: Workspace, launch: Launch | None = None) -> tuple[Tensor, ...]:
    """The sum over ranks of x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) and its fusion, in new tensors."""
    from phalanx.kernels.allreduce_oneshot import oneshot_norm, oneshot_norm_pieces
    from phalanx.kernels.residual_rms_norm import Sinks, quant_mode
    from phalanx.kernels.vectors import KINDS

    mode = quant_mode(fusion.quant, fusion.scale)
    sinks = Sinks(x, mode, fusion.keep_norm)
    residual = fusion.residual.contiguous()
    rows, hidden = x.shape
    pitch = hidden * x.element_size() // 16
    rows_at_once = workspace.oneshot_vectors // pitch
    for first in range(0, rows, rows_at_once):
        last = min(rows, first + rows_at_once)
        run = launch or row_launch(last - first, pitch, workspace.world, workspace.sms, whole_rows=mode == "fp8_token")
        inputs = (
            x[first:last].view(torch.int32), residual[first:last].view(torch.int32), fusion.weight.view(torch.int32),
            sinks.pointers(first, last), sinks.residual if fusion.scale is None else fusion.scale, workspace.addresses,
            workspace.turn,
        )  # fmt: skip
        fixed = {
            "KIND": KINDS[x.dtype], "QUANT": mode, "KEEP_NORM": fusion.keep_norm, "RANK": workspace.rank, "WORLD": workspace.world,
            "WARPS": run.warps, "PTX": workspace.ptx, "num_warps": run.warps, "launch_pdl": workspace.ptx >= 90,
        }  # fmt: skip
        if run.pieces > 1:
            oneshot_norm_pieces[(run.programs,)](
                *inputs, workspace.board, workspace.half, last - first, hidden, fusion.eps,
                PIECE=run.block, PIECES=1 << (run.pieces - 1).bit_length(), **fixed,
            )  # fmt: skip
        else:
            oneshot_norm[(run.programs,)](
                *inputs, workspace.half, last - first, hidden, fusion.eps, BLOCK=run.block, LOOP=run.loop, **fixed
            )
    return sinks.outputs()
