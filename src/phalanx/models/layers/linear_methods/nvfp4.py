# SPDX-License-Identifier: Apache-2.0
"""Weights in NVFP4, with activations in 16 bit: of compressed-tensors and of ModelOpt, whose global scales are reciprocal. And in
MXFP4 of compressed-tensors, which is kept as NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import ModelError, WeightError
from phalanx.kernels.moe.nvfp4_mm import nvfp4_mm
from phalanx.kernels.moe.nvfp4_packing import (
    GROUP,
    LARGEST_POWER,
    POWERS,
    Nvfp4Weight,
    dequantized,
    e2m1_codes,
    packed,
    quantized,
    reorder_rows,
    rows_of,
    sizes,
)
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.method import Fusion, LinearMethod
from phalanx.models.slices import LayerContext, Scale, Slice, WeightPart

_LARGEST, _E8M0_BIAS = 448.0, 127


class Nvfp4Linear(LinearMethod):
    """words, weight_scales, row_scale: see `Nvfp4Weight`. stored_scales: columns that share a stored scale, its dtype, and that in
    a file; no_scale: the least byte that is none."""

    stored_scales: ClassVar[tuple[int, torch.dtype, str]] = (GROUP, torch.float8_e4m3fn, "F8_E4M3")
    no_scale = 0x7F  # NaN of e4m3; negative values are above it

    def __init__(self, parts: Sequence[WeightPart], context: LayerContext, memory: Sequence[Tensor] | None = None) -> None:
        """memory: for the weight, of an expert."""
        super().__init__(parts, context)
        assert context.quantization is not None
        self.reciprocal = context.quantization.method != "modelopt"
        columns = parts[0].columns
        together = self.stored_scales[0]
        if columns.start % together or len(columns) % together:
            raise ModelError(
                f"{parts[0].name} has columns {columns.start} to {columns.stop} on this rank",
                held=f"{together} columns share a scale", why="ranks hold whole groups", next="use another tensor_parallel_size",
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

    def reading(self) -> None:
        super().reading()
        self._stored.clear()  # of a read that failed

    def slices(self) -> Iterator[Slice]:
        codes = "weight_packed" if self.reciprocal else "weight"
        for number, part in enumerate(self.parts):
            (out, inputs), rows = part.shape, slice(part.rows.start, part.rows.stop)
            for end, unit, dtype, of_file in ((codes, 2, torch.uint8, "U8"), ("weight_scale", *self.stored_scales)):
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
        if end == "weight_scale" and bool((values.view(torch.uint8) >= self.no_scale).any()):
            name = f"{self.parts[number].name}.{end}"
            raise WeightError(f"{name} holds a negative value or NaN", next="download the checkpoint again")
        self._stored[number, "scale" if end == "weight_scale" else "codes"] = values.to(self.words.device)
        if len(self._stored) == 2 * len(self.parts):
            every = [torch.cat([self._stored[number, kind] for number in range(len(self.parts))]) for kind in ("codes", "scale")]
            self._stored.clear()
            for target, packed_values in zip((self.words, self.weight_scales), self._packed(*every), strict=True):
                target.copy_(packed_values)

    def _packed(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return packed(codes, scales)

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


class Mxfp4PackedLinear(Nvfp4Linear):
    """MXFP4 (OCP Microscaling formats 1.0) as compressed-tensors stores it: e2m1 by a power of 2 for 32 columns, without a global
    scale. Held as NVFP4, exactly: two groups have each power, and a row's scale is what its powers have in common."""

    stored_scales = (2 * GROUP, torch.uint8, "U8")
    no_scale = 0xFF  # NaN of e8m0

    def scales(self) -> Iterator[Scale]:
        return iter(())

    def _packed(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        empty = (codes.view(*scales.shape, GROUP) & 0x77 == 0).all(-1)  # whatever its power
        powers = torch.where(empty, 0, scales.int())
        largest = powers.amax(1, keepdim=True)
        if bool(((largest - powers >= POWERS) & ~empty).any()):
            raise WeightError(
                f"{self.parts[0].name}.weight_scale has powers of 2 in one row that are {POWERS} or more apart",
                why="kernels have no more bits for them", next="use the 16-bit checkpoint, or another one in 4 bits",
            )  # fmt: skip
        ones = torch.ones(powers.shape, device=codes.device)
        self.row_scale[: len(codes)] = torch.ldexp(ones, largest - _E8M0_BIAS - LARGEST_POWER)[:, 0]
        relative = torch.where(empty, 0.0, torch.ldexp(ones, powers - largest + LARGEST_POWER))
        return packed(codes, relative.repeat_interleave(2, 1))

    def _quantize(self, number: int, values: Tensor) -> None:
        groups = values.float().reshape(len(values), -1, 2 * GROUP)
        power = torch.frexp(groups.abs().amax(-1, keepdim=True))[1] - 3  # the largest magnitude is 4 to 8 of it
        self._take(number, "weight_packed", e2m1_codes(torch.ldexp(groups, -power).flatten(1)))
        self._take(number, "weight_scale", (power[..., 0] + _E8M0_BIAS).to(torch.uint8))
