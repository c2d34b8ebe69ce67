# SPDX-License-Identifier: Apache-2.0
"""A message longer than a workspace holds runs in chunks: of vectors, or of rows where a norm follows the sum."""

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


def row_block(pitch: int) -> int:
    """The least power of two that holds a row of `pitch` vectors and feeds a warp."""
    return max(32, 1 << (pitch - 1).bit_length())


def all_reduce(x: Tensor | Unscaled, workspace: SymmetricWorkspace, chunk_vectors: int, launch: Sum) -> Tensor:
    """x (contiguous, a multiple of 16 bytes, 16-byte aligned) summed into a new tensor, `chunk_vectors` vectors at a time; of a
    GEMM output with scales, whose rows are such multiples, as many rows as these hold (a workspace holds more than one)."""
    values, rows, columns = Unscaled.parts(x)
    out = torch.empty_like(values)
    source, target = values.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    vectors, constants = source.numel() // 4, _constants(values, workspace)
    pitch = None if columns is None else columns.numel() * values.element_size() // 16
    if pitch is not None:
        chunk_vectors -= chunk_vectors % pitch
    for first in range(0, vectors, chunk_vectors):
        scales = _scales(rows, columns, 0 if pitch is None else first // pitch)
        count = min(vectors - first, chunk_vectors)
        launch(source[4 * first :], target[4 * first :], count, {**constants, **scales, "pitch": pitch})
    return out


def all_reduce_norm(
    x: Tensor | Unscaled, fusion: ResidualRmsNorm, workspace: SymmetricWorkspace, chunk_vectors: int, launch: SumNorm
) -> tuple[Tensor, ...]:  # fmt: skip
    """x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) summed, and its fusion, in new tensors: as many rows at a time as
    `chunk_vectors` vectors hold."""
    from phalanx.kernels.ops.residual_rms_norm import NormOutputs, quant_mode

    values, row_scales, column_scales = Unscaled.parts(x)
    mode = quant_mode(fusion.quant, fusion.scale)
    norm_outputs = NormOutputs(values, mode, fusion.keep_norm)
    residual = fusion.residual.contiguous()
    rows = values.shape[0]
    chunk_rows = whole_rows(chunk_vectors, pitch_of(values))
    constants = {**_constants(values, workspace), "QUANT": mode, "KEEP_NORM": fusion.keep_norm}
    for first in range(0, rows, chunk_rows):
        last = min(rows, first + chunk_rows)
        arguments = (
            values[first:last].view(torch.int32), residual[first:last].view(torch.int32), fusion.weight.view(torch.int32),
            norm_outputs.pointers(first, last), norm_outputs.residual if fusion.scale is None else fusion.scale,
            workspace.addresses,
            (workspace.epoch, *workspace.marks()),
        )  # fmt: skip
        launch(arguments, last - first, {**constants, **_scales(row_scales, column_scales, first)})
    return norm_outputs.outputs()


def _scales(rows: Tensor | None, columns: Tensor | None, first: int) -> dict[str, Tensor | None]:
    """Of a chunk that begins at row `first`."""
    return {"row_scales": None if rows is None else rows[first:], "column_scales": columns}


def whole_rows(vectors: int, pitch: int, of: int = 1) -> int:
    """Rows of `pitch` vectors that fit into `vectors`: a multiple of `of`, and, where they are enough, of 4 times that. So the part
    of a vector with one fp32 per row that belongs to a chunk begins on 16 bytes in every chunk; otherwise Triton would compile the
    kernel again."""
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
