# SPDX-License-Identifier: Apache-2.0
"""The up-projection of latent attention (`kv_b_proj`), which decode rows absorb into their queries and outputs.

Each head's keys and values are multiplied apart, so that the weight is in 16 or 32 bit, though a checkpoint may have it in FP8: it
is dequantized while it is read, and then split; scales by block need not end where a head's keys do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx import kernels
from phalanx.config.latent import Latent
from phalanx.errors import ModelError
from phalanx.models.slices import LayerContext, Scale, Slice, Sliced


class LatentUpProjection(Sliced):
    """weight [heads of this rank, nope + v, kv_rank]: of each head first the rows that give keys, then those that give values."""

    def __init__(self, name: str, latent: Latent, *, context: LayerContext) -> None:
        super().__init__()
        (part,) = context.parts(name)
        self.name, self.dtype, self.shape, self.rows = name, context.dtype, part.shape, part.rows
        rows = latent.nope + latent.v
        self.weight = context.weight(len(part.rows) // rows, rows, latent.kv_rank)
        quantization = None if context.quantization is None else context.quantization.of(name)
        if quantization is not None and (quantization.copied or quantization.stored != "FP8") and not quantization.on_load:
            raise ModelError(
                f"{name} is in {(quantization.copied or quantization).stored}", held="it is read in 16 bit and in FP8",
                next="use a checkpoint that leaves it in 16 bit, or one in FP8",
            )  # fmt: skip
        stored = quantization is not None and quantization.weights in ("tensor", "channel", "block")
        self.quantization = quantization if stored else None
        self._values: Tensor | None = None  # of a checkpoint in FP8, until its scale has been read
        self._scale: Tensor | None = None

    def slices(self) -> Iterator[Slice]:
        target = self.weight.view(-1, self.shape[1])
        if self.quantization is None:
            yield Slice(f"{self.name}.weight", self.shape, target, self.rows.start)
        else:
            yield Slice(f"{self.name}.weight", self.shape, target, self.rows.start, take=self._store_values, dtypes=("F8_E4M3",))

    def scales(self) -> Iterator[Scale]:
        if self.quantization is None:
            return
        self._values = self._scale = None
        out, inputs = self.shape
        block = self.quantization.block
        shapes: tuple[tuple[int, ...], ...] = ((), (1,)) if self.quantization.weights == "tensor" else ((out, 1), (out,))
        if block is not None:
            shapes = ((-(-out // block[0]), -(-inputs // block[1])),)
        name = f"{self.name}.{self.quantization.scale_name}"
        yield Scale(name, shapes, self._store_scale, may_be_zero=True, inputs=inputs)

    def _store_values(self, values: Tensor) -> None:
        self._values = values
        self._dequantize()

    def _store_scale(self, scale: Tensor) -> None:
        assert self.quantization is not None
        block = self.quantization.block
        if block is None:
            self._scale = scale.reshape(-1).expand(self.shape[0])[self.rows.start : self.rows.stop]
        else:
            self._scale = scale[torch.tensor(self.rows, dtype=torch.int64) // block[0]]
        self._dequantize()

    def _dequantize(self) -> None:
        """Fill the weight once both are there."""
        if self._values is None or self._scale is None or self.quantization is None:
            return
        block, device = self.quantization.block, self.weight.device
        plain = kernels.dequantize(self._values.to(device), self._scale.to(device), self.dtype, block=block[1] if block else 0)
        self.weight.copy_(plain.view_as(self.weight))
        self._values = self._scale = None
