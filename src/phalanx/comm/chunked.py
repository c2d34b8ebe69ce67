# SPDX-License-Identifier: Apache-2.0
"""A message longer than a workspace holds goes in chunks: of vectors, or of whole rows where a norm follows the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import Workspace

Sum = Callable[[Tensor, Tensor, int, dict[str, Any]], None]
"""Launch one chunk: (source and target as int32, vectors of 16 bytes, the kernel's constants)."""
SumNorm = Callable[[tuple[Any, ...], int, dict[str, Any]], None]
"""Launch one chunk: (the kernel's arguments up to `turn`, rows, the kernel's constants)."""


def all_reduce(x: Tensor, workspace: Workspace, at_once: int, launch: Sum) -> Tensor:
    """x (contiguous, a multiple of 16 bytes, 16-byte aligned) summed into a new tensor, `at_once` vectors at a time."""
    out = torch.empty_like(x)
    source, target = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    vectors, constants = source.numel() // 4, _constants(x, workspace)
    for first in range(0, vectors, at_once):
        launch(source[4 * first :], target[4 * first :], min(vectors - first, at_once), constants)
    return out


def all_reduce_norm(x: Tensor, fusion: ResidualRmsNorm, workspace: Workspace, at_once: int, launch: SumNorm) -> tuple[Tensor, ...]:
    """x [T, H] (as above; H a multiple of 8, for nvfp4 of 16) summed, and its fusion, in new tensors: as many rows at a time as
    `at_once` vectors hold."""
    from phalanx.kernels.residual_rms_norm import Sinks, quant_mode

    mode = quant_mode(fusion.quant, fusion.scale)
    sinks = Sinks(x, mode, fusion.keep_norm)
    residual = fusion.residual.contiguous()
    rows = x.shape[0]
    rows_at_once = at_once // pitch_of(x)
    constants = {**_constants(x, workspace), "QUANT": mode, "KEEP_NORM": fusion.keep_norm}
    for first in range(0, rows, rows_at_once):
        last = min(rows, first + rows_at_once)
        arguments = (
            x[first:last].view(torch.int32), residual[first:last].view(torch.int32), fusion.weight.view(torch.int32),
            sinks.pointers(first, last), sinks.residual if fusion.scale is None else fusion.scale, workspace.addresses,
            workspace.turn,
        )  # fmt: skip
        launch(arguments, last - first, constants)
    return sinks.outputs()


def pitch_of(x: Tensor) -> int:
    """Vectors of 16 bytes in a row."""
    return x.shape[1] * x.element_size() // 16


def _constants(x: Tensor, workspace: Workspace) -> dict[str, Any]:
    from phalanx.kernels.vectors import KINDS

    return {
        "KIND": KINDS[x.dtype], "RANK": workspace.rank, "WORLD": workspace.world, "PTX": workspace.ptx,
        "launch_pdl": workspace.ptx >= 90,
    }  # fmt: skip
