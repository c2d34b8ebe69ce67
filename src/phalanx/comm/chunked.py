# SPDX-License-Identifier: Apache-2.0
"""A message longer than a workspace holds goes in chunks: of vectors, or of whole rows where a norm follows the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import SymmetricWorkspace
from phalanx.kernels.scaled_tensors import Unscaled

Sum = Callable[[Tensor, Tensor, int, dict[str, Any]], None]
"""Launch one chunk: (source and target as int32, vectors of 16 bytes, the kernel's scales and constants)."""
SumNorm = Callable[[tuple[Any, ...], int, dict[str, Any]], None]
"""Launch one chunk: (the kernel's arguments up to `epoch`, rows, the kernel's scales and constants)."""


def all_reduce(x: Tensor | Unscaled, workspace: SymmetricWorkspace, at_once: int, launch: Sum) -> Tensor:
    """x (contiguous, a multiple of 16 bytes, 16-byte aligned) summed into a new tensor, `at_once` vectors at a time; of a product
    with scales, whose rows are such multiples, as many rows as they hold (a workspace holds more than one)."""
    values, rows, columns = Unscaled.parts(x)
    out = torch.empty_like(values)
    source, target = values.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    vectors, constants = source.numel() // 4, _constants(values, workspace)
    pitch = None if columns is None else columns.numel() * values.element_size() // 16
    if pitch is not None:
        at_once -= at_once % pitch
    for first in range(0, vectors, at_once):
        scales = _scales(rows, columns, 0 if pitch is None else first // pitch)
        count = min(vectors - first, at_once)
        launch(source[4 * first :], target[4 * first :], count, {**constants, **scales, "pitch": pitch})
    return out


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: SymmetricWorkspace, at_once: int, launch: SumNorm
) -> tuple[Tensor, ...]:  # fmt: skip
    """x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) summed, and its fusion, in new tensors: as many rows at a time as
    `at_once` vectors hold."""
    from phalanx.kernels.ops.residual_rms_norm import Sinks, quant_mode

    values, row_scales, column_scales = Unscaled.parts(x)
    mode = quant_mode(fusion.quant, fusion.scale)
    sinks = Sinks(values, mode, fusion.keep_norm)
    residual = fusion.residual.contiguous()
    rows = values.shape[0]
    rows_at_once = whole_rows(at_once, pitch_of(values))
    constants = {**_constants(values, workspace), "QUANT": mode, "KEEP_NORM": fusion.keep_norm}
    for first in range(0, rows, rows_at_once):
        last = min(rows, first + rows_at_once)
        arguments = (
            values[first:last].view(torch.int32), residual[first:last].view(torch.int32), fusion.weight.view(torch.int32),
            sinks.pointers(first, last), sinks.residual if fusion.scale is None else fusion.scale, workspace.addresses,
            workspace.epoch,
        )  # fmt: skip
        launch(arguments, last - first, {**constants, **_scales(row_scales, column_scales, first)})
    return sinks.outputs()


def _scales(rows: Tensor | None, columns: Tensor | None, first: int) -> dict[str, Tensor | None]:
    """Of a chunk that begins at row `first`."""
    return {"row_scales": None if rows is None else rows[first:], "column_scales": columns}


def whole_rows(vectors: int, pitch: int, of: int = 1) -> int:
    """Rows of `pitch` vectors that so many hold: a multiple of `of`, and where there are enough of 4 times that, so that what a
    chunk has of an fp32 for each row begins on 16 bytes, as the first does. Triton would compile its launch anew."""
    rows = vectors // pitch
    return rows // (4 * of) * 4 * of or rows // of * of


def pitch_of(x: Tensor) -> int:
    """Vectors of 16 bytes in a row."""
    return x.shape[1] * x.element_size() // 16


def _constants(x: Tensor, workspace: SymmetricWorkspace) -> dict[str, Any]:
    from phalanx.kernels.dtypes import DTYPE_NAMES

    return {
        "KIND": DTYPE_NAMES[x.dtype], "RANK": workspace.rank, "WORLD": workspace.world, "SM": workspace.sm,
        "launch_pdl": workspace.sm >= 90,
    }  # fmt: skip
