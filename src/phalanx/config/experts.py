# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture-of-experts model, as its config.json gives them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.config.json_fields import JsonFields
from phalanx.errors import LayoutError, ModelError


class ClampedSwiGlu(NamedTuple):
    """The activation of gpt-oss's experts: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within
    +-limit."""

    alpha: float
    limit: float


class Scoring(NamedTuple):
    """How a router's logits, which are fp32 here, choose experts: by the `function` of all of them, plus a bias where the
    router has one, of the best `top_groups` of `groups` runs of experts. A group's score is its best expert's, or (sigmoid) the sum
    of its best two. The chosen weights have no bias; `scale` multiplies them, after they are renormalized or not."""

    function: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Experts:
    """The experts of the layers that have them; `dense_layers` have one dense MLP of the model's intermediate_size instead.

    count: routed experts; per_token: how many of them a token reaches. intermediate: width of one. shared: width of the experts
    that every token reaches, all together; 0 for none. renormalize: a token's weights are divided by their sum. scoring_bias: a
    bias of the router's scores (V3); biases: of router and GEMMs (gpt-oss). mxfp4: the routed experts' weights are stored in 4 bits
    with a scale of 8 for each 32. swiglu: their activation where it is not silu(gate) * up. scoring: of routers in fp32; None: the
    logits are in the model's dtype, and their softmax chooses.
    """

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring_bias: bool = False
    biases: bool = False
    mxfp4: bool = False
    renormalize: bool = True
    swiglu: ClampedSwiGlu | None = None
    scoring: Scoring | None = None

    def touched(self, tokens: float) -> float:
        """Distinct experts that so many tokens reach, on average, each routed uniformly: E (1 - (1 - k/E)^T)."""
        return float(self.count * (1 - (1 - self.per_token / self.count) ** tokens))


def require_places(experts: int, ranks: int, redundant: int) -> None:
    """Raise LayoutError where `redundant` copies cannot be added to a layer's experts: each rank has as many as any other."""
    if ranks < 1 or experts % ranks:
        raise LayoutError(
            f"{experts} experts cannot be divided evenly among {ranks} ranks", why="each rank has as many as any other"
        )
    most = experts * (ranks - 1)
    if redundant < 0 or redundant % ranks or redundant > most:
        raise LayoutError(
            f"redundant_experts={redundant} is not possible with {experts} experts over {ranks} ranks",
            why="each rank has as many as any other, and no two copies of one expert",
            next=f"use a multiple of {ranks}, at most {most}" if ranks > 1 else "leave it out: all experts are on one rank",
        )  # fmt: skip


def read_mixtral(fields: JsonFields) -> Experts:
    """Mixtral's fields. transformers 5 writes num_experts where earlier versions write num_local_experts."""
    count = fields.count("num_local_experts", fields.count("num_experts", 8))
    return _checked(fields, Experts(count, fields.count("num_experts_per_tok", 2), fields.count("intermediate_size")))


def read_qwen3_moe(fields: JsonFields) -> Experts:
    """Qwen3-MoE's fields. A layer is dense if mlp_only_layers names it or decoder_sparse_step passes over it. norm_topk_prob is
    false where the file does not have it, as in the reference implementation."""
    step, num_layers = fields.count("decoder_sparse_step", 1), fields.count("num_hidden_layers")
    named = set(fields.values.get("mlp_only_layers") or ())
    passed = tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
    return _checked(fields, Experts(
        fields.count("num_experts", fields.count("num_local_experts", 128)), fields.count("num_experts_per_tok", 8),
        fields.count("moe_intermediate_size", 768), dense_layers=passed, renormalize=fields.flag("norm_topk_prob", False),
    ))  # fmt: skip


def read_gpt_oss(fields: JsonFields) -> Experts:
    """gpt-oss's fields. The softmax is over a token's chosen experts, which is that over all of them, renormalized."""
    quantization = fields.optional_mapping("quantization_config") or {}
    swiglu = ClampedSwiGlu(fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0))
    return _checked(fields, Experts(
        fields.count("num_local_experts", fields.count("num_experts", 128)), fields.count("num_experts_per_tok", 4),
        fields.count("intermediate_size", 2880), biases=True, mxfp4=quantization.get("quant_method") == "mxfp4", swiglu=swiglu,
    ))  # fmt: skip


