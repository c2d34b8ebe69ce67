# SPDX-License-Identifier: Apache-2.0
"""Weights in e4m3 and the products with them: what a linear layer holds beside its weight when it is in FP8.

Where the device multiplies e4m3 (Ada, Hopper and later), activations are quantized too, by whoever makes them: the norm or the
SiLU before the layer if it can, else the layer itself. A layer whose weights are scaled by block quantizes what it is given itself,
with a scale per token and block of columns. Elsewhere the weight is widened for each product, in registers where it is scaled by
block and tokens are few, and activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.quantization import Quantization, require_whole
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.gemm import block_gemm
from phalanx.kernels.gemm.block_heuristics import BLOCK_K, FEW_TOKENS
from phalanx.kernels.gemm.scaled_mm import ALIGNMENT, quant_gemm, scaled_mm_into, unscaled_mm
from phalanx.kernels.scaled_tensors import FP8, Quantized, Unscaled
from phalanx.log import get_logger
from phalanx.models.slices import LayerContext, Scale, Sliced

logger = get_logger(__name__)

Activation = Tensor | Quantized
"""What flows into a linear layer: in 16 or 32 bit, or quantized for a layer that takes that."""


@dataclass(frozen=True)
class Fp8:
    """One layer's scales, and how it multiplies.

    weight_scale: fp32 [out], or [out, blocks] for weights scaled by block, each row with its block's scale. input_scale: a fp32
    scalar where activations have a static scale. products: activations are e4m3 too, and whoever makes them may quantize them.
    by_group: they are, but only this layer knows their groups. begin: the whole weight's column that is the first here.
    whole_blocks: its rows begin with blocks of 128 x 128, and torch's product takes it.
    """

    quantization: Quantization
    weight_scale: Tensor
    input_scale: Tensor | None
    products: bool
    dtype: torch.dtype
    begin: int = 0
    by_group: bool = False
    whole_blocks: bool = False
    _by_block: list[Tensor] = field(default_factory=list)
    _static: list[Tensor] = field(default_factory=list)

    def quantize(self, x: Activation) -> Quantized:
        """x [T, in] as this layer's products take it; itself if it is quantized."""
        if isinstance(x, Quantized):
            return x
        return self.took(*kernels.quantize_fp8(x, self.input_scale))

    def took(self, values: Tensor, scale: Tensor | None) -> Quantized:
        """values [T, in] e4m3, quantized with this layer's `input_scale`, or with `scale` [T, 1] where it has none."""
        if self.input_scale is not None:
            scale = self._static_rows(values.shape[0])
        assert scale is not None
        return Quantized(values, scale)

    def _static_rows(self, tokens: int) -> Tensor:
        """The static scale, [tokens, 1]: products want one for each row, and a buffer saves each of them a launch."""
        assert self.input_scale is not None
        if not self._static or self._static[-1].shape[0] < tokens:
            # A smaller one is kept: a captured graph may read it.
            self._static.append(self.input_scale.expand(1 << (tokens - 1).bit_length(), 1).contiguous())
        return self._static[-1][:tokens]

    def linear(self, x: Activation, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times weight [out, in] -> [T, out]."""
        if not isinstance(x, Quantized) and not self.products:
            return self._of_tensor(x, weight, bias)
        if not isinstance(x, Quantized) and x.shape[0] == 1:  # one row is quantized by its product, in one launch
            product = quant_gemm(x, self.input_scale, weight, self.weight_scale, dtype=self.dtype)
        else:
            product = kernels.scaled_mm(self.quantize(x), weight, self.weight_scale, dtype=self.dtype)
        return product if bias is None else product + bias

    def _of_tensor(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` where x comes, and is to come, in 16 or 32 bit."""
        if self.quantization.block is None:
            return F.linear(x, self.widened(weight), bias)
        columns = self.quantization.block[1]
        begin = self.begin % columns
        if not self.by_group:
            return block_gemm.w8a16_gemm(x, weight, self.weight_scale, bias, block=columns, begin=begin)
        by_block = self._once_a_block() if self.whole_blocks else None
        product = block_gemm.block_scaled_mm(x, weight, self.weight_scale, dtype=self.dtype, begin=begin, by_block=by_block)
        return product if bias is None else product + bias

    def _once_a_block(self) -> Tensor:
        """Made when a weight that has been read is used first: before graphs are captured, as all that runs in them has run."""
        if not self._by_block:
            self._by_block.append(block_gemm.one_scale_per_block(self.weight_scale))
        return self._by_block[0]

    def unscaled(self, x: Activation, weight: Tensor, bias: Tensor | None = None) -> Tensor | Unscaled:
        """`linear` for a reader that can apply the product's scales, such as a sum over ranks: it may come without them, unless a
        bias stands between."""
        if not self.products or bias is not None or x.shape[0] == 1:
            return self.linear(x, weight, bias)
        return unscaled_mm(self.quantize(x), weight, self.weight_scale, dtype=self.dtype)

    @property
    def spreads(self) -> bool:
        """Whether there is `into`."""
        return self.products and self.dtype == torch.bfloat16

    def into(self, x: Activation, weight: Tensor, pieces: Sequence[tuple[slice, Tensor]]) -> None:
        """`linear`, each of these rows of x into the tensor [rows, out] beside it."""
        scaled_mm_into(self.quantize(x), weight, self.weight_scale, pieces)

    def widened(self, weight: Tensor) -> Tensor:
        """The weight's values in 16 or 32 bit."""
        if self.quantization.block is None:
            return kernels.dequantize(weight, self.weight_scale, self.dtype)
        columns = self.quantization.block[1]
        return kernels.dequantize(weight, self.weight_scale, self.dtype, block=columns, begin=self.begin % columns)

    def scale_on_load(self, rows: slice) -> Tensor | None:
        """Where the scales go of rows that are quantized as they are read, [rows]."""
        return self.weight_scale[rows] if self.quantization.weights == "load" else None

    def scales(self, name: str, whole: tuple[int, int], rows: range, here: slice) -> Iterator[Scale]:
        """What to read for `rows` of checkpoint layer `name`, whose weight is `whole` [out, in]; they stand at rows `here`."""
        kind, block = self.quantization.weights, self.quantization.block
        if kind == "load":
            return
        shapes: tuple[tuple[int, ...], ...] = ((), (1,)) if kind == "tensor" else ((whole[0], 1), (whole[0],))
        if block is not None:
            shapes = ((-(-whole[0] // block[0]), -(-whole[1] // block[1])),)
        target = self.weight_scale[here]
        self._by_block.clear()

        def store(scale: Tensor) -> None:
            if block is not None:
                first = self.begin // block[1]
                by_row = torch.tensor(rows, dtype=torch.int64) // block[0]
                target.copy_(scale[by_row, first : first + target.shape[1]])
            else:
                target.copy_(scale.reshape(-1).expand(whole[0])[rows.start : rows.stop])

        yield Scale(f"{name}.{self.quantization.scale_name}", shapes, store, may_be_zero=True, inputs=whole[1])
        if self.input_scale is not None:
            yield Scale(f"{name}.input_scale", ((), (1,)), self._store_input_scale)

    def _store_input_scale(self, scale: Tensor) -> None:
        # Layers that run as one product share their input, and so the scale that holds all of it.
        assert self.input_scale is not None
        self._static.clear()
        self.input_scale.copy_(torch.maximum(self.input_scale, scale.reshape(()).to(self.input_scale.device)))


def hold(
    layer: Sliced, names: Sequence[str], out: int, inputs: int, *, context: LayerContext, begin: int = 0, runs: Sequence[tuple[int, int]] = ()
) -> Fp8 | None:  # fmt: skip
    """Give `layer` its uninitialized weight [out, inputs], and its scales if the checkpoint layers `names`, which it merges, are
    in FP8 (None if not). begin: the whole weight's column that is its first; runs: which rows it has of each of the checkpoint's
    weights, one behind another, as (first, count); none: all rows of one."""
    quantization = context.quantization
    if quantization is None or not require_whole(quantization, names):
        layer.weight = context.weight(out, inputs)
        return None
    layer.weight = context.weight(out, inputs, dtype=FP8)
    along: tuple[int, ...] = ()
    if quantization.block is not None:
        columns = quantization.block[1]
        along = (-(-(begin % columns + inputs) // columns),)
    layer.weight_scale = context.weight(out, *along, dtype=torch.float32)
    products = _why_widened(quantization, context.fp8_products, context.device) is None
    if products and (out % ALIGNMENT or inputs % ALIGNMENT or (along and begin % ALIGNMENT)):
        logger.info(
            "%s runs in %s: its weight is %d x %d on this rank, from column %d on, and FP8 products need multiples of %d", names[0],
            context.dtype, out, inputs, begin, ALIGNMENT,
        )  # fmt: skip
        products = False
    if quantization.activations == "static":
        layer.input_scale = nn.Parameter(torch.zeros((), dtype=torch.float32, device=context.device), requires_grad=False)
    by_group, input_scale = products and bool(along), getattr(layer, "input_scale", None)
    whole = quantization.block == (BLOCK_K, BLOCK_K) and not any(size % BLOCK_K for run in runs for size in run)
    whole_blocks = by_group and whole and block_gemm.cublas_supports(out, inputs, begin, context.device)
    return Fp8(quantization, layer.weight_scale, input_scale, products and not along, context.dtype, begin, by_group, whole_blocks)


def describe_gemm(quantization: Quantization, fp8_products: bool, device: torch.device, dtype: torch.dtype) -> str | None:
    """A line for the log on weights that are widened, or scaled by block; None for others. fp8_products: as a seat has it."""
    why, block = _why_widened(quantization, fp8_products, device), quantization.block
    if why is None:
        if block is None:
            return None
        return (
            f"weights are in FP8 by blocks of {block[0]} x {block[1]}, and so are products: activations get a scale per token and "
            f"{block[1]} columns, and each block's sum its scales"
        )
    line = f"weights are in FP8, and products run in {str(dtype).removeprefix('torch.')}: {why}"
    if block is not None and block[1] == BLOCK_K and device.type == "cuda" and has_triton():
        line += f"; up to {FEW_TOKENS} tokens, weights are widened in registers"
    return line


def _why_widened(quantization: Quantization, fp8_products: bool, device: torch.device) -> str | None:
    """What keeps a checkpoint's products from being in FP8; None: nothing, but for the sizes of some."""
    if not fp8_products:
        return f"this {device.type} has no FP8 products"
    if quantization.activations == "none":
        return "the checkpoint does not quantize activations"
    if quantization.block is not None and device.type == "cuda" and not has_triton():
        return "products by block need Triton"
    if quantization.block is not None and quantization.block[1] != BLOCK_K:
        return f"its blocks have {quantization.block[1]} columns, and FP8 products need {BLOCK_K}"
    return None
