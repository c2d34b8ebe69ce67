# SPDX-License-Identifier: Apache-2.0
"""Weights in e4m3 with a scale for each row.

Where the device multiplies e4m3 (Ada, Hopper and later), activations are quantized too: by the norm or the SiLU before the layer
where that can, else by the method. Elsewhere activations stay in 16 or 32 bit, and the weight is dequantized for each GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx.kernels.reference as reference
from phalanx import kernels
from phalanx.comm.group import Group
from phalanx.config.quantization import Quantization
from phalanx.kernels.gemm.scaled_mm import ALIGNMENT, quant_gemm, scaled_mm_into, unscaled_mm
from phalanx.kernels.scaled_tensors import FP8, GemvArgs, Quantized, Unscaled
from phalanx.log import get_logger
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.method import Fusion, GroupedWeight, LinearMethod, weight_slice
from phalanx.models.slices import LayerContext, Scale, Slice, WeightPart

logger = get_logger(__name__)
_ALL = slice(None)


class TokenQuantizer:
    """The `InputQuantizer` of layers with a scale for each token, or one for all."""

    def __init__(self, scale: Tensor | None = None) -> None:
        self.scale = scale
        self._rows: list[Tensor] = []

    def quantize(self, x: Activation) -> Quantized:
        return x if isinstance(x, Quantized) else self.with_scale(*kernels.quantize_fp8(x, self.scale))

    def with_scale(self, values: Tensor, scale: Tensor | None) -> Quantized:
        if self.scale is not None:
            scale = self._static_rows(values.shape[0])
        assert scale is not None
        return Quantized(values, scale)

    def changed(self) -> None:
        """The scale has another value. A captured graph may read the buffers."""
        for rows in self._rows:
            assert self.scale is not None
            rows.copy_(self.scale.expand_as(rows))

    def _static_rows(self, tokens: int) -> Tensor:
        """The static scale, [tokens, 1]: the GEMM reads one for each row, and a buffer saves each GEMM a launch."""
        assert self.scale is not None
        if not self._rows or self._rows[-1].shape[0] < tokens:
            # The smaller buffer is kept: a captured graph may read it.
            self._rows.append(self.scale.expand(1 << (tokens - 1).bit_length(), 1).contiguous())
        return self._rows[-1][:tokens]


class Fp8(LinearMethod):
    """weight [out, in] e4m3, weight_scale [out] fp32; input_scale () fp32 where activations have a static scale. multiplies_fp8:
    activations are e4m3, too."""

    dtype_of_values = FP8

    def __init__(self, parts: Sequence[WeightPart], context: LayerContext) -> None:
        super().__init__(parts, context)
        assert context.quantization is not None
        self.quantization: Quantization = context.quantization
        self.weight = context.weight(self.out_features, self.in_features, dtype=self.dtype_of_values)
        self.weight_scale = context.weight(self.out_features, *self._scales_of_row(), dtype=torch.float32)
        self.input_scale: nn.Parameter | None = None
        if self.quantization.activations == "static":
            self.input_scale = nn.Parameter(torch.zeros((), dtype=torch.float32, device=context.device), requires_grad=False)
        self.multiplies_fp8 = self.why_dequantized(context) is None
        sizes = self.out_features, self.in_features, parts[0].columns.start if self._scales_of_row() else 0
        if self.multiplies_fp8 and any(size % ALIGNMENT for size in sizes):
            logger.info(
                "%s runs in %s: its weight is %d x %d on this rank, from column %d on, and FP8 GEMMs need multiples of %d",
                parts[0].name, context.dtype, self.out_features, self.in_features, parts[0].columns.start, ALIGNMENT,
            )  # fmt: skip
            self.multiplies_fp8 = False
        self.input_quantizer: TokenQuantizer | None = self._input_quantizer()

    def _scales_of_row(self) -> tuple[int, ...]:
        """How many scales a row has; none where it is one."""
        return ()

    def _input_quantizer(self) -> TokenQuantizer | None:
        return TokenQuantizer(self.input_scale) if self.multiplies_fp8 else None

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        quantizer = self.input_quantizer
        if quantizer is None:
            assert isinstance(x, Tensor)
            return F.linear(x, self.dequantized(), bias)
        if not isinstance(x, Quantized) and x.shape[0] == 1:  # a GEMV quantizes its input in the same launch
            output = quant_gemm(x, quantizer.scale, self.weight, self.weight_scale, dtype=self.dtype)
        else:
            output = kernels.scaled_mm(quantizer.quantize(x), self.weight, self.weight_scale, dtype=self.dtype)
        return output if bias is None else output + bias

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        plain = self.plain_rows(x, _ALL)
        return plain if bias is None else plain + bias

    def plain_rows(self, x: Activation, rows: slice) -> Tensor:
        if self.multiplies_fp8:  # products of e4m3 have more bits than bf16
            return F.linear(self._requantized(x), self.dequantized(torch.float32, rows)).to(self.dtype)
        assert isinstance(x, Tensor)
        return F.linear(x, self.dequantized(rows=rows))

    def _requantized(self, x: Activation) -> Tensor:
        """The values of x in fp32, as they are once they have been quantized for the GEMM."""
        if not isinstance(x, Quantized):
            x = Quantized(*reference.quantize_fp8(x, self.input_scale))
        scale = x.scale if self.input_scale is None else self.input_scale
        return x.values.float() * scale

    def unscaled(self, x: Activation, bias: Tensor | None = None) -> Tensor | Unscaled:
        tokens = len(x.values if isinstance(x, Quantized) else x)
        if self.input_quantizer is None or bias is not None or tokens == 1:
            return self.multiply(x, bias)
        return unscaled_mm(self.input_quantizer.quantize(x), self.weight, self.weight_scale, dtype=self.dtype)

    def for_sum(self, x: Activation, bias: Tensor | None, group: Group) -> Tensor | Unscaled:
        assert bias is None
        return self.unscaled(x)

    def fuses(self, fusion: Fusion) -> bool:
        match fusion:
            case "gemv":
                return self.input_quantizer is not None
            case "reduce_scatter":
                return self.input_quantizer is not None and self.dtype == torch.bfloat16
            case "bias":  # scales come after the sum
                return False

    def gemv_args(self, x: Activation, bias: Tensor | None) -> GemvArgs:
        scale = None if self.input_quantizer is None else self.input_quantizer.scale
        return GemvArgs.of(x, self.weight, bias, self.dtype, self.weight_scale, scale)

    def write_into(self, x: Activation, bias: Tensor | None, targets: Sequence[tuple[slice, Tensor]]) -> None:
        assert bias is None
        assert self.input_quantizer is not None
        scaled_mm_into(self.input_quantizer.quantize(x), self.weight, self.weight_scale, targets)

    def dequantized(self, dtype: torch.dtype | None = None, rows: slice = _ALL) -> Tensor:
        """The values of the weight, or of some rows, in 16 or 32 bit; in the model's dtype where none is given."""
        return kernels.dequantize(self.weight[rows], self.weight_scale[rows], dtype or self.dtype)

    def reorder_rows(self, rows: list[int]) -> None:
        values = self.weight.view(torch.uint8)
        values.copy_(values[rows])
        self.weight_scale.copy_(self.weight_scale[rows])

    def grouped(self) -> GroupedWeight:
        """For the GEMMs of experts, of which it has some, one below the other."""
        return GroupedWeight(self.weight, self.weight_scale, self.input_scale, 0, self.multiplies_fp8)

    def slices(self) -> Iterator[Slice]:
        on_load = self.quantization.weights == "load"
        for part, here in self._placed():
            yield weight_slice(part, self.weight[here], self.weight_scale[here] if on_load else None)

    def reading(self) -> None:
        if self.input_scale is not None:
            self.input_scale.zero_()

    def scales(self) -> Iterator[Scale]:
        if self.quantization.weights == "load":
            return
        for part, here in self._placed():
            name = f"{part.name}.{self.quantization.scale_name}"
            yield Scale(name, self._scale_shapes(part), self._store_into(part, here), may_be_zero=True, inputs=part.shape[1])
            yield from self.input_scales([part.name])

    def _scale_shapes(self, part: WeightPart) -> tuple[tuple[int, ...], ...]:
        """The shapes that a checkpoint may give to the scales of a part."""
        return ((), (1,)) if self.quantization.weights == "tensor" else ((part.shape[0], 1), (part.shape[0],))

    def _store_into(self, part: WeightPart, here: slice) -> Callable[[Tensor], None]:
        """What stores the checkpoint's scales of a part, in fp32 on CPU."""
        target, rows = self.weight_scale[here], part.rows

        def store(scale: Tensor) -> None:
            target.copy_(scale.reshape(-1).expand(part.shape[0])[rows.start : rows.stop])

        return store

    def input_scales(self, names: Iterable[str]) -> Iterator[Scale]:
        if self.input_scale is not None:
            for name in names:
                yield Scale(f"{name}.input_scale", ((), (1,)), self._store_input_scale)

    def _store_input_scale(self, scale: Tensor) -> None:
        # Layers that run as one GEMM share their input, and so the scale that covers all of it.
        assert self.input_scale is not None
        self.input_scale.copy_(torch.maximum(self.input_scale, scale.reshape(()).to(self.input_scale.device)))
        if self.input_quantizer is not None:
            self.input_quantizer.changed()

    @classmethod
    def why_dequantized(cls, context: LayerContext) -> str | None:
        """Why GEMMs do not run in FP8; None where they do, except those of unsupported sizes."""
        assert context.quantization is not None
        if not context.multiplies_fp8:
            return f"this {context.device.type} has no FP8 GEMM"
        if context.quantization.activations == "none":
            return "the checkpoint does not quantize activations"
        return None

    @classmethod
    def describe(cls, context: LayerContext) -> str | None:
        why = cls.why_dequantized(context)
        dtype = str(context.dtype).removeprefix("torch.")
        return None if why is None else f"weights are in FP8, and GEMMs run in {dtype}: {why}"
