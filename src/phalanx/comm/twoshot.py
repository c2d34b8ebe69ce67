# SPDX-License-Identifier: Apache-2.0
"""TWOSHOT on GPUs: the launches of `kernels.allreduce.twoshot` over a symmetric workspace.

part r of out = round(x of rank 0 + x of rank 1 + ...) on rank r, in fp32, in rank order; gathered; then the fusion
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.comm import chunked
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.oneshot import row_block
from phalanx.comm.symmetric import SymmetricWorkspace, part_vectors
from phalanx.kernels.scaled_tensors import Unscaled


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
    block = row_block(pitch)
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
    from phalanx.kernels.allreduce.twoshot import twoshot

    def one(source: Tensor, target: Tensor, vectors: int, constants: dict[str, Any]) -> None:
        run = launch or flat_launch(vectors, workspace.world, workspace.num_sms)
        twoshot[(run.programs,)](
            source, target, workspace.addresses, workspace.epoch, workspace.half, vectors, part_vectors(vectors, workspace.world),
            run.movers, BLOCK=run.flat, WARPS=run.warps, num_warps=run.warps, maxnreg=run.registers, **constants,
        )  # fmt: skip

    return chunked.all_reduce(x, workspace, workspace.twoshot_vectors, one)


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: SymmetricWorkspace, launch: TwoshotLaunch | None = None
) -> tuple[Tensor, ...]:
    """The sum over ranks of x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) and its fusion, in new tensors."""
    from phalanx.kernels.allreduce.twoshot import twoshot_norm

    values = Unscaled.parts(x)[0]
    hidden, pitch = values.shape[1], chunked.pitch_of(values)

    def one(arguments: tuple[Any, ...], rows: int, constants: dict[str, Any]) -> None:
        run = launch or row_launch(rows, pitch, workspace.world, workspace.num_sms)
        twoshot_norm[(run.programs,)](
            *arguments, workspace.half, rows, hidden, part_vectors(rows * pitch, workspace.world), run.movers, fusion.eps,
            BLOCK=run.block, FLAT=run.flat, WARPS=run.warps, num_warps=run.warps, maxnreg=run.registers, **constants,
        )  # fmt: skip

    return chunked.all_reduce_norm(x, fusion, workspace, workspace.twoshot_vectors, one)
