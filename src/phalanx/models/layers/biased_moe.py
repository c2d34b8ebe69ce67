# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts block of gpt-oss: a router and experts with biases, a clamped SwiGLU, experts in 16 bit or in MXFP4.

A checkpoint has the experts of a layer in one tensor each for gate and up, whose rows alternate, and for down. Here each expert's
gate rows come before its up rows, so that a rank's kernels read two runs, and the bits of MXFP4 are arranged as kernels widen them
(`kernels.moe.packing`). The bias of `down` is inside an expert's weight, and is
added by one of the ranks that share the expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.experts import Experts
from phalanx.errors import ModelError, WeightError
from phalanx.kernels.moe import packing
from phalanx.kernels.moe.dispatch import router_logits
from phalanx.kernels.moe.tensors import ExpertTensors, RouterLogits, TrafficPattern
from phalanx.models.layers.moe import SparseMoe, local_experts
from phalanx.models.slices import LayerContext, Slice, Sliced
from phalanx.plan import shard
from phalanx.plan.families.declare import BLOCKS, MXFP4_BLOCK, SCALES

_NAN_SCALE = 255  # of e8m0
LARGEST_SCALE = 128
"""For a larger one, the factor of `kernels.moe.mxfp4` is no bf16."""


class BiasedRouter(Sliced):
    """x W^T + b in x's dtype; weight [experts, hidden] and bias [experts], complete on each rank."""

    def __init__(self, name: str, experts: int, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.name = name
        self.weight, self.bias = context.weight(experts, hidden_size), context.weight(experts)

    def forward(self, x: Tensor) -> Tensor | RouterLogits:
        """x [T, hidden] -> logits [T, experts]."""
        return router_logits(x, self.weight, self.bias)

    def slices(self) -> Iterator[Slice]:
        yield Slice(f"{self.name}.weight", (self.weight.shape[0], self.weight.shape[1]), self.weight)
        yield Slice(f"{self.name}.bias", (self.bias.shape[0],), self.bias)


class StackedExpertLinear(Sliced):
    """One projection of this rank's experts, which a checkpoint has in one tensor for all experts.

    weight [experts * rows, columns], the experts one below the other; in MXFP4 uint8 [experts * rows, columns / 2], packed and
    tiled, with weight_scale uint8 [experts * rows, columns / 32], padded with zeros to a multiple of 4, and tiled. bias
    [experts * rows], or None where another rank adds it.
    """

    fp8 = None

    def __init__(
        self, name: str, experts: Experts, hidden_size: int, *, own: Sequence[int], local: range, gated: bool, has_bias: bool,
        context: LayerContext,
    ) -> None:  # fmt: skip
        """gated: gate and up, [2 * intermediate, hidden]; else down, [hidden, intermediate]. local: the intermediate features
        of this rank."""
        super().__init__()
        self.name, self.experts, self.hidden_size, self.own, self.local, self.gated = name, experts, hidden_size, own, local, gated
        self.rows, self.columns = (2 * len(local), hidden_size) if gated else (hidden_size, len(local))
        every = len(own) * self.rows
        self.weight_scale: nn.Parameter | None = None
        if experts.mxfp4:
            self.weight = context.weight(every, self.columns // 2, dtype=torch.uint8)
            padded = -(-self.columns // (packing.SCALES_IN_WORD * MXFP4_BLOCK)) * packing.SCALES_IN_WORD
            self.weight_scale = context.weight(every, padded, dtype=torch.uint8)
            self.weight_scale.zero_()
        else:
            self.weight = context.weight(every, self.columns)
        self.bias = context.weight(every) if has_bias else None

    def slices(self) -> Iterator[Slice]:
        count, inner, hidden = self.experts.count, self.experts.intermediate, self.hidden_size
        out, inputs = (2 * inner, hidden) if self.gated else (hidden, inner)
        rows = slice(2 * self.local.start, 2 * self.local.stop) if self.gated else slice(0, hidden)
        columns = slice(0, hidden) if self.gated else slice(self.local.start, self.local.stop)
        in_rows = self._gate_before_up if self.gated else _as_it_is
        for number, expert in enumerate(self.own):
            one, here = slice(expert, expert + 1), slice(number * self.rows, (number + 1) * self.rows)
            if self.weight_scale is not None:
                blocks = slice(columns.start // MXFP4_BLOCK, columns.stop // MXFP4_BLOCK)
                shape = (count, out, inputs // MXFP4_BLOCK)
                yield Slice(
                    f"{self.name}{BLOCKS}", (*shape, MXFP4_BLOCK // 2), self.weight[here], at=(one, rows, blocks, slice(None)),
                    arrange=lambda values: packing.tiled(in_rows(packing.packed(values[0].flatten(1)))),
                )  # fmt: skip
                yield Slice(
                    f"{self.name}{SCALES}", shape, self.weight_scale[here], at=(one, rows, blocks),
                    arrange=lambda values: self._tiled(in_rows(self._checked(values[0]))),
                )  # fmt: skip
            else:
                yield Slice(
                    self.name, (count, inputs, out), self.weight[here], at=(one, columns, rows),
                    arrange=lambda values: in_rows(values[0].t()),
                )  # fmt: skip
            if self.bias is not None:
                yield Slice(
                    f"{self.name}_bias", (count, out), self.bias[here], at=(one, rows), arrange=lambda values: in_rows(values[0])
                )

    def _gate_before_up(self, values: Tensor) -> Tensor:
        """[2 * n, ...], gate and up rows alternating -> gate rows, then up rows."""
        return torch.cat((values[0::2], values[1::2]))

    def _tiled(self, scales: Tensor) -> Tensor:
        assert self.weight_scale is not None
        return packing.tiled(F.pad(scales, (0, self.weight_scale.shape[1] - scales.shape[1])), packing.SCALES_IN_WORD)

    def _checked(self, scale: Tensor) -> Tensor:
        largest = int(scale.max())
        if largest > LARGEST_SCALE:
            too_large = f"kernels take values up to 6 * 2^{LARGEST_SCALE - 127}, and those of trained experts are far below"
            raise WeightError(
                f"{self.name}{SCALES} holds a scale of {largest}",
                why="that is NaN in e8m0" if largest == _NAN_SCALE else too_large, next="download the checkpoint again",
            )  # fmt: skip
        return scale


def _as_it_is(values: Tensor) -> Tensor:
    return values


class BiasedMoe(SparseMoe):
    """sum over a token's experts e of weight_e * (down_e(swiglu(gate_e(x), up_e(x))) + down_bias_e), where the weights are the
    softmax over the chosen experts' logits."""

    gate_up_proj: StackedExpertLinear  # type: ignore[assignment]
    down_proj: StackedExpertLinear  # type: ignore[assignment]

    def __init__(self, block: str, hidden_size: int, experts: Experts, layer: int, *, context: LayerContext) -> None:
        """block: the checkpoint's name of it."""
        nn.Module.__init__(self)  # all that SparseMoe holds is other tensors here
        self.config, self.context = experts, context
        moe_tp = context.moe_tp
        tp_index = context.group.rank % moe_tp
        own = shard.even("the number of experts", experts.count, context.expert_runs, context.expert_run)
        if experts.mxfp4:
            _require_mxfp4(hidden_size, experts, context)
            local = shard.in_runs("intermediate_size", experts.intermediate, MXFP4_BLOCK, moe_tp, tp_index)
        else:
            local = shard.even("intermediate_size", experts.intermediate, moe_tp, tp_index)
        self.router = BiasedRouter(f"{block}.router", experts.count, hidden_size, context=context)
        here = local_experts(own, experts.count, context)
        self.gate_up_proj, self.down_proj = (
            StackedExpertLinear(
                f"{block}.experts.{name}", experts, hidden_size, own=here, local=local, gated=gated,
                has_bias=gated or tp_index == 0, context=context,
            )
            for name, gated in (("gate_up_proj", True), ("down_proj", False))
        )  # fmt: skip
        self.shared_experts = None
        self.own_experts = own
        self._begin_placement()
        self.pattern = None
        if context.traffic is not None:
            self.pattern = TrafficPattern.power_law(experts.count, context.traffic, layer, context.device)

    def router_logits(self, x: Tensor) -> Tensor | RouterLogits:
        """x [T, hidden] -> [T, experts]."""
        logits: Tensor | RouterLogits = self.router(x)
        return logits

    @property
    def _bias(self) -> Tensor | None:
        return None

    def tensors(self) -> ExpertTensors:
        """This rank's experts as the kernels take them."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return ExpertTensors(
            len(self.local_experts), self.first_physical, gate_up.weight, down.weight, gate_up.weight_scale, down.weight_scale,
            gate_up_bias=gate_up.bias, down_bias=down.bias, swiglu=self.config.swiglu,
        )  # fmt: skip


def _require_mxfp4(hidden_size: int, experts: Experts, context: LayerContext) -> None:
    """Raise ModelError where the experts cannot be in MXFP4."""
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", experts.intermediate)):
        if size % MXFP4_BLOCK:
            raise ModelError(
                f"experts in MXFP4 have {name}={size}, no multiple of {MXFP4_BLOCK}", why=f"{MXFP4_BLOCK} values share a scale",
                next="check that config.json belongs to these weights",
            )  # fmt: skip
    if context.dtype == torch.float16:
        raise ModelError(
            "experts in MXFP4 cannot run in fp16", why="their scales exceed its range", next="use dtype='bf16'",
        )  # fmt: skip
