# SPDX-License-Identifier: Apache-2.0
"""ONESHOT on GPUs: the launches of `kernels.allreduce.oneshot` over a symmetric workspace.

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


def row_block(pitch: int) -> int:
    """The least power of two that holds a row of `pitch` vectors and feeds a warp."""
    return max(32, 1 << (pitch - 1).bit_length())


def row_launch(rows: int, pitch: int, world: int, num_sms: int, *, whole_rows: bool = False) -> OneshotLaunch:
    """For a sum with a norm, `pitch` vectors a row: one program per row. With many peers to read from, few rows are split over
    more multiprocessors, as long as all splits run at once. whole_rows: one program must have a row."""
    splits = -(-pitch // SPLIT_VECTORS)
    if world > 2 and not whole_rows and splits > 1 and rows * splits <= 4 * num_sms:
        return OneshotLaunch(rows * splits, SPLIT_VECTORS, SPLIT_VECTORS // 32, False, splits)
    block = row_block(pitch)
    warps = min(16 if 16 < rows <= num_sms else 8, block // 32)
    programs = min(rows, 4 * num_sms)
    return OneshotLaunch(programs, block, warps, programs < rows)


SPLIT_VECTORS = 128
"""Vectors of a split of a row."""


def all_reduce(x: Tensor | Unscaled, workspace: SymmetricWorkspace, launch: OneshotLaunch | None = None) -> Tensor:
    """The sum over ranks of x (contiguous, a multiple of 16 bytes, 16-byte aligned), in a new tensor; of an Unscaled, whose
    rows are such multiples, the sum with the scales applied (the columns' scales are aligned the same way)."""
    from phalanx.kernels.allreduce.oneshot import oneshot

    def one(source: Tensor, target: Tensor, vectors: int, constants: dict[str, Any]) -> None:
        run = launch or flat_launch(vectors, workspace.num_sms)
        oneshot[(run.programs,)](
            source, target, workspace.addresses, workspace.epoch, workspace.half, vectors,
            BLOCK=run.block, WARPS=run.warps, LOOP=run.loop, num_warps=run.warps, **constants,
        )  # fmt: skip

    return chunked.all_reduce(x, workspace, workspace.oneshot_vectors, one)


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: SymmetricWorkspace, launch: OneshotLaunch | None = None
) -> tuple[Tensor, ...]:
    """The sum over ranks of x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) and its fusion, in new tensors."""
    from phalanx.kernels.allreduce.oneshot import oneshot_norm, oneshot_norm_split

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
