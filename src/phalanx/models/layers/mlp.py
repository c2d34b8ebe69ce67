# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward block, SwiGLU (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx import kernels
from phalanx.kernels.products import choice
from phalanx.kernels.products.one_token import gate_up_silu
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.one_token import factors
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
        down: tuple[Activation, Tensor] = self.down(self._inner(x), residual, norm)
        return down

    def _inner(self, x: Activation) -> Activation:
        """x [T, hidden] -> silu(gate(x)) * up(x), quantized where `down` takes that and does not do it itself."""
        fp8 = self.down.fp8
        quantized = fp8 is not None and fp8.products
        of_one = factors(x, self.gate_up)
        if of_one is not None and choice.gates(self.down.weight.shape[1], down_is_fp8=quantized):
            inner = gate_up_silu(of_one)
            if inner is not None:
                return inner
        gate_up = self.gate_up(x, may_stay_unscaled=True)
        if fp8 is not None and quantized:
            return fp8.took(*kernels.silu_mul_quant_fp8(gate_up, fp8.input_scale))
        return kernels.silu_mul(gate_up)
