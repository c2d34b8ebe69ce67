# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts feed-forward block (arXiv 2101.03961): a router, a method by which experts are multiplied, and an exchange
of tokens.

The ranks of a tensor-parallel group share the experts: moe_ep runs of experts, each split over tp / moe_ep ranks by its
intermediate features. Each rank adds up what its part of the experts gives; the all-reduce that ends the block completes the sum:
experts need no collective of their own. With several dp indices each has a part of the runs, and they exchange tokens
(`expert_exchange`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.experts import Experts
from phalanx.kernels.gated_delta.dispatch import sigmoid_mul
from phalanx.kernels.moe.dispatch import experts_of, quantized_input, routed_experts
from phalanx.kernels.moe.tensors import ExpertTensors, Routing
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.layout import shard
from phalanx.layout.expert_placement import Placement, copies_table, default_placement
from phalanx.models.batch import Batch, DpTokens
from phalanx.models.layers.activation import Activation, NormAndQuantized, NormOutput
from phalanx.models.layers.expert_exchange import ExpertExchange
from phalanx.models.layers.expert_methods.choose import expert_method
from phalanx.models.layers.mlp import Mlp, mlp_of
from phalanx.models.layers.norm import RmsNorm, all_reduce_norm
from phalanx.models.layers.router import Router
from phalanx.models.slices import LayerContext, TensorPart

MAX_COPIES = 64
"""Of one expert that tokens are spread over; the kernel reads a row of a table of so many."""


def local_experts(own: range, count: int, context: LayerContext) -> tuple[int, ...]:
    """The experts whose weights a rank loads: its run of the `count` experts, and copies of those behind it."""
    more = context.redundant_experts // context.moe_ep
    return tuple((own.start + number) % count for number in range(len(own) + more))


class SparseMoe(nn.Module):
    """sum over a token's experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x)), or another activation, with or without a gate;
    and, where a family has shared experts, their MLP of x, which all ranks of the group split by its features, times the sigmoid of
    a gate or not.

    The routed experts read `Router.experts_read` of x."""

    def __init__(
        self, prefix: str, experts: Experts, layer: int, *, multiplier: float = 1.0, context: LayerContext
    ) -> None:  # fmt: skip
        """prefix: the checkpoint's name of the layer. multiplier: of what the block adds to the residual stream (Granite)."""
        super().__init__()
        self.config, self.context, self.multiplier = experts, context, multiplier
        self.own_experts = shard.even("the number of experts", experts.count, context.expert_runs, context.expert_run)
        self._begin_placement()
        self.router = Router(prefix, experts, layer, context=context)
        self.experts = expert_method(prefix, self.local_experts, experts, context)
        self.exchange = ExpertExchange(experts.count, context)
        self.shared_experts: Mlp | None = None
        self.shared_gate: TensorPart | None = None
        if experts.shared and not experts.beside_mlp:
            name = context.of_gemm(prefix, "shared_gate_up")[0].name.rsplit(".", 2)[0]
            self.shared_experts = mlp_of("silu" if experts.gated else "relu2", name, context=context)
            self.shared_gate = TensorPart(f"{name}_gate.weight", context=context) if experts.shared_gate else None

    def _begin_placement(self) -> None:
        context, count = self.context, self.config.count
        self.local_experts = local_experts(self.own_experts, count, context)
        """Those whose weights are here: of each physical expert of this rank."""
        self.first_physical = self.own_experts.start // len(self.own_experts) * len(self.local_experts)
        self.load = torch.zeros(len(self.local_experts), dtype=torch.int64, device=context.device)
        """Pairs of a token and one of its experts, for each physical expert of this rank, since the start."""
        self.physical: Tensor | None = None
        """[experts, 1 + copies] int32: where experts are, see `kernels.moe.reference.physical_ids`; captured graphs read it. None
        where they never move."""
        self._expert_of: Tensor | None = None
        """[physical experts] int64: the expert of each, on the device, where `placement` changes and captured graphs read it."""
        if context.moves_experts:
            self._copies = min(context.redundant_experts + 1, MAX_COPIES)
            self.physical = torch.full((count, 1 + self._copies), -1, dtype=torch.int32, device=context.device)
            placement = default_placement(count, context.moe_ep, context.redundant_experts)
            self._expert_of = torch.zeros(len(placement), dtype=torch.int64, device=context.device)
            self.place(placement)

    def place(self, placement: Placement) -> None:
        """From now on, in the order of the device's queue, tokens go to the physical experts of this placement."""
        assert self.physical is not None
        assert self._expert_of is not None
        self.placement = placement
        first = self.first_physical
        self.local_experts = placement[first : first + len(self.local_experts)]
        rows = copies_table(placement, self.config.count)
        width = 1 + self._copies
        padded = [[min(row[0], self._copies), *(row[1:] + [-1] * width)[: self._copies]] for row in rows]
        self.physical.copy_(torch.tensor(padded, dtype=torch.int32))
        self._expert_of.copy_(torch.tensor(placement))

    def expert_weights(self) -> list[Tensor]:
        """All that belongs to one expert, as bytes: views [physical experts of this rank, bytes]."""
        return self.experts.by_expert(len(self.local_experts))

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it feeds the router in 16 bit, and the experts as they take it."""
        takes = self.exchange.takes_quantized and self.config.reads == "input"
        norm.set_quantizer(self.experts.input_quantizer if takes else None, keep_norm=True)

    def forward(
        self, x: Tensor | NormAndQuantized, residual: Tensor, norm: RmsNorm | None, batch: Batch
    ) -> tuple[NormOutput, Tensor]:  # fmt: skip
        """x [T, hidden] -> as RowParallelLinear: (norm(residual + moe(x)), residual + moe(x)). Padding reaches no expert."""
        group = self.context.group
        x, quantized = x if isinstance(x, NormAndQuantized) else (x, None)
        shared = None if self.shared_experts is None else self.shared_experts.partial_sum(self._for_shared(x, quantized))
        if shared is not None and self.shared_gate is not None:
            shared = sigmoid_mul(shared, kernels.linear(x, self.shared_gate.weight))
        total = self.rank_sum(x, batch, quantized, shared)
        if self.multiplier != 1.0:
            total.mul_(self.multiplier)
        return all_reduce_norm(total, residual, norm, group)

    def rank_sum(
        self, x: Tensor, batch: Batch, quantized: Quantized | None = None, shared: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """x [T, hidden] (and the same quantized) -> what this rank adds to the routed experts' sum [T, hidden], plus `shared`."""
        group = self.context.group
        if batch.dp_tokens is not None:
            total = self.exchanged(x, batch.dp_tokens, quantized)
            return total if shared is None else total.add_(shared)
        out = group.empty(*x.shape, dtype=x.dtype, device=x.device) if group.size > 1 else None
        return self.partial_sum(x, out, quantized, batch.kv_slots, shared)

    def exchanged(self, x: Tensor, dp_tokens: DpTokens, quantized: Quantized | None = None) -> Tensor:
        """x [T, hidden] (and the same quantized), the tokens of this dp index -> what the experts of all indices give to them
        [T, hidden], of this rank's slice. Collective over dp: an index without tokens calls it, too."""
        return self.exchange(x, quantized, dp_tokens, self)

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        """x [T, hidden] -> each token's experts; none where `padding` [T] is given and negative."""
        return self.router.route(x, self.tensors(), padding)

    def routed(self, x: Tensor | Quantized, routing: Routing) -> Tensor:
        """x [N, hidden], or what `payload` gives for it, with its routing -> what this rank's part of the experts gives
        [N, hidden]."""
        dtype = self.context.dtype
        x = self.router.experts_read(x) if isinstance(x, Tensor) else x
        return experts_of(x, self.tensors(), routing, num_experts=self.config.count, dtype=dtype, load=self.load)

    def payload(self, x: Tensor) -> Tensor | Quantized:
        """x [T, hidden] as `routed` takes it: quantized where the experts' GEMMs do that anyway."""
        tensors = self.tensors()
        if not tensors.fp8_gemm:
            return x
        quantized = quantized_input(self.router.experts_read(x), tensors)
        return x if isinstance(quantized, Tensor) else quantized

    def partial_sum(
        self, x: Tensor, out: Tensor | None = None, quantized: Quantized | None = None, kv_slots: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [T, hidden] (and the same quantized) -> what this rank's part of the routed experts gives [T, hidden], in `out` where
        that is given. kv_slots [T]: negative for padding. shared [T, hidden]: of the shared experts, which is added."""
        total, _ = routed_experts(
            self.router.experts_read(x), self.router(x), self.tensors(), self.router.choice, load=self.load, out=out,
            quantized=quantized, kv_slots=kv_slots, physical=self.physical, plus=shared,
            expert_scale=self.router.scale_of(self._expert_of),
        )  # fmt: skip
        return total

    def _for_shared(self, x: Tensor, quantized: Quantized | None) -> Activation:
        """The input as the shared experts take it: the routed experts' quantized one where its scales do not come from them."""
        assert self.shared_experts is not None
        quantizer = self.shared_experts.first.method.input_quantizer
        return quantized if quantized is not None and quantizer is not None and quantizer.scale is None else x

    def tensors(self) -> ExpertTensors:
        """This rank's experts as the kernels take them."""
        return self.experts.tensors(self.first_physical)
