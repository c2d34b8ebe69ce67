# SPDX-License-Identifier: Apache-2.0
"""FP8 linear layers: the scales that a layer holds beside its e4m3 weight, and the GEMM that it runs.

Where the device multiplies e4m3 (Ada, Hopper and later), activations are quantized too: by the norm or the SiLU before the layer
where that can, else by the layer. A layer whose weight is scaled by block always quantizes its input itself, with a scale per token
and block of columns. Elsewhere activations stay in 16 or 32 bit, and the weight is dequantized for each GEMM: in registers where it
is scaled by block and tokens are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.quantization import Quantization, require_uniform
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.gemm import block_gemm
from phalanx.kernels.gemm.block_heuristics import BLOCK_K, FEW_TOKENS
from phalanx.kernels.gemm.scaled_mm import ALIGNMENT, quant_gemm, scaled_mm_into, unscaled_mm
from phalanx.kernels.scaled_tensors import FP8, Quantized, Unscaled
from phalanx.log import get_logger
from phalanx.models.slices import LayerContext, Scale, Sliced

logger = get_logger(__name__)

Activation = Tensor | Quantized
"""The input of a linear layer: in 16 or 32 bit, or quantized for a layer that takes that."""


class NormAndQuantized(NamedTuple):
    """A norm [T, size] for a reader in 16 bit, as a router is, and the same quantized for the layer beside it."""

    norm: Tensor
    quantized: Quantized


NormOutput = Activation | NormAndQuantized
"""What a norm gives to the block behind it."""


@dataclass(frozen=True)
class Fp8:
    """One layer's scales, and the kind of its GEMM.

    weight_scale: fp32 [out], or [out, blocks] for weights scaled by block, each row with its block's scale. input_scale: a fp32
    scalar where activations have a static scale. fp8_gemm: activations are e4m3 too, and the op before the layer may quantize them.
    quantizes_groups: they are, but the layer quantizes them itself, in groups of columns. begin: the column of the unsplit weight
    that is the first here. whole_blocks: the rows begin with blocks of 128 x 128, and cuBLAS takes the weight.
    """

    quantization: Quantization
    weight_scale: Tensor
    input_scale: Tensor | None
    fp8_gemm: bool
    dtype: torch.dtype
    begin: int = 0
    quantizes_groups: bool = False
    whole_blocks: bool = False
    _block_scale: list[Tensor] = field(default_factory=list)
    _static: list[Tensor] = field(default_factory=list)

    def quantize(self, x: Activation) -> Quantized:
        """x [T, in] as this layer's GEMM takes it; x itself where it is quantized."""
        if isinstance(x, Quantized):
            return x
        return self.with_scale(*kernels.quantize_fp8(x, self.input_scale))

    def with_scale(self, values: Tensor, scale: Tensor | None) -> Quantized:
        """values [T, in] e4m3, quantized with this layer's `input_scale`, or with `scale` [T, 1] where it has none."""
        if self.input_scale is not None:
            scale = self._static_rows(values.shape[0])
        assert scale is not None
        return Quantized(values, scale)

    def _static_rows(self, tokens: int) -> Tensor:
        """The static scale, [tokens, 1]: the GEMM reads one for each row, and a buffer saves each GEMM a launch."""
        assert self.input_scale is not None
        if not self._static or self._static[-1].shape[0] < tokens:
            # The smaller buffer is kept: a captured graph may read it.
            self._static.append(self.input_scale.expand(1 << (tokens - 1).bit_length(), 1).contiguous())
        return self._static[-1][:tokens]

    def linear(self, x: Activation, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times weight [out, in] -> [T, out]."""
        if not isinstance(x, Quantized) and not self.fp8_gemm:
            return self._linear_16bit(x, weight, bias)
        if not isinstance(x, Quantized) and x.shape[0] == 1:  # a GEMV quantizes its input in the same launch
            output = quant_gemm(x, self.input_scale, weight, self.weight_scale, dtype=self.dtype)
        else:
            output = kernels.scaled_mm(self.quantize(x), weight, self.weight_scale, dtype=self.dtype)
        return output if bias is None else output + bias

    def _linear_16bit(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` of an input that is not quantized by the op before this layer."""
        if self.quantization.block is None:
            return F.linear(x, self.dequantized(weight), bias)
        columns = self.quantization.block[1]
        begin = self.begin % columns
        if not self.quantizes_groups:
            return block_gemm.w8a16_gemm(x, weight, self.weight_scale, bias, block=columns, begin=begin)
        by_block = self._scale_per_block() if self.whole_blocks else None
        output = block_gemm.block_scaled_mm(x, weight, self.weight_scale, dtype=self.dtype, begin=begin, by_block=by_block)
        return output if bias is None else output + bias

    def _scale_per_block(self) -> Tensor:
        """Made at the first use of a weight that has been read. That is before graphs are captured, since whatever they contain has
        run once."""
        if not self._block_scale:
            self._block_scale.append(block_gemm.one_scale_per_block(self.weight_scale))
        return self._block_scale[0]

    def unscaled(self, x: Activation, weight: Tensor, bias: Tensor | None = None) -> Tensor | Unscaled:
        """`linear` for a reader that can apply the scales of a GEMM, such as a sum over ranks. Where that is faster, the output
        comes without them. Not before a bias."""
        tokens = len(x.values if isinstance(x, Quantized) else x)
        if not self.fp8_gemm or bias is not None or tokens == 1:
            return self.linear(x, weight, bias)
        return unscaled_mm(self.quantize(x), weight, self.weight_scale, dtype=self.dtype)

    @property
    def can_write_into(self) -> bool:
        """Whether `write_into` runs."""
        return self.fp8_gemm and self.dtype == torch.bfloat16

    def write_into(self, x: Activation, weight: Tensor, targets: Sequence[tuple[slice, Tensor]]) -> None:
        """`linear`, of each of these rows of x into the tensor [rows, out] beside them."""
        scaled_mm_into(self.quantize(x), weight, self.weight_scale, targets)

    def dequantized(self, weight: Tensor) -> Tensor:
        """The weight's values in 16 or 32 bit."""
        if self.quantization.block is None:
            return kernels.dequantize(weight, self.weight_scale, self.dtype)
        columns = self.quantization.block[1]
        return kernels.dequantize(weight, self.weight_scale, self.dtype, block=columns, begin=self.begin % columns)

    def scale_on_load(self, rows: slice) -> Tensor | None:
        """Where the scales of rows go that are quantized while they are read, [rows]."""
        return self.weight_scale[rows] if self.quantization.weights == "load" else None

    def scales(self, name: str, shape: tuple[int, int], rows: range, here: slice) -> Iterator[Scale]:
        """What to read for `rows` of checkpoint layer `name`, whose weight is `shape` [out, in]; they are rows `here` of this
        layer."""
        kind, block = self.quantization.weights, self.quantization.block
        if kind == "load":
            return
        shapes: tuple[tuple[int, ...], ...] = ((), (1,)) if kind == "tensor" else ((shape[0], 1), (shape[0],))
        if block is not None:
            shapes = ((-(-shape[0] // block[0]), -(-shape[1] // block[1])),)
        target = self.weight_scale[here]
        self._block_scale.clear()

        def store(scale: Tensor) -> None:
            if block is not None:
                first = self.begin // block[1]
                by_row = torch.tensor(rows, dtype=torch.int64) // block[0]
                target.copy_(scale[by_row, first : first + target.shape[1]])
            else:
                target.copy_(scale.reshape(-1).expand(shape[0])[rows.start : rows.stop])

        yield Scale(f"{name}.{self.quantization.scale_name}", shapes, store, may_be_zero=True, inputs=shape[1])
        yield from self.input_scales([name])

    def input_scales(self, names: Iterable[str]) -> Iterator[Scale]:
        """What to read for the static scale of this layer's input, which covers these checkpoint layers."""
        if self.input_scale is not None:
            for name in names:
                yield Scale(f"{name}.input_scale", ((), (1,)), self._store_input_scale)

    def _store_input_scale(self, scale: Tensor) -> None:
        # Layers that run as one GEMM share their input, and so the scale that covers all of it.
        assert self.input_scale is not None
        self._static.clear()
        self.input_scale.copy_(torch.maximum(self.input_scale, scale.reshape(()).to(self.input_scale.device)))


def add_weight(
    layer: Sliced, names: Sequence[str], out: int, inputs: int, *, context: LayerContext, begin: int = 0,
    runs: Sequence[tuple[int, int]] = (),
) -> Fp8 | None:  # fmt: skip
    """Add to `layer` its uninitialized weight [out, inputs], and its scales where the checkpoint layers `names`, which it merges,
    are in FP8 (else return None). begin: the column of the unsplit weight that is its first; runs: which rows it has of each of the
    checkpoint's weights, one below the other, as (first, count); none: all rows of one."""
    quantization = context.quantization
    if quantization is None or not require_uniform(quantization, names):
        layer.weight = context.weight(out, inputs)
        return None
    layer.weight = context.weight(out, inputs, dtype=FP8)
    along: tuple[int, ...] = ()
    if quantization.block is not None:
        columns = quantization.block[1]
        along = (-(-(begin % columns + inputs) // columns),)
    layer.weight_scale = context.weight(out, *along, dtype=torch.float32)
    fp8_gemm = _why_dequantized(quantization, context.fp8_gemm, context.device) is None
    if fp8_gemm and (out % ALIGNMENT or inputs % ALIGNMENT or (along and begin % ALIGNMENT)):
        logger.info(
            "%s runs in %s: its weight is %d x %d on this rank, from column %d on, and FP8 GEMMs need multiples of %d", names[0],
            context.dtype, out, inputs, begin, ALIGNMENT,
        )  # fmt: skip
        fp8_gemm = False
    if quantization.activations == "static":
        layer.input_scale = nn.Parameter(torch.zeros((), dtype=torch.float32, device=context.device), requires_grad=False)
    quantizes_groups, input_scale = fp8_gemm and bool(along), getattr(layer, "input_scale", None)
    aligned = quantization.block == (BLOCK_K, BLOCK_K) and not any(size % BLOCK_K for run in runs for size in run)
    whole_blocks = quantizes_groups and aligned and block_gemm.cublas_supports(out, inputs, begin, context.device)
    return Fp8(
        quantization, layer.weight_scale, input_scale, fp8_gemm and not along, context.dtype, begin, quantizes_groups, whole_blocks
    )  # fmt: skip


def describe_gemm(quantization: Quantization, fp8_gemm: bool, device: torch.device, dtype: torch.dtype) -> str | None:
    """A log line about weights that are dequantized for each GEMM, or scaled by block; None for others. fp8_gemm: as in
    LayerContext."""
    why, block = _why_dequantized(quantization, fp8_gemm, device), quantization.block
    if why is None:
        if block is None:
            return None
        return (
            f"weights are in FP8 by blocks of {block[0]} x {block[1]}, and GEMMs run in FP8: activations get a scale per token and "
            f"{block[1]} columns, and the sum over each block is scaled"
        )
    line = f"weights are in FP8, and GEMMs run in {str(dtype).removeprefix('torch.')}: {why}"
    if block is not None and block[1] == BLOCK_K and device.type == "cuda" and has_triton():
        line += f"; up to {FEW_TOKENS} tokens, weights are dequantized in registers"
    return line


def _why_dequantized(quantization: Quantization, fp8_gemm: bool, device: torch.device) -> str | None:
    """Why a checkpoint's GEMMs do not run in FP8; None where they do, except those of unsupported sizes."""
    if not fp8_gemm:
        return f"this {device.type} has no FP8 GEMM"
    if quantization.activations == "none":
        return "the checkpoint does not quantize activations"
    if quantization.block is not None and device.type == "cuda" and not has_triton():
        return "block-scaled GEMMs need Triton"
    if quantization.block is not None and quantization.block[1] != BLOCK_K:
        return f"its blocks have {quantization.block[1]} columns, and FP8 GEMMs need {BLOCK_K}"
    return None
