# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts feed-forward block (arXiv 2101.03961): a router, and experts of which each token reaches a few.

The ranks of a tensor-parallel group share the experts: moe_ep runs of experts, each split over tp / moe_ep ranks by its
intermediate features. Each rank adds up what its part of the experts gives; the all-reduce that ends the block completes the sum:
experts need no collective of their own. With several dp indices each has a part of the runs, and they exchange tokens
(`expert_exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.comm.one_sided import OneSided
from phalanx.comm.sequence_parallel import unshard
from phalanx.config.experts import Experts
from phalanx.errors import ModelError
from phalanx.kernels.moe.dispatch import experts_of, quantized_input, route, routed_experts, router_logits
from phalanx.kernels.moe.heuristics import BLOCK_K
from phalanx.kernels.moe.tensors import ExpertTensors, RouterLogits, Routing, TrafficPattern
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.models.batch import DpTokens
from phalanx.models.layers.expert_exchange import dispatched_experts, gathered_experts, one_sided_experts
from phalanx.models.layers.fp8 import Activation, NormAndQuantized, NormOutput, add_weight
from phalanx.models.layers.mlp import GatedMlp
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, Scale, Slice, Sliced, Stacked
from phalanx.plan import shard
from phalanx.plan.expert_placement import Placement, copies_table, default_placement


class ExpertNames(NamedTuple):
    """How a family's checkpoints name a block: itself, and the gate, up and down projections of an expert."""

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Router(Sliced):
    """x W^T in x's dtype, or in fp32 as if both were; weight [experts, hidden], complete on each rank, in no quantization.
    e_score_correction_bias [experts] fp32: what is added to scores for the choice, or None."""

    def __init__(self, name: str, experts: Experts, hidden_size: int, stacked_name: str, *, context: LayerContext) -> None:
        super().__init__()
        self.name, self.stacked_name, self.in_fp32 = name, stacked_name, experts.scoring is not None
        self.weight = context.weight(experts.count, hidden_size)
        self.e_score_correction_bias = context.weight(experts.count, dtype=torch.float32) if experts.scoring_bias else None

    def forward(self, x: Tensor) -> Tensor | RouterLogits:
        """x [T, hidden] -> logits [T, experts]."""
        return router_logits(x, self.weight, in_fp32=self.in_fp32)

    def slices(self) -> Iterator[Slice]:
        shape = (self.weight.shape[0], self.weight.shape[1])
        yield Slice(f"{self.name}.weight", shape, self.weight, stacked=Stacked(f"{self.stacked_name}.weight", shape))
        if self.e_score_correction_bias is not None:
            yield Slice(f"{self.name}.e_score_correction_bias", (shape[0],), self.e_score_correction_bias)


class ExpertLinear(Sliced):
    """One projection of each of this rank's experts, or two of the same input (gate and up): weight [experts * rows, inputs], the
    experts one below the other."""

    weight: Tensor

    def __init__(
        self, names: list[list[str]], out: int, inputs: int, *, local: range, dim: int, stacked_name: str,
        numbers: Sequence[int], count: int,
        context: LayerContext,
    ) -> None:  # fmt: skip
        """names: of each local expert's projections. out, inputs: of one projection, whole. local: the rows (dim 0) or columns
        (dim 1) of each that are here. numbers, count: the local experts, and how many the layer has."""
        super().__init__()
        self.names, self.shape, self.local, self.dim = names, (out, inputs), local, dim
        self.stacked_name, self.numbers, self.count = stacked_name, numbers, count
        self.others: list[str] = []
        """The projections of experts that other ranks have. They may move here, so a static scale of inputs covers them, too."""
        rows, columns = (len(local), inputs) if dim == 0 else (out, len(local))
        self.rows = rows
        every = [name for each in names for name in each]
        begin = local.start if dim == 1 else 0
        runs = [(local.start if dim == 0 else 0, rows)] * len(every)
        self.fp8 = add_weight(self, every, rows * len(every), columns, context=context, begin=begin, runs=runs)

    def slices(self) -> Iterator[Slice]:
        out, inputs = self.shape
        for number, (expert, part, name) in enumerate(self._parts()):
            here = slice(number * self.rows, (number + 1) * self.rows)
            scale = None if self.fp8 is None else self.fp8.scale_on_load(here)
            stacked = Stacked(
                self.stacked_name, (self.count, out * len(self.names[0]), inputs), self.numbers[expert],
                part * out if self.dim == 0 else 0,
            )  # fmt: skip
            yield Slice(f"{name}.weight", self.shape, self.weight[here], self.local.start, self.dim, scale, stacked)

    def scales(self) -> Iterator[Scale]:
        for number, (_, _, name) in enumerate(self._parts()):
            if self.fp8 is not None:
                here = slice(number * self.rows, (number + 1) * self.rows)
                of_name = self.local if self.dim == 0 else range(self.shape[0])
                yield from self.fp8.scales(name, self.shape, of_name, here)
        if self.fp8 is not None:
            yield from self.fp8.input_scales(self.others)

    def _parts(self) -> Iterator[tuple[int, int, str]]:
        """(local expert, projection, name) in the order of the weight's rows."""
        for expert, names in enumerate(self.names):
            for part, name in enumerate(names):
                yield expert, part, name


MAX_COPIES = 64
"""Of one expert that tokens are spread over; the kernel reads a row of a table of so many."""


def local_experts(own: range, count: int, context: LayerContext) -> tuple[int, ...]:
    """The experts whose weights a rank loads: its run of the `count` experts, and copies of those behind it."""
    more = context.redundant_experts // context.moe_ep
    return tuple((own.start + number) % count for number in range(len(own) + more))


class SparseMoe(nn.Module):
    """sum over a token's experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x)); and, where a family has shared experts, their
    MLP of x, which all ranks of the group split by its features."""

    def __init__(
        self, prefix: str, names: ExpertNames, hidden_size: int, experts: Experts, layer: int, *, context: LayerContext
    ) -> None:  # fmt: skip
        super().__init__()
        block_size = context.quantization.block if context.quantization is not None else None
        if block_size is not None and block_size[1] != BLOCK_K:
            raise ModelError(
                f"{prefix} has experts in FP8 with a scale for each {block_size[1]} columns", held=f"experts' GEMMs take {BLOCK_K}",
                next="use a checkpoint with blocks of 128 columns, or the 16-bit one with dtype='fp8'",
            )  # fmt: skip
        self.config, self.context = experts, context
        moe_tp = context.moe_tp
        own = shard.even("the number of experts", experts.count, context.expert_runs, context.expert_run)
        local = shard.even("moe_intermediate_size", experts.intermediate, moe_tp, context.group.rank % moe_tp)
        block, stacked = f"{prefix}.{names.block}", f"{prefix}.mlp"
        self.gate = Router(f"{block}.gate", experts, hidden_size, f"{stacked}.gate", context=context)
        here = local_experts(own, experts.count, context)
        each = [f"{block}.experts.{number}" for number in here]
        common = {"local": local, "numbers": here, "count": experts.count, "context": context}
        self.gate_up_proj = ExpertLinear(
            [[f"{name}.{names.gate}", f"{name}.{names.up}"] for name in each], experts.intermediate, hidden_size, dim=0,
            stacked_name=f"{stacked}.experts.gate_up_proj", **common,  # type: ignore[arg-type]
        )  # fmt: skip
        self.down_proj = ExpertLinear(
            [[f"{name}.{names.down}"] for name in each], hidden_size, experts.intermediate, dim=1,
            stacked_name=f"{stacked}.experts.down_proj", **common,  # type: ignore[arg-type]
        )  # fmt: skip
        self.shared_experts: GatedMlp | None = None
        if experts.shared:
            self.shared_experts = GatedMlp(f"{block}.shared_experts", hidden_size, experts.shared, bias=False, context=context)
        self.own_experts = own
        self._begin_placement()
        if context.moves_experts:
            others = [f"{block}.experts.{number}" for number in range(experts.count) if number not in self.local_experts]
            self.gate_up_proj.others = [f"{name}.{each}" for name in others for each in (names.gate, names.up)]
            self.down_proj.others = [f"{name}.{names.down}" for name in others]
        self.pattern: TrafficPattern | None = None
        if context.traffic is not None:
            self.pattern = TrafficPattern.power_law(experts.count, context.traffic, layer, context.device)

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
        if context.moves_experts:
            self._copies = min(context.redundant_experts + 1, MAX_COPIES)
            self.physical = torch.full((count, 1 + self._copies), -1, dtype=torch.int32, device=context.device)
            self.place(default_placement(count, context.moe_ep, context.redundant_experts))

    def place(self, placement: Placement) -> None:
        """From now on, in the order of the device's queue, tokens go to the physical experts of this placement."""
        assert self.physical is not None
        self.placement = placement
        first = self.first_physical
        self.local_experts = placement[first : first + len(self.local_experts)]
        rows = copies_table(placement, self.config.count)
        width = 1 + self._copies
        padded = [[min(row[0], self._copies), *(row[1:] + [-1] * width)[: self._copies]] for row in rows]
        self.physical.copy_(torch.tensor(padded, dtype=torch.int32))

    def expert_weights(self) -> list[Tensor]:
        """All that belongs to one expert, as bytes: views [physical experts of this rank, bytes]."""
        weights = [weight for each in (self.gate_up_proj, self.down_proj) for weight in each.parameters() if weight.dim()]
        return [weight.detach().view(len(self.local_experts), -1).view(torch.uint8) for weight in weights]

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it feeds the router in 16 bit, and the experts as they take it."""
        quantizes = self.context.dp.size == 1 or self.context.one_sided is not None
        norm.set_consumer(self.gate_up_proj.fp8 if quantizes else None, keep_norm=True)

    def forward(
        self, x: Tensor | NormAndQuantized, residual: Tensor, norm: RmsNorm | None, kv_slots: Tensor | None = None,
        dp_tokens: DpTokens | None = None,
    ) -> tuple[NormOutput, Tensor]:  # fmt: skip
        """x [T, hidden] -> as RowParallelLinear: (norm(residual + moe(x)), residual + moe(x)). kv_slots [T]: of the batch; padding
        (-1) reaches no expert. dp_tokens: see `Batch`."""
        group = self.context.group
        x, quantized = x if isinstance(x, NormAndQuantized) else (x, None)
        shared = None if self.shared_experts is None else self.shared_experts.partial_sum(self._for_shared(x, quantized))
        if dp_tokens is not None:
            total = self.exchanged(x, dp_tokens, quantized)
            total = total if shared is None else total.add_(shared)
        else:
            out = group.empty(*x.shape, dtype=x.dtype, device=x.device) if group.size > 1 else None
            total = self.partial_sum(x, out, quantized, kv_slots, shared)
        if norm is not None:
            return norm.unpack(group.all_reduce(total, norm.fusion(residual, accepts_sharded=True)))
        residual = unshard(residual, group) + group.all_reduce(total)
        return residual, residual

    def exchanged(self, x: Tensor, dp_tokens: DpTokens, quantized: Quantized | None = None) -> Tensor:
        """x [T, hidden] (and the same quantized), the tokens of this dp index -> what the experts of all indices give to them
        [T, hidden], of this rank's slice. Collective over dp: an index without tokens calls it, too."""
        dp, one_sided = self.context.dp, self.context.one_sided
        if one_sided is not None and self._goes_one_sided(dp_tokens.rows, one_sided):
            return one_sided_experts(x, quantized, dp_tokens, dp.rank, one_sided, self.config.count, self)
        if self.context.expert_exchange == "ALL_TO_ALL" and dp_tokens.padding is None:
            return dispatched_experts(x, dp, self.config.count, self)
        return gathered_experts(x, dp_tokens, dp, lambda rows, padding: self.partial_sum(rows, kv_slots=padding))

    def _goes_one_sided(self, rows: int, one_sided: OneSided) -> bool:
        """Whether a step in which each index sends `rows` rows takes the one-sided exchange: the same on all ranks."""
        table, experts = self.context.exchange_table, self.tensors()
        if rows > one_sided.max_rows or table is None:
            return rows <= one_sided.max_rows
        return table.lookup("e4m3" if experts.fp8_gemm else "16 bit", rows, experts.hidden).exchange == "ONE_SIDED"

    def router_logits(self, x: Tensor) -> Tensor | RouterLogits:
        """x [T, hidden] -> [T, experts], by the router, which has the checkpoint's name. It runs where experts are drawn, too, so
        that a benchmark has its time."""
        logits: Tensor | RouterLogits = self.gate(x)
        return logits

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        """x [T, hidden] -> each token's experts; none where `padding` [T] is given and negative."""
        experts = self.config
        if not len(x):
            return Routing(*(x.new_empty((0, experts.per_token), dtype=dtype) for dtype in (torch.float32, torch.int32)))
        return route(
            x, self.router_logits(x), self.tensors(), top_k=experts.per_token,
            num_experts=experts.count, renormalize=experts.renormalize, pattern=self.pattern,
            scoring=experts.scoring, bias=self._bias, kv_slots=padding,
        )  # fmt: skip

    def routed(self, x: Tensor | Quantized, routing: Routing) -> Tensor:
        """x [N, hidden], or what `payload` gives for it, with its routing -> what this rank's part of the experts gives
        [N, hidden]."""
        dtype = self.context.dtype
        return experts_of(x, self.tensors(), routing, num_experts=self.config.count, dtype=dtype, load=self.load)

    def payload(self, x: Tensor) -> Tensor | Quantized:
        """x [T, hidden] as the experts' GEMMs read it: quantized where they do that anyway."""
        return quantized_input(x, self.tensors())

    def partial_sum(
        self, x: Tensor, out: Tensor | None = None, quantized: Quantized | None = None, kv_slots: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [T, hidden] (and the same quantized) -> what this rank's part of the routed experts gives [T, hidden], in `out` where
        that is given. kv_slots [T]: see `forward`. shared [T, hidden]: of the shared experts, which is added."""
        experts = self.config
        logits = self.router_logits(x)
        total, _ = routed_experts(
            x, logits, self.tensors(), top_k=experts.per_token, num_experts=experts.count, renormalize=experts.renormalize,
            pattern=self.pattern, load=self.load, out=out, quantized=quantized, kv_slots=kv_slots, physical=self.physical,
            scoring=experts.scoring, bias=self._bias, plus=shared,
        )  # fmt: skip
        return total

    def _for_shared(self, x: Tensor, quantized: Quantized | None) -> Activation:
        """The input as the shared experts take it: the routed experts' quantized one where its scales do not come from them."""
        assert self.shared_experts is not None
        fp8 = self.shared_experts.gate_up_proj.fp8
        return quantized if quantized is not None and fp8 is not None and fp8.input_scale is None and fp8.fp8_gemm else x

    @property
    def _bias(self) -> Tensor | None:
        return getattr(self.gate, "e_score_correction_bias", None)

    def tensors(self) -> ExpertTensors:
        """This rank's experts as the kernels take them."""
        gate_up, down = self.gate_up_proj.fp8, self.down_proj.fp8
        if gate_up is None or down is None:
            return ExpertTensors(len(self.local_experts), self.first_physical, self.gate_up_proj.weight, self.down_proj.weight)
        block = gate_up.quantization.block
        in_fp8 = all(fp8.fp8_gemm or fp8.quantizes_groups for fp8 in (gate_up, down))
        return ExpertTensors(
            len(self.local_experts), self.first_physical, self.gate_up_proj.weight, self.down_proj.weight, gate_up.weight_scale,
            down.weight_scale, gate_up.input_scale, down.input_scale, down.begin % block[1] if block else 0, in_fp8,
        )  # fmt: skip
