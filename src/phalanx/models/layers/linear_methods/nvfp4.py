# SPDX-License-Identifier: Apache-2.0
"""Weights in NVFP4, with activations in 16 bit: of compressed-tensors and of ModelOpt, whose global scales are reciprocal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import ModelError, WeightError
from phalanx.kernels.moe.nvfp4_mm import nvfp4_mm
from phalanx.kernels.moe.nvfp4_packing import GROUP, Nvfp4Weight, dequantized, packed, quantized, reorder_rows, rows_of, sizes
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.method import Fusion, LinearMethod
from phalanx.models.slices import LayerContext, Scale, Slice, WeightPart

_NAN = 0x7F  # of e4m3; negative values are above it
_LARGEST = 448.0


class Nvfp4Linear(LinearMethod):
    """words, weight_scales, row_scale: see `Nvfp4Weight`."""

    def __init__(self, parts: Sequence[WeightPart], context: LayerContext, memory: Sequence[Tensor] | None = None) -> None:
        """memory: for the weight, of an expert."""
        super().__init__(parts, context)
        assert context.quantization is not None
        self.reciprocal = context.quantization.method != "modelopt"
        columns = parts[0].columns
        if columns.start % GROUP or len(columns) % GROUP:
            raise ModelError(
                f"{parts[0].name} has columns {columns.start} to {columns.stop} on this rank",
                held=f"{GROUP} columns share a scale", why="ranks hold whole groups", next="use another tensor_parallel_size",
            )  # fmt: skip
        words, scales, row_scale = memory or [
            context.weight(*each.shape, dtype=each.dtype) for each in self.memory_of(parts, context)
        ]  # fmt: skip
        self.words, self.weight_scales, self.row_scale = words, scales, row_scale
        self.row_scale.zero_()
        self._stored: dict[tuple[int, str], Tensor] = {}

    @staticmethod
    def memory_of(parts: Sequence[WeightPart], context: LayerContext) -> list[Tensor]:  # noqa: ARG004
        """Tensors like words, scales and row_scale of these parts, on the meta device."""
        shapes = sizes(sum(len(part.rows) for part in parts), len(parts[0].columns))
        dtypes = torch.uint8, torch.uint8, torch.float32
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]

    @property
    def weight(self) -> Nvfp4Weight:
        """As the kernels take it."""
        return Nvfp4Weight(self.words, self.weight_scales, self.row_scale, self.out_features, self.in_features)

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        return nvfp4_mm(x, self.weight, bias)

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, dequantized(self.weight, self.dtype), bias)

    def plain_rows(self, x: Activation, rows: slice) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, dequantized(rows_of(self.weight, rows), self.dtype))

    def dequantized(self, dtype: torch.dtype, rows: slice) -> Tensor:
        return dequantized(rows_of(self.weight, rows), dtype)

    def fuses(self, fusion: Fusion) -> bool:
        return fusion == "bias"

    def reorder_rows(self, rows: list[int]) -> None:
        reorder_rows(self.words, self.weight_scales, self.row_scale, rows)

    def slices(self) -> Iterator[Slice]:
        codes = "weight_packed" if self.reciprocal else "weight"
        for number, part in enumerate(self.parts):
            (out, inputs), rows = part.shape, slice(part.rows.start, part.rows.stop)
            for end, unit, dtype, of_file in (
                (codes, 2, torch.uint8, "U8"),
                ("weight_scale", GROUP, torch.float8_e4m3fn, "F8_E4M3"),
            ):
                columns = slice(part.columns.start // unit, part.columns.stop // unit)
                like = torch.empty(len(part.rows), len(part.columns) // unit, dtype=dtype, device="meta")
                yield Slice(
                    f"{part.name}.{end}", (out, inputs // unit), like, at=(rows, columns), take=partial(self._take, number, end),
                    dtypes=(of_file,),
                )  # fmt: skip

    def dummy_slices(self) -> Iterator[Slice]:
        """The weight is quantized with one scale for all rows, whatever the layout."""
        return self.plain_slices(self._quantize)

    def scales(self) -> Iterator[Scale]:
        end = "weight_global_scale" if self.reciprocal else "weight_scale_2"
        for part, here in self._placed():
            yield Scale(f"{part.name}.{end}", ((), (1,)), self._store_into(here), inputs=part.shape[1])

    def _store_into(self, here: slice) -> Callable[[Tensor], None]:
        def store(scale: Tensor) -> None:
            self.row_scale[here] = (1.0 / scale.double() if self.reciprocal else scale.double()).item()

        return store

    def _take(self, number: int, end: str, values: Tensor) -> None:
        """Keep the tensor of a part; once all are there, pack them."""
        if end == "weight_scale" and bool((values.view(torch.uint8) >= _NAN).any()):
            name = f"{self.parts[number].name}.{end}"
            raise WeightError(f"{name} holds a negative value or NaN", next="download the checkpoint again")
        self._stored[number, "scale" if end == "weight_scale" else "codes"] = values.to(self.words.device)
        if len(self._stored) == 2 * len(self.parts):
            every = [torch.cat([self._stored[number, kind] for number in range(len(self.parts))]) for kind in ("codes", "scale")]
            self._stored.clear()
            for target, packed_values in zip((self.words, self.weight_scales), packed(*every), strict=True):
                target.copy_(packed_values)

    def _quantize(self, number: int, values: Tensor) -> None:
        part, here = list(self._placed())[number]
        self.row_scale[here] = part.shape[1] ** -0.5 / _LARGEST
        codes, scales = quantized(values, self.row_scale[here])
        self._take(number, "weight", codes)
        self._take(number, "weight_scale", scales)

    @classmethod
    def describe(cls, context: LayerContext) -> str:
        dtype = str(context.dtype).removeprefix("torch.")
        return f"weights are in NVFP4, and GEMMs run in {dtype}: activations are not quantized"
