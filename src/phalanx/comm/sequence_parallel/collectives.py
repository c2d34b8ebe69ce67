# SPDX-License-Identifier: Apache-2.0
"""All-reduces of a group of GPUs where rows have owners: of a product that was handed over whole, or that landed with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.comm.choose import LANDED_FROM_BYTES
from phalanx.comm.chunked import pitch_of
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.rows import landed, owned
from phalanx.comm.symmetric import Landing, Workspace
from phalanx.kernels.reference import Unscaled

Pieces = Sequence[tuple[slice, Tensor]]
"""As `Spread.pieces`."""
_MOST_KEPT = 256


class Owners(Protocol):
    """All-reduces with their fusion of rows that have owners: they take a residual that is whole, or has the same owners, and give
    the new one as `OwnedRows`."""

    def at_once(self, x: Tensor) -> int:
        """Rows by which `all_reduce_norm` of x [T, H] has owners; those of `landed_norm` have them by all rows at once."""

    def all_reduce_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """Of a product that is handed over whole."""

    def pieces(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> Pieces | None:
        """Where to write a product [tokens, hidden] for `landed_norm`; None where `all_reduce_norm` is faster or alone has room."""

    def landed_norm(self, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """Of a product that was written to its `pieces`."""


class OnGpus:
    """`Owners` over a workspace, and where there is one, a landing, which takes products of `least` bytes and more."""

    def __init__(self, workspace: Workspace, landing: Landing | None, *, least: int = LANDED_FROM_BYTES) -> None:
        self._workspace, self._landing, self._least = workspace, landing, least
        self._kept: dict[tuple[int, int, torch.dtype], Pieces | None] = {}

    def at_once(self, x: Tensor) -> int:
        """As Owners."""
        return owned.rows_at_once(pitch_of(x), self._workspace)

    def all_reduce_norm(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """As Owners."""
        return owned.all_reduce_norm(x, fusion, self._workspace)

    def pieces(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> Pieces | None:
        """As Owners."""
        dtype, landing = fusion.residual.dtype, self._landing
        row = hidden * dtype.itemsize
        handed_out = hidden if fusion.quant == "fp8" else row
        # By the longest message: if it does not land, shorter ones would have a kernel that no start has met.
        if landing is None or not landed.room_to_hand_out(max(tokens, landing.longest // row), handed_out, self._workspace):
            return None
        key = (tokens, hidden, dtype)
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = landed.pieces_of(tokens, hidden, dtype, landing, least=self._least)
        return self._kept[key]

    def landed_norm(self, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        """As Owners."""
        assert self._landing is not None
        return landed.all_reduce_norm(fusion, self._workspace, self._landing)
