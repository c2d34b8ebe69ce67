# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and as the fusion of an all-reduce; quantized for the layer that it feeds, where that one runs in FP8."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import ResidualRmsNorm
from phalanx.models.layers.fp8 import Activation, Fp8, NormAndQuantized, NormOutput
from phalanx.models.slices import LayerContext, Slice, Sliced


class RmsNorm(Sliced):
    """x / rms(x) * weight (arXiv 1910.07467); weight [size], complete on each rank."""

    def __init__(self, name: str, size: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = context.weight(size)
        self._consumer: Fp8 | None = None
        self._keep_norm = False

    def set_consumer(self, fp8: Fp8 | None, *, keep_norm: bool = False) -> None:
        """Set the only layer that the norm feeds: one with these scales, or (None) one that takes the norm as it is. keep_norm:
        that one takes both where it takes the first (`NormAndQuantized`), from the fusion of an all-reduce."""
        self._consumer = fp8 if fp8 is not None and fp8.fp8_gemm else None
        self._keep_norm = keep_norm and self._consumer is not None

    def forward(self, x: Tensor) -> Activation:
        """x [..., size] -> the same shape and dtype, or quantized."""
        normed = kernels.rms_norm(x, self.weight, self.eps)
        return normed if self._consumer is None else self._consumer.quantize(normed)

    def fusion(self, residual: Tensor, *, accepts_sharded: bool = False) -> ResidualRmsNorm:
        """This norm as the fusion of an all-reduce: of residual [T, size] plus the sum. accepts_sharded: see `ResidualRmsNorm`."""
        if self._consumer is None:
            return ResidualRmsNorm(residual, self.weight, self.eps, accepts_sharded=accepts_sharded)
        return ResidualRmsNorm(
            residual, self.weight, self.eps, quant="fp8", scale=self._consumer.input_scale, keep_norm=self._keep_norm,
            accepts_sharded=accepts_sharded,
        )  # fmt: skip

    def unpack(self, outputs: tuple[Tensor, ...]) -> tuple[NormOutput, Tensor]:
        """The outputs of an all-reduce with this `fusion` -> (norm, new residual)."""
        if self._consumer is None:
            return outputs[0], outputs[1]
        values, *scale = outputs[int(self._keep_norm) : -1]
        quantized = self._consumer.with_scale(values, scale[0] if scale else None)
        return (NormAndQuantized(outputs[0], quantized) if self._keep_norm else quantized), outputs[-1]

    def slices(self) -> Iterator[Slice]:
        yield Slice(f"{self.name}.weight", tuple(self.weight.shape), self.weight)
