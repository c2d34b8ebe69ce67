# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward block, SwiGLU (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx import kernels
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.gemm.gemv_fused import gate_up_silu
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext
from phalanx.plan import shard


class GatedMlp(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)); the intermediate features are split over the ranks."""

    def __init__(self, name: str, hidden_size: int, intermediate_size: int, *, bias: bool, context: LayerContext) -> None:
        super().__init__()
        what = "intermediate_size"
        local = shard.even(what, intermediate_size, context.group.size, context.group.rank)
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up_proj = MergedColumnParallelLinear(
            names, hidden_size, intermediate_size, what=what, bias=bias, context=context
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            f"{name}.down_proj", intermediate_size, hidden_size, local=local, bias=bias, context=context
        )  # fmt: skip

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it quantizes for the block's first layer."""
        norm.set_consumer(self.gate_up_proj.fp8)

    def forward(self, x: Activation, residual: Tensor, norm: RmsNorm | None) -> tuple[Activation, Tensor]:
        """x [T, hidden] -> as RowParallelLinear: (norm(residual + mlp(x)), residual + mlp(x))."""
        output: tuple[Activation, Tensor] = self.down_proj(self._silu_and_mul(x), residual, norm)
        return output

    def partial_sum(self, x: Activation) -> Tensor:
        """x [T, hidden] -> what this rank's features add to mlp(x), [T, hidden]."""
        return self.down_proj.partial_sum(self._silu_and_mul(x))

    def _silu_and_mul(self, x: Activation) -> Activation:
        """x [T, hidden] -> silu(gate_proj(x)) * up_proj(x), quantized where `down_proj` takes that and does not quantize itself."""
        fp8 = self.down_proj.fp8
        quantized = fp8 is not None and fp8.fp8_gemm
        gemv_args = self.gate_up_proj.gemv_args(x)
        if gemv_args is not None and heuristics.fuses_silu(self.down_proj.weight.shape[1], down_is_fp8=quantized):
            fused = gate_up_silu(gemv_args)
            if fused is not None:
                return fused
        gate_up = self.gate_up_proj(x, may_stay_unscaled=True)
        if fp8 is not None and quantized:
            return fp8.with_scale(*kernels.silu_mul_quant_fp8(gate_up, fp8.input_scale))
        return kernels.silu_mul(gate_up)
