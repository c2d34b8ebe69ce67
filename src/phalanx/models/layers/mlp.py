# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward block, SwiGLU (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx import kernels
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import Seat
from phalanx.plan import shard


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); the intermediate features are split over the ranks."""

    def __init__(self, name: str, hidden_size: int, intermediate_size: int, *, bias: bool, seat: Seat) -> None:
        super().__init__()
        what = "intermediate_size"
        mine = shard.even(what, intermediate_size, seat.group.size, seat.group.rank)
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up = MergedColumnParallelLinear(names, hidden_size, intermediate_size, what=what, bias=bias, seat=seat)
        self.down = RowParallelLinear(f"{name}.down_proj", intermediate_size, hidden_size, local=mine, bias=bias, seat=seat)

    def forward(self, x: Activation, residual: Tensor, norm: RmsNorm | None) -> tuple[Activation, Tensor]:
        """x [T, hidden] -> as RowParallelLinear: (norm(residual + mlp(x)), residual + mlp(x))."""
        gate_up, fp8 = self.gate_up(x, may_stay_unscaled=True), self.down.fp8
        if fp8 is not None and fp8.products:
            inner: Activation = fp8.took(*kernels.silu_mul_quant_fp8(gate_up, fp8.input_scale))
        else:
            inner = kernels.silu_mul(gate_up)
        down: tuple[Activation, Tensor] = self.down(inner, residual, norm)
        return down
