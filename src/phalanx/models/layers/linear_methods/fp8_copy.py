# SPDX-License-Identifier: Apache-2.0
"""Copies in FP8 of dense layers that a checkpoint has in 4 bits: twice the memory, and GEMMs of many tokens that FP8 tensor cores
bind. Each layer is dequantized as soon as all of it has been read, and rounded to e4m3 with a scale for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from phalanx import kernels
from phalanx.config import dotted_path
from phalanx.models.layers.linear_methods.fp8 import Fp8
from phalanx.models.layers.linear_methods.int4 import Int4Linear
from phalanx.models.layers.linear_methods.method import weight_slice
from phalanx.models.layers.linear_methods.nvfp4 import Nvfp4Linear
from phalanx.models.slices import LayerContext, Scale, Slice, WeightPart

_CHUNK_ROWS = 4096  # dequantized together, so that their copy in fp32 stays small


class Fp8Copy(Fp8):
    """weight and weight_scale as of `Fp8`. The memory of what the checkpoint holds is taken when the first of a layer's tensors
    comes, and is free once the last has come."""

    def __init__(self, parts: Sequence[WeightPart], context: LayerContext) -> None:
        super().__init__(parts, context)
        self._context = context
        self._source: Int4Linear | Nvfp4Linear | None = None
        self._slices: list[Slice] = []
        self._scales: list[Scale] = []
        self._missing = 0

    def _stored(self, device: torch.device) -> Int4Linear | Nvfp4Linear:
        """The layer as the checkpoint holds it, with memory on this device."""
        scheme = self.quantization.copied
        assert scheme is not None
        assert scheme.linear_method is not None
        method: type[Int4Linear | Nvfp4Linear] = dotted_path.load(scheme.linear_method, option="linear_method")
        return method(self.parts, replace(self._context, quantization=scheme, device=device))

    def slices(self) -> Iterator[Slice]:
        for number, each in enumerate(self._stored(torch.device("meta")).slices()):
            absent = None if each.absent is None else partial(self._act, number, None)
            yield replace(each, take=partial(self._act, number), absent=absent)

    def scales(self) -> Iterator[Scale]:
        for number, each in enumerate(self._stored(torch.device("meta")).scales()):
            yield replace(each, store=partial(self._act, number, of_scales=True))

    def reading(self) -> None:
        super().reading()
        self._source = None  # of a read that failed

    def dummy_slices(self) -> Iterator[Slice]:
        for part, here in self._placed():
            yield weight_slice(part, self.weight[here], self.weight_scale[here])

    def _act(self, number: int, values: Tensor | None, *, of_scales: bool = False) -> None:
        """Give a tensor to the layer as the checkpoint holds it; after the last of them, copy it."""
        if self._source is None:
            self._source = self._stored(self.weight.device)
            self._slices, self._scales = list(self._source.slices()), list(self._source.scales())
            self._missing = len(self._slices) + len(self._scales)
        if of_scales:
            assert values is not None
            self._scales[number].store(values)
        elif values is None:
            absent = self._slices[number].absent
            assert absent is not None
            absent()
        else:
            self._slices[number].store(values)
        self._missing -= 1
        if not self._missing:
            for begin in range(0, self.out_features, _CHUNK_ROWS):
                rows = slice(begin, min(begin + _CHUNK_ROWS, self.out_features))
                quantized, scale = kernels.quantize_fp8(self._source.dequantized(torch.float32, rows))
                self.weight[rows].copy_(quantized)
                self.weight_scale[rows].copy_(scale.squeeze(-1))
            self._source, self._slices, self._scales = None, [], []

    @classmethod
    def describe(cls, context: LayerContext) -> str | None:
        assert context.quantization is not None
        assert context.quantization.copied is not None
        line = f"dense layers are copied from {context.quantization.copied.stored} to FP8 while they are read"
        why = super().describe(context)
        return line if why is None else f"{line}; {why}"
