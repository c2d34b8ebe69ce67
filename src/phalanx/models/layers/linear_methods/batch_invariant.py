# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose tokens do not depend on each other (`deterministic` on a GPU): around the method that holds its weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.errors import ModelError
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.gemm import block_gemm
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.fp8 import Fp8
from phalanx.models.layers.linear_methods.fp8_block import Fp8Block
from phalanx.models.layers.linear_methods.method import Fusion, LinearMethod
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.slices import LayerContext, Scale, Slice


class BatchInvariant(LinearMethod):
    """`method`, multiplied by a GEMM that has one tiling, or tilings of the same bits, for all numbers of tokens. It refuses
    fusions: their kernels are for some numbers of tokens alone."""

    def __init__(self, method: LinearMethod, context: LayerContext) -> None:
        super().__init__(method.parts, context)
        if context.dtype == torch.float32 or not (
            isinstance(method, Unquantized) or (isinstance(method, Fp8) and method.multiplies_fp8)
        ):
            kind, dtype = type(method).__name__, DTYPE_NAMES[context.dtype]
            raise ModelError(
                "deterministic does not work with this checkpoint on a GPU",
                held=f"{method.parts[0].name} is multiplied as {kind} in {dtype}",
                why="GEMMs whose tokens do not depend on the batch are there for 16 bit, and for FP8 of weights and activations",
                next="use dtype='bf16' or 'fp8' with a checkpoint in 16 bit, or leave deterministic out",
            )  # fmt: skip
        self.method, self.input_quantizer = method, method.input_quantizer

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        return self._multiply(x, bias)

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        return self.method.plain_multiply(x, bias)

    def for_sum(self, x: Activation, bias: Tensor | None, group: Group) -> Tensor:
        assert isinstance(self.method, Unquantized | Fp8)
        device = self.method.weight.device
        return self._multiply(x, bias, group.empty(x.shape[0], self.out_features, dtype=self.dtype, device=device))

    def _multiply(self, x: Activation, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        from phalanx.kernels.batch_invariant import BLOCK_TILING, batch_invariant_gemm
        from phalanx.kernels.gemm.block_scaled_gemm import block_scaled_gemm

        method, dtype = self.method, self.dtype
        if isinstance(method, Fp8Block):
            assert isinstance(x, Tensor)
            values, scale = block_gemm.per_token_group_quant_fp8(x.contiguous(), method.begin)
            total = block_scaled_gemm(
                values, scale, method.weight, method.weight_scale, dtype=dtype, begin=method.begin, tiling=BLOCK_TILING
            )  # fmt: skip
            return total if bias is None else total + bias
        if isinstance(method, Fp8):
            assert method.input_quantizer is not None
            values, scale = method.input_quantizer.quantize(x)
            return batch_invariant_gemm(values, method.weight, bias, scales=(scale, method.weight_scale), out=out, dtype=dtype)
        assert isinstance(x, Tensor)
        assert isinstance(method, Unquantized)
        return batch_invariant_gemm(x, method.weight, bias, out=out)

    def fuses(self, fusion: Fusion) -> bool:
        return fusion == "bias"

    def reorder_rows(self, rows: list[int]) -> None:
        self.method.reorder_rows(rows)

    def input_scales(self, names: Iterable[str]) -> Iterator[Scale]:
        return self.method.input_scales(names)

    def slices(self) -> Iterator[Slice]:
        """None: `method` is a layer with weights of its own."""
        return iter(())


def batch_invariant(method: LinearMethod, context: LayerContext) -> LinearMethod:
    """The method of a layer, as the engine asks for it."""
    return BatchInvariant(method, context) if context.batch_invariant else method
