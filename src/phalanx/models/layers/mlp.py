# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward block, SwiGLU or GeGLU (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx import kernels
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.gemm.gemv_fused import gate_up_silu
from phalanx.models.batch import Batch
from phalanx.models.layers.activation import Activation, NormOutput
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext


class GatedMlp(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)); the intermediate features are split over the ranks. activation: SiLU, or GELU by
    tanh."""

    def __init__(self, name: str, *, multiplier: float = 1.0, activation: str = "silu", context: LayerContext) -> None:
        super().__init__()
        self.gelu = activation == "gelu_pytorch_tanh"
        self.gate_up_proj = ColumnParallelLinear.of(f"{name}.gate_proj", f"{name}.up_proj", context=context)
        self.down_proj = RowParallelLinear.of(f"{name}.down_proj", context, multiplier=multiplier)

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it quantizes for the block's first layer."""
        norm.set_quantizer(self.gate_up_proj.method.input_quantizer)

    def forward(self, x: Activation, residual: Tensor, norm: RmsNorm | None, batch: Batch) -> tuple[NormOutput, Tensor]:
        """x [T, hidden] -> as RowParallelLinear: (norm(residual + mlp(x)), residual + mlp(x))."""
        output: tuple[NormOutput, Tensor] = self.down_proj(self._activated(x), residual, norm)
        return output

    def partial_sum(self, x: Activation) -> Tensor:
        """x [T, hidden] -> what this rank's features add to mlp(x), [T, hidden]."""
        return self.down_proj.partial_sum(self._activated(x))

    def _activated(self, x: Activation) -> Activation:
        """x [T, hidden] -> act(gate_proj(x)) * up_proj(x), quantized where `down_proj` takes that and does not quantize itself."""
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
