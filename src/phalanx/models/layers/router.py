# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts: which experts a token reaches, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx import kernels
from phalanx.config.experts import Experts
from phalanx.kernels.moe.dispatch import route, router_logits, scaled
from phalanx.kernels.moe.tensors import ExpertChoice, ExpertTensors, RouterLogits, Routing, TrafficPattern
from phalanx.models.slices import LayerContext, Slice, Sliced, Stacked, TensorPart


class Router(Sliced):
    """x W^T + bias in x's dtype, or in fp32 as if all were; complete on each rank, in no quantization.

    weight [experts, hidden]. bias [experts], or None. e_score_correction_bias [experts] fp32: what is added to scores for the
    choice, or None. choice: how logits choose; for benchmarks, experts are drawn. input_scale [hidden]: of x, with
    1 / sqrt(hidden), or None; expert_scale [experts] fp32: of the weights of the chosen experts, or None; norm [hidden]: of what
    the routed experts read, or None (Gemma 4).
    """

    def __init__(self, prefix: str, experts: Experts, layer: int, *, context: LayerContext) -> None:
        """prefix: the checkpoint's name of the layer, whose number is `layer`."""
        super().__init__()
        (self.tensor,) = context.of_gemm(prefix, "router")
        self.in_fp32, count = experts.scoring is not None, experts.count
        self.batch_invariant = context.batch_invariant
        self.stem = self.tensor.name.removesuffix("weight")
        self.weight = context.weight(*self.tensor.shape, dtype=torch.float32 if self.tensor.kept == "fp32" else None)
        self.bias = context.weight(count) if f"{self.stem}bias" in context.declared else None
        own = (each for each in context.declared.values() if each.name.startswith(f"{prefix}."))
        self.correction = next((each for each in own if each.name.endswith("e_score_correction_bias")), None)
        self.e_score_correction_bias = None
        if self.correction is not None:
            self.e_score_correction_bias = context.weight(count, dtype=torch.float32)
        self.input_scale, self.expert_scale = (
            TensorPart(f"{prefix}.router.{name}", context=context) if f"{prefix}.router.{name}" in context.declared else None
            for name in ("scale", "per_expert_scale")
        )
        self.reads, norm = experts.reads, f"{prefix}.pre_feedforward_layernorm_2.weight"
        self.norm = TensorPart(norm, context=context) if self.reads == "normed" else None
        drawn = None
        if context.traffic is not None:
            drawn = TrafficPattern.power_law(count, context.traffic, layer, context.device)
        self.choice = ExpertChoice(
            experts.per_token, count, experts.renormalize, experts.scoring, self.e_score_correction_bias, drawn
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor | RouterLogits:
        """x [T, hidden] -> logits [T, experts]. It runs where experts are drawn, too, so that a benchmark has its time."""
        if self.input_scale is not None:
            x = x * (self.input_scale.weight * x.shape[-1] ** -0.5)
        return router_logits(x, self.weight, self.bias, in_fp32=self.in_fp32, batch_invariant=self.batch_invariant)

    def experts_read(self, x: Tensor) -> Tensor:
        """x [T, hidden], the input of the block -> what the routed experts read of it, as `Experts.reads` says. The weight of a
        token's only expert is renormalized, to 1, so that it multiplies once."""
        if self.norm is not None:
            return x * self.norm.weight
        if self.reads == "weighted":
            return x * kernels.linear_fp32(x, self.weight).amax(-1, keepdim=True).sigmoid().to(x.dtype)
        return x

    def scale_of(self, expert_of: Tensor | None) -> Tensor | None:
        """What multiplies the weights of each physical expert, [physical experts] fp32; expert_of: the expert of each, or None."""
        scale = None if self.expert_scale is None else self.expert_scale.weight
        return scale if scale is None or expert_of is None else scale.index_select(0, expert_of)

    def route(self, x: Tensor, experts: ExpertTensors, padding: Tensor | None = None) -> Routing:
        """x [T, hidden] -> each token's experts; none where `padding` [T] is given and negative. experts: of this rank."""
        if not len(x):
            shape = 0, self.choice.top_k
            return Routing(*(x.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.int32)))
        routing, scale = route(x, self(x), experts, self.choice, padding), self.scale_of(None)
        return routing if scale is None else scaled(routing, scale)

    def slices(self) -> Iterator[Slice]:
        if self.bias is not None:
            yield Slice(f"{self.stem}bias", self.tensor.shape[:1], self.bias)
        for tensor, weight in ((self.tensor, self.weight), (self.correction, self.e_score_correction_bias)):
            if tensor is not None and weight is not None:
                yield Slice(tensor.name, tensor.shape, weight.view(tensor.shape), stacked=Stacked.of(tensor))
