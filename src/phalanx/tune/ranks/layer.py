# SPDX-License-Identifier: Apache-2.0
"""What a decoder layer runs around an all-reduce: a row-parallel linear layer like `o_proj`, and the norm behind it. A benchmark
times both together where a strategy contains the GEMM.

The layers are those of the models. Each rank has hidden / ranks input features. Before an FP8 norm the GEMM is in FP8, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.group import Group, ResidualRmsNorm
from phalanx.config.quantization import ON_LOAD
from phalanx.kernels import reference
from phalanx.kernels.scaled_tensors import FP8, Quantized
from phalanx.models.layers.activation import NormAndQuantized
from phalanx.models.layers.linear import RowParallelLinear
from phalanx.models.layers.linear_methods.fp8 import Fp8, TokenQuantizer
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, WeightPart
from phalanx.tables.message import Fusion
from phalanx.tune.ranks import verify

_ALIGNMENT = 16
_FP8_GEMM_SM = 89
"""The least compute capability (x 10) that multiplies e4m3."""


def in_features(hidden: int, world: int) -> int:
    """Input features of one rank: those of `o_proj` where heads x head size is the hidden size, rounded to what FP8 GEMMs take."""
    return max(hidden // world // _ALIGNMENT, 1) * _ALIGNMENT


class RowParallelLayer:
    """One rank's layer for tensors [tokens, hidden] of a dtype, with the norm that `fusion` asks for. Its weights have any content
    until `verified` or `timed` fills them."""

    def __init__(self, fusion: ResidualRmsNorm, rank: int, group: Group) -> None:
        residual, self.rank, self.fusion = fusion.residual, rank, fusion
        hidden, inputs, world = residual.shape[1], in_features(residual.shape[1], group.size), group.size
        self.fp8 = fusion.quant == "fp8"
        context = LayerContext(group, residual.dtype, residual.device, ON_LOAD if self.fp8 else None, fp8_gemm=self.fp8)
        part = WeightPart("o_proj", (hidden, world * inputs), range(hidden), range(rank * inputs, (rank + 1) * inputs))
        self._linear = RowParallelLinear(part, bias=False, context=context)
        self._norm = RmsNorm("post_attention_layernorm", hidden, fusion.eps, context=context)
        self._norm.weight.copy_(fusion.weight)
        method = self._linear.method
        assert isinstance(method, Fp8 | Unquantized)
        self._method = method
        if isinstance(method, Fp8):
            method.weight_scale.fill_(1.0)
            if method.input_quantizer is not None:
                method.input_quantizer = TokenQuantizer(fusion.scale)
            self._norm.set_quantizer(method.input_quantizer, keep_norm=fusion.keep_norm)
        self._scale = torch.ones(len(residual), 1, dtype=torch.float32, device=residual.device)

    def refusal(self, sm: int) -> str | None:
        """Why no model has this layer on a device of this compute capability (0: a CPU); None where one has."""
        if self.fp8 and 0 < sm < _FP8_GEMM_SM:
            return f"sm{sm} has no FP8 GEMM, so no norm there feeds one"
        return None

    def gemm_rs_refusal(self) -> str | None:
        """Why this layer's GEMM cannot write to other ranks; None where it can."""
        return None if self._linear.method.fuses("reduce_scatter") else "an FP8 GEMM writes to other ranks in bf16 alone"

    def __call__(self, group: Group, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        """x [tokens, in], in e4m3 before an FP8 norm -> the outputs of the fusion of the sum of all ranks' GEMM outputs."""
        self._linear.context = replace(self._linear.context, group=group)
        out, new = self._linear(Quantized(x, self._scale) if self.fp8 else x, residual, self._norm)
        kept, out = ((out.norm,), out.quantized) if isinstance(out, NormAndQuantized) else ((), out)
        if not isinstance(out, Quantized):
            return out, new
        return (*kept, out.values, *((out.scale,) if self.fusion.scale is None else ()), new)

    def verified(self) -> None:
        """Give each output feature a weight of 1 for one input feature: sums of integers stay exact in every dtype."""
        weight = torch.zeros_like(self._method.weight, dtype=torch.float32)
        weight[torch.arange(len(weight)), source(len(weight), weight.shape[1], self.rank, weight.device)] = 1.0
        self._set(weight)

    def timed(self) -> None:
        """Fill all weights: a GEMM over zeros would take less power than a model's."""
        rows = torch.arange(self._method.weight.shape[0], device=self._method.weight.device)[:, None]
        columns = torch.arange(self._method.weight.shape[1], device=self._method.weight.device)[None, :]
        self._set(((rows * 31 + columns * 17 + (rows * columns) % 29) % 15 - 7) / 8)

    def _set(self, weight: Tensor) -> None:
        self._method.weight = nn.Parameter(weight.to(self._method.weight.dtype), requires_grad=False)


def source(hidden: int, inputs: int, rank: int, device: torch.device) -> Tensor:
    """[hidden] input features: the one that each output feature of a `verified` layer of a rank copies."""
    return (torch.arange(hidden, device=device) * 7 + rank) % inputs


def cell(fusion: Fusion, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, group: Group) -> verify.Cell:
    """As `verify.cell`, of a layer with its GEMM: x is its input."""
    plain = verify.arguments(fusion, tokens, hidden, dtype, device, group.size)
    inputs = in_features(hidden, group.size)
    ranks = [verify.rank_input(rank, tokens, inputs, dtype, device) for rank in range(group.size)]
    total = reference.all_reduce([x[:, source(hidden, inputs, rank, device)] for rank, x in enumerate(ranks)])
    x = ranks[group.rank].to(FP8) if plain.quant == "fp8" else ranks[group.rank]
    layer: Any = RowParallelLayer(plain, group.rank, group)
    return verify.Cell(x, plain, verify.expected(total, plain), layer)
