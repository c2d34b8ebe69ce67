# SPDX-License-Identifier: Apache-2.0
"""Weights in int8 with a scale for each row, and activations in int8 with a scale for each token, or one for all (W8A8).

The method quantizes its input itself, by torch's operations. Sums are of integers, exact on every device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.int8_mm import LARGEST, int8_mm, quantize_int8
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.fp8 import Fp8
from phalanx.models.slices import LayerContext, Slice, WeightPart

_ALL = slice(None)


class Int8(Fp8):
    """weight [out, in] int8, weight_scale [out] fp32; input_scale () fp32 where activations have a static scale."""

    dtype_of_values = torch.int8

    def _input_quantizer(self) -> None:
        """None: no op before quantizes to int8."""

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        values, scale = self._quantized(x)
        total = int8_mm(values, self.weight).float() * (scale * self.weight_scale)
        return (total if bias is None else total + bias.float()).to(self.dtype)

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        total = self._plain(x, _ALL)
        return (total if bias is None else total + bias.float()).to(self.dtype)

    def plain_rows(self, x: Activation, rows: slice) -> Tensor:
        return self._plain(x, rows).to(self.dtype)

    def _plain(self, x: Activation, rows: slice) -> Tensor:
        assert isinstance(x, Tensor)
        values, scale = self._quantized(x)
        return F.linear(values.float() * scale, self.dequantized(torch.float32, rows))

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_int8(x, cast("Tensor | None", self.input_scale))

    def dequantized(self, dtype: torch.dtype | None = None, rows: slice = _ALL) -> Tensor:
        return (self.weight[rows].float() * self.weight_scale[rows].unsqueeze(-1)).to(dtype or self.dtype)

    def slices(self) -> Iterator[Slice]:
        yield from (replace(part, dtypes=("I8",)) for part in super().slices())

    def dummy_slices(self) -> Iterator[Slice]:
        """The weight is quantized with one scale for all rows, whatever the layout."""
        return self.plain_slices(self._quantize)

    def _quantize(self, number: int, values: Tensor) -> None:
        part, here = list(self._placed())[number]
        scale = (3.0 / part.shape[1]) ** 0.5 / LARGEST
        self.weight_scale[here] = scale
        self.weight[here] = torch.round(values.float() / scale).clamp(-LARGEST, LARGEST).to(torch.int8)

    def _scale_shapes(self, part: WeightPart) -> tuple[tuple[int, ...], ...]:
        return ((), (1,), (part.shape[0], 1), (part.shape[0],))

    @classmethod
    def why_dequantized(cls, context: LayerContext) -> str:  # noqa: ARG003
        """GEMMs are not in FP8."""
        return "weights are in int8"

    @classmethod
    def describe(cls, context: LayerContext) -> str:
        assert context.quantization is not None
        of = "token" if context.quantization.activations == "token" else "layer"
        return f"weights and activations are in int8, and the latter have a scale for each {of}"
