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
    """programs: of the grid; block: vectors of 16 bytes that a program handles at once (with a norm: that hold a row), at least
    32 x warps, since a vector must belong to one thread; warps: of a program; loop: programs handle more than one block; piece:
    where not 0, a row is pushed by programs of its own (not counted in `programs`), `piece` vectors each."""

    programs: int
    block: int
    warps: int
    loop: bool
    piece: int = 0


def flat_launch(vectors: int, sms: int) -> Launch:
    """For a sum alone: small programs on many multiprocessors while all fit at once, else as many as fit, in a loop."""
    if vectors <= 4 * sms * 128:
        return Launch(-(-vectors // 128), 128, 4, False)
    programs = min(-(-vectors // 512), 2 * sms)
    return Launch(programs, 512, 16, programs * 512 < vectors)


def row_block(pitch: int) -> int:
    """The least power of two that holds a row of `pitch` vectors and feeds a warp."""
    return max(32, 1 << (pitch - 1).bit_length())


def row_launch(rows: int, pitch: int, sms: int) -> Launch:
    """For a sum with a norm, `pitch` vectors a row: all the threads that a row can use while there is a multiprocessor for each
    row, else half of them."""
    block = row_block(pitch)
    warps = min(32, block // 32)
    if rows > sms:
        warps = max(1, min(16, warps))
    programs = min(rows, sms if warps > 16 else 2 * sms)
    return Launch(programs, block, warps, programs < rows)


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
    from phalanx.kernels.allreduce_oneshot import oneshot_norm
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
        run = launch or row_launch(last - first, pitch, workspace.sms)
        pushers = (last - first) * -(-pitch // run.piece) if run.piece else 0
        oneshot_norm[(pushers + run.programs,)](
            x[first:last].view(torch.int32), residual[first:last].view(torch.int32), fusion.weight.view(torch.int32),
            sinks.pointers(first, last), sinks.residual if fusion.scale is None else fusion.scale, workspace.addresses,
            workspace.turn, workspace.half, last - first, hidden, fusion.eps,
            KIND=KINDS[x.dtype], QUANT=mode, KEEP_NORM=fusion.keep_norm, RANK=workspace.rank, WORLD=workspace.world,
            BLOCK=run.block, WARPS=run.warps, LOOP=run.loop, PIECE=run.piece, PTX=workspace.ptx, num_warps=run.warps,
            launch_pdl=workspace.ptx >= 90,
        )  # fmt: skip
    return sinks.outputs()
