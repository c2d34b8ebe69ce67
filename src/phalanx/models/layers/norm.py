# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and as what an all-reduce fuses to its sum."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import ResidualRmsNorm
from phalanx.models.slices import Seat, Slice, Sliced


class RmsNorm(Sliced):
    """x / rms(x) * weight (arXiv 1910.07467); weight [size], whole on each rank."""

    def __init__(self, name: str, size: int, eps: float, *, seat: Seat) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = seat.weight(size)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        return kernels.rms_norm(x, self.weight, self.eps)

    def after(self, residual: Tensor) -> ResidualRmsNorm:
        """This norm as a fusion: of residual [T, size] plus the sum."""
        return ResidualRmsNorm(residual, self.weight, self.eps)

    def slices(self) -> Iterator[Slice]:
        yield Slice(f"{self.name}.weight", tuple(self.weight.shape), self.weight)
