# SPDX-License-Identifier: Apache-2.0
"""The feed-forward block: gated, SwiGLU or GeGLU (arXiv 2002.05202), or with ReLU squared."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import kernels
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.gemm.gemv_fused import gate_up_silu
from phalanx.models.batch import Batch
from phalanx.models.layers.activation import Activation, NormOutput
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext


class Mlp(nn.Module, ABC):
    """A feed-forward block; the intermediate features are split over the ranks."""

    down_proj: RowParallelLinear

    @property
    @abstractmethod
    def first(self) -> ColumnParallelLinear:
        """What reads the block's input."""

    @abstractmethod
    def _activated(self, x: Activation) -> Activation:
        """x [T, hidden] -> what `down_proj` multiplies, quantized where it takes that and does not quantize itself."""

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it quantizes for the block's first layer."""
        norm.set_quantizer(self.first.method.input_quantizer)

    def forward(self, x: Activation, residual: Tensor, norm: RmsNorm | None, batch: Batch) -> tuple[NormOutput, Tensor]:
        """x [T, hidden] -> as RowParallelLinear: (norm(residual + mlp(x)), residual + mlp(x))."""
        output: tuple[NormOutput, Tensor] = self.down_proj(self._activated(x), residual, norm)
        return output

    def partial_sum(self, x: Activation) -> Tensor:
        """x [T, hidden] -> what this rank's features add to mlp(x), [T, hidden]."""
        return self.down_proj.partial_sum(self._activated(x))


def mlp_of(activation: str, name: str, *, multiplier: float = 1.0, context: LayerContext) -> Mlp:
    """The block of this activation, as `Family` names it. name: the checkpoint's."""
    if activation == "relu2":
        return ReluSquaredMlp(name, multiplier=multiplier, context=context)
    return GatedMlp(name, multiplier=multiplier, activation=activation, context=context)


class ReluSquaredMlp(Mlp):
    """down_proj(relu(up_proj(x))^2) (arXiv 2109.08668)."""

    def __init__(self, name: str, *, multiplier: float = 1.0, context: LayerContext) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear.of(f"{name}.up_proj", context=context)
        self.down_proj = RowParallelLinear.of(f"{name}.down_proj", context, multiplier=multiplier)

    @property
    def first(self) -> ColumnParallelLinear:
        return self.up_proj

    def _activated(self, x: Activation) -> Activation:
        up: Tensor = self.up_proj(x)
        inner, quantizer = F.relu(up).square_(), self.down_proj.method.input_quantizer
        return inner if quantizer is None else quantizer.quantize(inner)


class GatedMlp(Mlp):
    """down_proj(act(gate_proj(x)) * up_proj(x)). activation: SiLU, or GELU by tanh."""

    def __init__(self, name: str, *, multiplier: float = 1.0, activation: str = "silu", context: LayerContext) -> None:
        super().__init__()
        self.gelu = activation == "gelu_pytorch_tanh"
        self.gate_up_proj = ColumnParallelLinear.of(f"{name}.gate_proj", f"{name}.up_proj", context=context)
        self.down_proj = RowParallelLinear.of(f"{name}.down_proj", context, multiplier=multiplier)

    @property
    def first(self) -> ColumnParallelLinear:
        return self.gate_up_proj

    def _activated(self, x: Activation) -> Activation:
        quantizer, gemv_args = self.down_proj.method.input_quantizer, self.gate_up_proj.gemv_args(x)
        fuses = not self.gelu and heuristics.fuses_silu(len(self.down_proj.local), down_is_fp8=quantizer is not None)
        if gemv_args is not None and fuses:
            fused = gate_up_silu(gemv_args)
            if fused is not None:
                return fused
        gate_up = self.gate_up_proj(x, may_stay_unscaled=True)
        if quantizer is not None:
            return quantizer.with_scale(*kernels.silu_mul_quant_fp8(gate_up, quantizer.scale, gelu=self.gelu))
        return kernels.silu_mul(gate_up, gelu=self.gelu)
