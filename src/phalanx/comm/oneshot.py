# SPDX-License-Identifier: Apache-2.0
"""ONESHOT on GPUs: `kernels.allreduce_oneshot` over a symmetric workspace, with its launches.

out = round(x of rank 0 + x of rank 1 + ...)            in fp32, in rank order; then the fusion, in the same kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.comm import chunked
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import SymmetricWorkspace
from phalanx.kernels.scaled_tensors import Unscaled


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


def flat_launch(vectors: int, num_sms: int) -> Launch:
    """For a sum alone: small programs on many multiprocessors while all fit at once, else as many as fit, in a loop."""
    warps = 1 if vectors <= 1 << 13 else 4
    if vectors <= 4 * num_sms * 128:
        return Launch(-(-vectors // (32 * warps)), 32 * warps, warps, False)
    programs = min(-(-vectors // 512), 2 * num_sms)
    return Launch(programs, 512, 16, programs * 512 < vectors)


def row_block(pitch: int) -> int:
    """The least power of two that holds a row of `pitch` vectors and feeds a warp."""
    return max(32, 1 << (pitch - 1).bit_length())


def row_launch(rows: int, pitch: int, world: int, num_sms: int, *, whole_rows: bool = False) -> Launch:
    """For a sum with a norm, `pitch` vectors a row: one program a row; with many peers to read from, a few rows in pieces, on as
    many multiprocessors, while all pieces run at once. whole_rows: a row must lie on one program."""
    pieces = -(-pitch // PIECE)
    if world > 2 and not whole_rows and pieces > 1 and rows * pieces <= 4 * num_sms:
        return Launch(rows * pieces, PIECE, PIECE // 32, False, pieces)
    block = row_block(pitch)
    warps = min(16 if 16 < rows <= num_sms else 8, block // 32)
    programs = min(rows, 4 * num_sms)
    return Launch(programs, block, warps, programs < rows)


PIECE = 128
"""Vectors of a piece of a row."""


def all_reduce(x: Tensor | Unscaled, workspace: SymmetricWorkspace, launch: Launch | None = None) -> Tensor:
    """The sum over ranks of x (contiguous, a multiple of 16 bytes, 16-byte aligned), in a new tensor; of an unscaled product, whose
    rows are such multiples, the sum of what it is with its scales (its columns' scales are aligned so, too)."""
    from phalanx.kernels.allreduce.oneshot import oneshot

    def one(source: Tensor, target: Tensor, vectors: int, constants: dict[str, Any]) -> None:
        run = launch or flat_launch(vectors, workspace.num_sms)
        oneshot[(run.programs,)](
            source, target, workspace.addresses, workspace.epoch, workspace.half, vectors,
            BLOCK=run.block, WARPS=run.warps, LOOP=run.loop, num_warps=run.warps, **constants,
        )  # fmt: skip

    return chunked.all_reduce(x, workspace, workspace.oneshot_vectors, one)


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: SymmetricWorkspace, launch: Launch | None = None
) -> tuple[Tensor, ...]:
    """The sum over ranks of x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) and its fusion, in new tensors."""
    from phalanx.kernels.allreduce.oneshot import oneshot_norm, oneshot_norm_split

    values = Unscaled.parts(x)[0]
    hidden, pitch = values.shape[1], chunked.pitch_of(values)

    def one(arguments: tuple[Any, ...], rows: int, constants: dict[str, Any]) -> None:
        run = launch or row_launch(rows, pitch, workspace.world, workspace.num_sms, whole_rows=constants["QUANT"] == "fp8_token")
        if run.pieces > 1:
            oneshot_norm_split[(run.programs,)](
                *arguments, workspace.board, workspace.half, rows, hidden, fusion.eps,
                SPLIT=run.block, SPLITS=1 << (run.pieces - 1).bit_length(), WARPS=run.warps, num_warps=run.warps, **constants,
            )  # fmt: skip
        else:
            oneshot_norm[(run.programs,)](
                *arguments, workspace.half, rows, hidden, fusion.eps,
                BLOCK=run.block, LOOP=run.loop, WARPS=run.warps, num_warps=run.warps, **constants,
            )  # fmt: skip

    return chunked.all_reduce_norm(x, fusion, workspace, workspace.oneshot_vectors, one)
