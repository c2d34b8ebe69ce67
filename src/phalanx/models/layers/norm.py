# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and as the fusion of an all-reduce; quantized for the layer that it feeds, where that one runs in FP8.
LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx import kernels
from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.comm.sequence_parallel import unshard
from phalanx.models.layers.activation import InputQuantizer, NormAndQuantized, NormOutput
from phalanx.models.slices import LayerContext, Slice, Sliced


class RmsNorm(Sliced):
    """x / rms(x) * weight (arXiv 1910.07467); weight [size], complete on each rank. order: of its
    elements, once they have been read; none: as they are. offset: the checkpoint's weight is one less (Gemma). It is 1 + weight
    here, in fp32, as bf16 loses bits of the sum."""

    fuses = True
    """Whether an all-reduce can end in it (`fusion`)."""

    def __init__(
        self, name: str, size: int, eps: float, *, order: Sequence[int] = (), offset: bool = False, context: LayerContext
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.eps, self.order, self.offset = name, eps, list(order), offset
        self.weight = context.weight(size, dtype=torch.float32 if offset else None)
        self._quantizer: InputQuantizer | None = None
        self.keep_norm = False

    def set_quantizer(self, quantizer: InputQuantizer | None, *, keep_norm: bool = False) -> None:
        """Set how the only layer that the norm feeds has its input quantized; None: it takes the norm as it is. keep_norm: it takes
        both (`NormAndQuantized`)."""
        self._quantizer = quantizer
        self.keep_norm = keep_norm and quantizer is not None

    def forward(self, x: Tensor) -> NormOutput:
        """x [..., size] -> the same shape and dtype, or quantized, or both."""
        normed = self._normed(x)
        if self._quantizer is None:
            return normed
        quantized = self._quantizer.quantize(normed)
        return NormAndQuantized(normed, quantized) if self.keep_norm else quantized

    def _normed(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, total: Tensor, residual: Tensor) -> tuple[NormOutput, Tensor]:
        """total, residual [T, size] -> (norm(residual + total), residual + total)."""
        return self.unpack(finish(total, self.fusion(residual)))

    def fusion(self, residual: Tensor, *, accepts_sharded: bool = False) -> ResidualRmsNorm:
        """This norm as the fusion of an all-reduce: of residual [T, size] plus the sum. accepts_sharded: see `ResidualRmsNorm`."""
        if self._quantizer is None:
            return ResidualRmsNorm(residual, self.weight, self.eps, accepts_sharded=accepts_sharded)
        return ResidualRmsNorm(
            residual, self.weight, self.eps, quant="fp8", scale=self._quantizer.scale, keep_norm=self.keep_norm,
            accepts_sharded=accepts_sharded,
        )  # fmt: skip

    def unpack(self, outputs: tuple[Tensor, ...]) -> tuple[NormOutput, Tensor]:
        """The outputs of an all-reduce with this `fusion` -> (norm, new residual)."""
        if self._quantizer is None:
            return outputs[0], outputs[1]
        values, *scale = outputs[int(self.keep_norm) : -1]
        quantized = self._quantizer.with_scale(values, scale[0] if scale else None)
        return (NormAndQuantized(outputs[0], quantized) if self.keep_norm else quantized), outputs[-1]

    def loaded(self) -> None:
        if self.order:
            self.weight.copy_(self.weight[self.order])
        if self.offset:
            self.weight.add_(1.0)

    def slices(self) -> Iterator[Slice]:
        yield Slice(f"{self.name}.weight", tuple(self.weight.shape), self.weight)


class LayerNorm(RmsNorm):
    """(x - mean(x)) / std(x) * weight, without a bias (Cohere)."""

    fuses = False

    def _normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)

    def of_sum(self, total: Tensor, residual: Tensor) -> tuple[NormOutput, Tensor]:
        residual = residual + total
        return self(residual), residual


def all_reduce_norm(total: Tensor, residual: Tensor, norm: RmsNorm | None, group: Group) -> tuple[NormOutput, Tensor]:
    """What ends a block that adds up its parts first: total [T, hidden] of this rank -> (norm(residual + sum), residual + sum);
    without a norm the latter twice. The residual comes in and goes out as that of `RowParallelLinear`."""
    if norm is not None and norm.fuses:
        return norm.unpack(group.all_reduce(total, norm.fusion(residual, accepts_sharded=True)))
    total, residual = group.all_reduce(total), unshard(residual, group)
    if norm is not None:
        return norm.of_sum(total, residual)
    residual = residual + total
    return residual, residual