def read_deepseek_v2(fields: JsonFields) -> Experts:
    """DeepSeek-V2's fields: a softmax over all experts, and the best ones, or the best of the best groups by their best expert."""
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise _unknown(fields, "topk_method", "greedy and group_limited_greedy")
    if fields.text("scoring_func", "softmax") != "softmax":
        raise _unknown(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob", False):
        raise ModelError(
            f"{fields.file} has norm_topk_prob=true", held="the released checkpoints of DeepSeek-V2 have false",
            why="the reference implementations disagree about what it means there",
        )  # fmt: skip
    grouped = method == "group_limited_greedy"
    scoring = Scoring(
        "softmax", fields.count("n_group", 1) if grouped else 1, fields.count("topk_group", 1) if grouped else 1,
        fields.positive("routed_scaling_factor", 1.0),
    )  # fmt: skip
    return _deepseek(fields, scoring, experts=64, width=1407, shared=2, dense=0, top_k=6)


def read_deepseek_v3(fields: JsonFields) -> Experts:
    """DeepSeek-V3's fields: sigmoids, with a bias that only chooses (arXiv 2408.15664), in the best groups by their best two."""
    for name, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if fields.text(name, value) != value:
            raise _unknown(fields, name, value)
    scoring = Scoring(
        "sigmoid", fields.count("n_group", 8), fields.count("topk_group", 4), fields.positive("routed_scaling_factor", 2.5)
    )
    return _deepseek(
        fields, scoring, experts=256, width=2048, shared=1, dense=3, top_k=8, bias=True,
        renormalize=fields.flag("norm_topk_prob", True),
    )  # fmt: skip


def _deepseek(
    fields: JsonFields, scoring: Scoring, *, experts: int, width: int, shared: int, dense: int, top_k: int, bias: bool = False,
    renormalize: bool = False,
) -> Experts:  # fmt: skip
    """What V2 and V3 have in common. The numbers are the defaults of the reference implementation."""
    count, per_token = fields.count("n_routed_experts", experts), fields.count("num_experts_per_tok", top_k)
    width, frequency = fields.count("moe_intermediate_size", width), fields.count("moe_layer_freq", 1)
    first = int(fields.number("first_k_dense_replace", dense))
    size = count // scoring.groups
    if count % scoring.groups or scoring.top_groups > scoring.groups or (bias and size < 2):
        raise ModelError(
            f"{fields.file} has n_group={scoring.groups} and topk_group={scoring.top_groups} for {count} experts",
            why="groups are of equal size" + (", of 2 experts at least," if bias else "") + " and no more than all are chosen",
        )  # fmt: skip
    if per_token > scoring.top_groups * size:
        raise ModelError(
            f"{fields.file} has num_experts_per_tok={per_token}",
            why=f"topk_group={scoring.top_groups} groups of {size} have fewer experts",
        )  # fmt: skip
    return _checked(fields, Experts(
        count, per_token, width, shared=width * int(fields.values.get("n_shared_experts", shared) or 0),
        dense_layers=tuple(i for i in range(fields.count("num_hidden_layers")) if i < first or i % frequency),
        scoring_bias=bias, renormalize=renormalize, scoring=scoring,
    ))  # fmt: skip


def _unknown(fields: JsonFields, name: str, known: str) -> ModelError:
    return ModelError(
        f"{fields.file} has {name}={fields.values.get(name)!r}, which is not supported", held=f"supported here: {known}"
    )


def _checked(fields: JsonFields, experts: Experts) -> Experts:
    if experts.per_token > experts.count:
        raise ModelError(
            f"{fields.file} has num_experts_per_tok={experts.per_token}", held=f"the model has {experts.count} experts",
            why="a token reaches distinct experts",
        )  # fmt: skip
    return experts
