# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and as what an all-reduce fuses to its sum; quantized for the layer that it feeds where that one takes FP8."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import ResidualRmsNorm
from phalanx.models.layers.fp8 import Activation, Fp8
from phalanx.models.slices import Seat, Slice, Sliced


class RmsNorm(Sliced):
    """x / rms(x) * weight (arXiv 1910.07467); weight [size], whole on each rank."""

    def __init__(self, name: str, size: int, eps: float, *, seat: Seat) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = seat.weight(size)
        self._fed: Fp8 | None = None

    def feed(self, fp8: Fp8 | None) -> None:
        """Say what the norm goes to, and nowhere else: a layer with these scales, or (None) one that takes it as it is."""
        self._fed = fp8 if fp8 is not None and fp8.products else None

    def forward(self, x: Tensor) -> Activation:
        """x [..., size] -> the same shape and dtype, or quantized."""
        normed = kernels.rms_norm(x, self.weight, self.eps)
        return normed if self._fed is None else self._fed.quantize(normed)

    def after(self, residual: Tensor, *, may_own: bool = False) -> ResidualRmsNorm:
        """This norm as a fusion: of residual [T, size] plus the sum. may_own: see `ResidualRmsNorm`."""
        if self._fed is None:
            return ResidualRmsNorm(residual, self.weight, self.eps, may_own=may_own)
        return ResidualRmsNorm(
            residual, self.weight, self.eps, quant="fp8", scale=self._fed.input_scale, may_own=may_own
        )  # fmt: skip

    def taken(self, outputs: tuple[Tensor, ...]) -> tuple[Activation, Tensor]:
        """What the all-reduce gave for `after`: (norm, new residual)."""
        if self._fed is None:
            return outputs[0], outputs[1]
        return self._fed.took(outputs[0], outputs[1] if self._fed.input_scale is None else None), outputs[-1]

    def slices(self) -> Iterator[Slice]:
        yield Slice(f"{self.name}.weight", tuple(self.weight.shape), self.weight)
