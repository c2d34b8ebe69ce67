# SPDX-License-Identifier: Apache-2.0
"""Weights in e4m3 with a scale for each block of rows and columns, as DeepSeek-V3 has them.

The method quantizes its input itself, with a scale per token and block of columns. Where GEMMs do not run in FP8, the weight is
dequantized for each: in registers where tokens are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import phalanx.kernels.reference as reference
from phalanx import kernels
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.gemm import block_gemm
from phalanx.kernels.gemm.block_heuristics import BLOCK_K, FEW_TOKENS
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.fp8 import Fp8
from phalanx.models.layers.linear_methods.method import Fusion, GroupedWeight
from phalanx.models.slices import LayerContext, WeightPart


class Fp8Block(Fp8):
    """weight [out, in] e4m3, weight_scale [out, blocks] fp32: each row with its block's scales. begin: the column of its block that
    is the first here. whole_blocks: the rows begin with blocks of 128 x 128, and cuBLAS takes the weight."""

    def __init__(self, parts: Sequence[WeightPart], context: LayerContext) -> None:
        super().__init__(parts, context)
        first = parts[0].columns.start
        self.begin = first % self.block[1]
        aligned = self.block == (BLOCK_K, BLOCK_K) and not any(
            size % BLOCK_K for part in parts for size in (part.rows.start, len(part.rows))
        )
        self.whole_blocks = (
            self.multiplies_fp8
            and aligned
            and block_gemm.cublas_supports(self.out_features, self.in_features, first, context.device)
        )
        self._by_block: Tensor | None = None

    @property
    def block(self) -> tuple[int, int]:
        assert self.quantization.block is not None
        return self.quantization.block

    def _scales_of_row(self) -> tuple[int, ...]:
        columns = self.block[1]
        return (-(-(self.parts[0].columns.start % columns + self.in_features) // columns),)

    def _input_quantizer(self) -> None:
        """None: no op before quantizes by block."""

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        if not self.multiplies_fp8:
            return block_gemm.w8a16_gemm(x, self.weight, self.weight_scale, bias, block=self.block[1], begin=self.begin)
        by_block = self._scale_per_block() if self.whole_blocks else None
        output = block_gemm.block_scaled_mm(
            x, self.weight, self.weight_scale, dtype=self.dtype, begin=self.begin, by_block=by_block
        )  # fmt: skip
        return output if bias is None else output + bias

    def _requantized(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        values, scale = reference.per_token_group_quant_fp8(x, self.block[1], self.begin)
        columns = (torch.arange(self.in_features, device=x.device) + self.begin) // self.block[1]
        return values.float() * scale[:, columns]

    def fuses(self, fusion: Fusion) -> bool:
        return False

    def dequantized(self, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> Tensor:
        weight, scale = self.weight[rows], self.weight_scale[rows]
        return kernels.dequantize(weight, scale, dtype or self.dtype, block=self.block[1], begin=self.begin)

    def reorder_rows(self, rows: list[int]) -> None:
        super().reorder_rows(rows)
        self.whole_blocks &= all(row // BLOCK_K == at // BLOCK_K for at, row in enumerate(rows))
        self._by_block = None

    def loaded(self) -> None:
        if self._by_block is not None:  # captured graphs read it
            self._by_block.copy_(block_gemm.one_scale_per_block(self.weight_scale))

    def grouped(self) -> GroupedWeight:
        return GroupedWeight(self.weight, self.weight_scale, None, self.begin, self.multiplies_fp8)

    def _scale_per_block(self) -> Tensor:
        """Made at the first use of a weight that has been read. That is before graphs are captured, since whatever they contain has
        run once."""
        if self._by_block is None:
            self._by_block = block_gemm.one_scale_per_block(self.weight_scale)
        return self._by_block

    def _scale_shapes(self, part: WeightPart) -> tuple[tuple[int, ...], ...]:
        rows, columns = self.block
        return ((-(-part.shape[0] // rows), -(-part.shape[1] // columns)),)

    def _store_into(self, part: WeightPart, here: slice) -> Callable[[Tensor], None]:
        target, (rows, columns) = self.weight_scale[here], self.block
        first = part.columns.start // columns

        def store(scale: Tensor) -> None:
            by_row = torch.tensor(part.rows, dtype=torch.int64) // rows
            target.copy_(scale[by_row, first : first + target.shape[1]])

        return store

    @classmethod
    def why_dequantized(cls, context: LayerContext) -> str | None:
        quantization = context.quantization
        assert quantization is not None
        assert quantization.block is not None
        why = super().why_dequantized(context)
        if why is None and context.device.type == "cuda" and not has_triton():
            return "block-scaled GEMMs need Triton"
        if why is None and quantization.block[1] != BLOCK_K:
            return f"its blocks have {quantization.block[1]} columns, and FP8 GEMMs need {BLOCK_K}"
        return why

    @classmethod
    def describe(cls, context: LayerContext) -> str:
        line, quantization = super().describe(context), context.quantization
        assert quantization is not None
        assert quantization.block is not None
        rows, columns = quantization.block
        if line is None:
            return (
                f"weights are in FP8 by blocks of {rows} x {columns}, and GEMMs run in FP8: activations get a scale per token and "
                f"{columns} columns, and the sum over each block is scaled"
            )
        if columns == BLOCK_K and context.device.type == "cuda" and has_triton():
            line += f"; up to {FEW_TOKENS} tokens, weights are dequantized in registers"
        return line
