# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture-of-experts model, as its config.json gives them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from phalanx.config.json_fields import JsonFields
from phalanx.config.mamba import read_blocks
from phalanx.errors import LayoutError, ModelError


class ClampedSwiGlu(NamedTuple):
    """The activation of gpt-oss's experts: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within
    +-limit."""

    alpha: float
    limit: float


class Scoring(NamedTuple):
    """How a router's logits, which are fp32 here, choose experts: by the `function` of all of them, plus a bias where the
    router has one, of the best `top_groups` of `groups` runs of experts. A group's score is its best expert's, or (sigmoid) the sum
    of its best two. The chosen weights have no bias; `scale` multiplies them, after they are renormalized or not. floor: what they
    are divided by at least (Ernie), since a bias may choose experts whose softmax is next to 0."""

    function: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    floor: float = 0.0


@dataclass(frozen=True)
class Experts:
    """The experts of the layers that have them; `dense_layers` have one dense MLP of the model's intermediate_size instead.

    count: routed experts; per_token: how many of them a token reaches. intermediate: width of one. shared: width of the experts
    that every token reaches, all together; 0 for none. renormalize: a token's weights are divided by their sum. scoring_bias: a
    bias of the router's scores (V3); biases: of router and GEMMs (gpt-oss). swiglu: their activation where it is not
    silu(gate) * up. scoring: of routers in fp32; None: the logits are in the model's dtype, and their softmax chooses. shared_gate:
    what the shared experts give is multiplied by the sigmoid of a gate. gated: all have a gate; else they are relu(up)^2.
    reads: what the routed experts read: the input of the block; "normed", that times the weight of a norm of their own (Gemma 4);
    or "weighted", that times the token's weight, which then multiplies nothing else (Llama-4). gelu: the gates' activation is GELU
    by tanh, not SiLU. beside_mlp: the layer's MLP, whose width `shared` is, stands beside them (Gemma 4).
    """

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring_bias: bool = False
    biases: bool = False
    renormalize: bool = True
    swiglu: ClampedSwiGlu | None = None
    scoring: Scoring | None = None
    shared_gate: bool = False
    gated: bool = True
    reads: Literal["input", "normed", "weighted"] = "input"
    gelu: bool = False
    beside_mlp: bool = False

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
    """Mixtral's fields."""
    return _experts(fields, 8, 2, fields.count("intermediate_size"))


def read_minimax_m2(fields: JsonFields) -> Experts:
    """MiniMax-M2's fields: sigmoids, with a bias that only chooses; the chosen ones' weights are divided by their sum."""
    if any(kind != 1 for kind in fields.value("attn_type_list") or ()):
        raise _unknown(fields, "attn_type_list", "1 for each layer, which is full attention")
    return _experts(fields, 256, 8, fields.count("intermediate_size"), scoring_bias=True, scoring=Scoring("sigmoid"))


def read_hy_v3(fields: JsonFields) -> Experts:
    """Hy3's fields: as MiniMax-M2 chooses, then a scale; a layer is dense by mlp_layer_types, the first one by default."""
    width, shared = fields.count("moe_intermediate_size", 1536), int(fields.number("num_shared_experts", 1))
    return _experts(
        fields, 192, 8, width, shared=width * shared, dense_layers=_stated_dense(fields), scoring_bias=True,
        scoring=Scoring("sigmoid", scale=fields.positive("router_scaling_factor", 2.826)),
    )  # fmt: skip


def read_llama4(fields: JsonFields) -> Experts:
    """Llama-4's fields: the best expert of each token, whose input is multiplied by the sigmoid of its logit, beside a shared one;
    in the layers of moe_layers, or in every interleave_moe_layer_step-th."""
    layers, width = fields.count("num_hidden_layers"), fields.count("intermediate_size", 8192)
    step, stated = fields.count("interleave_moe_layer_step", 1), fields.value("moe_layers")
    sparse = range(step - 1, layers, step) if stated is None else stated
    experts = _experts(
        fields, 16, 1, width, names=("num_local_experts",), shared=width, scoring=Scoring("sigmoid"), reads="weighted",
        dense_layers=tuple(layer for layer in range(layers) if layer not in sparse),
    )  # fmt: skip
    if experts.per_token > 1:
        raise ModelError(
            f"{fields.file} has num_experts_per_tok={experts.per_token}", held="supported is 1, as in all released checkpoints",
            why="a token's weight multiplies the input of its expert",
        )  # fmt: skip
    return experts


def read_ernie_moe(fields: JsonFields) -> Experts:
    """Ernie 4.5's fields: a softmax over all experts, with a bias that only chooses, renormalized; a layer is dense by
    mlp_layer_types (of the text of Ernie 4.5 VL), or experts are in every moe_layer_interval-th layer from moe_layer_start_index to
    moe_layer_end_index, -1 for the last."""
    width, layers = fields.count("moe_intermediate_size", 1536), fields.count("num_hidden_layers")
    start, interval = int(fields.number("moe_layer_start_index", 1)), fields.count("moe_layer_interval", 1)
    end = int(fields.number("moe_layer_end_index", -1))
    end = layers - 1 if end == -1 else end
    dense = tuple(layer for layer in range(layers) if not start <= layer <= end or (layer + 1) % interval)
    return _experts(
        fields, 64, 6, width, names=("moe_num_experts", "num_experts"), per_token_names=("moe_k", "num_experts_per_tok"),
        shared=width * int(fields.number("moe_num_shared_experts", 2)), scoring_bias=True,
        scoring=Scoring(floor=fields.positive("moe_norm_min", 1e-12)),
        dense_layers=dense if fields.value("mlp_layer_types") is None else _stated_dense(fields),
    )  # fmt: skip


def read_qwen3_moe(fields: JsonFields) -> Experts:
    """Qwen3-MoE's fields. norm_topk_prob is false where the file does not have it, as in the reference implementation."""
    return _experts(
        fields, 128, 8, fields.count("moe_intermediate_size", 768), dense_layers=_passed_over(fields),
        renormalize=fields.flag("norm_topk_prob", False),
    )  # fmt: skip


def read_qwen3_next(fields: JsonFields) -> Experts:
    """Qwen3-Next's fields: those of Qwen3-MoE with other defaults, and a shared expert with a gate."""
    return _with_shared_expert(fields, 512, 10, dense_layers=_passed_over(fields), renormalize=fields.flag("norm_topk_prob", True))


def read_qwen3_5_moe(fields: JsonFields) -> Experts:
    """Qwen3.5's fields: experts in every layer, whose weights are renormalized always, and a shared expert with a gate."""
    return _with_shared_expert(fields, 256, 8)


def _with_shared_expert(fields: JsonFields, count: int, per_token: int, **traits: Any) -> Experts:
    width, shared = fields.count("moe_intermediate_size", 512), fields.count("shared_expert_intermediate_size", 512)
    return _experts(fields, count, per_token, width, names=("num_experts",), shared=shared, shared_gate=True, **traits)


def _passed_over(fields: JsonFields) -> tuple[int, ...]:
    """The dense layers: those that mlp_only_layers names, or decoder_sparse_step passes over."""
    step, named = fields.count("decoder_sparse_step", 1), set(fields.value("mlp_only_layers") or ())
    return tuple(layer for layer in range(fields.count("num_hidden_layers")) if layer in named or (layer + 1) % step)


SHARED_WIDTH = 1024
"""shared_intermediate_size by default (Granite 4)."""


def read_granite_hybrid(fields: JsonFields) -> Experts | None:
    """Granite 4's fields; None without experts. A token's softmax is over its chosen experts, which is that over all, renormalized;
    what all tokens reach has no gate."""
    if fields.value("num_local_experts") == 0:
        return None
    shared = fields.count("shared_intermediate_size", SHARED_WIDTH)
    return _experts(fields, 8, 2, fields.count("intermediate_size", 11008), names=("num_local_experts",), shared=shared)


def read_nemotron_h(fields: JsonFields) -> Experts | None:
    """Nemotron-H's fields: as DeepSeek-V3 chooses; of shared experts the width of all is stated. None without experts."""
    blocks = read_blocks(fields)
    if "experts" not in blocks:
        return None
    shared = fields.count("moe_shared_expert_intermediate_size", 7688)
    return _require_groups(fields, _experts(
        fields, 8, 2, fields.count("moe_intermediate_size", 7688), names=("n_routed_experts", "num_local_experts"), shared=shared,
        scoring_bias=True, renormalize=fields.flag("norm_topk_prob", True), scoring=_sigmoids(fields, 1, 1, 1.0), gated=False,
        dense_layers=tuple(layer for layer, block in enumerate(blocks) if block != "experts"),
    ))  # fmt: skip


def read_gemma4(fields: JsonFields) -> Experts | None:
    """Gemma 4's fields; None without experts. A softmax over all experts, renormalized; the MLP of every layer stands beside
    them."""
    if not fields.flag("enable_moe_block", False):
        return None
    width = fields.count("moe_intermediate_size")
    return _experts(
        fields, fields.count("num_experts"), fields.count("top_k_experts"), width, names=("num_experts",),
        per_token_names=("top_k_experts",), shared=fields.count("intermediate_size"), scoring=Scoring(), gelu=True,
        reads="normed", beside_mlp=True,
    )  # fmt: skip


def read_gpt_oss(fields: JsonFields) -> Experts:
    """gpt-oss's fields. The softmax is over a token's chosen experts, which is that over all of them, renormalized."""
    swiglu = ClampedSwiGlu(fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0))
    return _experts(fields, 128, 4, fields.count("intermediate_size", 2880), biases=True, swiglu=swiglu)


def read_deepseek_v2(fields: JsonFields) -> Experts:
    """DeepSeek-V2's fields: a softmax over all experts, and the best ones, or the best of the best groups by their best expert."""
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise _unknown(fields, "topk_method", "greedy and group_limited_greedy")
    if fields.flag("norm_topk_prob", False):
        raise ModelError(
            f"{fields.file} has norm_topk_prob=true", held="the released checkpoints of DeepSeek-V2 have false",
            why="the reference implementations disagree about what it means there",
        )  # fmt: skip
    groups = (fields.count("n_group", 1), fields.count("topk_group", 1)) if method == "group_limited_greedy" else (1, 1)
    scoring = Scoring("softmax", *groups, fields.positive("routed_scaling_factor", 1.0))
    return _deepseek(fields, scoring, experts=64, width=1407, shared=2, dense=0, top_k=6)


def read_deepseek_v3(fields: JsonFields) -> Experts:
    """DeepSeek-V3's fields: sigmoids, with a bias that only chooses (arXiv 2408.15664), in the best groups by their best two."""
    return _deepseek(fields, _sigmoids(fields, 8, 4, 2.5), experts=256, width=2048, shared=1, dense=3, top_k=8)


def read_deepseek_v32(fields: JsonFields) -> Experts:
    """DeepSeek-V3.2's fields: those of V3; a layer is dense by mlp_layer_types where there is one."""
    return _sparse_deepseek(fields, _sigmoids(fields, 8, 4, 2.5))


def read_glm_moe_dsa(fields: JsonFields) -> Experts:
    """GLM-5's fields: those of DeepSeek-V3.2, without groups by default."""
    return _sparse_deepseek(fields, _sigmoids(fields, 1, 1, 2.5))


def _sparse_deepseek(fields: JsonFields, scoring: Scoring) -> Experts:
    stated = fields.value("mlp_layer_types") is not None
    dense = _stated_dense(fields) if stated else 3
    return _deepseek(fields, scoring, experts=256, width=2048, shared=1, dense=dense, top_k=8)


def read_glm4_moe(fields: JsonFields) -> Experts:
    """GLM-4.5's fields: those of DeepSeek-V3, with other defaults."""
    return _deepseek(fields, _sigmoids(fields, 1, 1, 1.0), experts=128, width=1408, shared=1, dense=1, top_k=8)


def read_glm4_moe_lite(fields: JsonFields) -> Experts:
    """GLM-4.7-Flash's fields: those of GLM-4.5; a layer is dense by mlp_layer_types, the first one by default."""
    return _deepseek(
        fields, _sigmoids(fields, 1, 1, 1.8), experts=64, width=1536, shared=1, top_k=4, dense=_stated_dense(fields)
    )  # fmt: skip


def read_mistral4(fields: JsonFields) -> Experts:
    """Mistral Small 4's fields: a softmax over all experts, renormalized, beside shared ones."""
    scoring = Scoring(scale=fields.positive("routed_scaling_factor", 1.0))
    experts = _deepseek(fields, scoring, experts=128, width=2048, shared=1, dense=0, top_k=4)
    return replace(experts, renormalize=fields.flag("norm_topk_prob", True))


def _stated_dense(fields: JsonFields) -> tuple[int, ...]:
    """The layers that are dense by mlp_layer_types, the first one by default."""
    kinds = fields.by_layer("mlp_layer_types", ("dense", "sparse")) or ["dense"]
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def _sigmoids(fields: JsonFields, groups: int, top_groups: int, scale: float) -> Scoring:
    """The numbers are defaults."""
    return Scoring(
        "sigmoid", fields.count("n_group", groups), fields.count("topk_group", top_groups),
        fields.positive("routed_scaling_factor", scale),
    )  # fmt: skip


def _deepseek(
    fields: JsonFields, scoring: Scoring, *, experts: int, width: int, shared: int,
    dense: int | tuple[int, ...], top_k: int,
) -> Experts:  # fmt: skip
    """What V2, V3, GLM and Mistral have in common. The numbers are the defaults of the reference implementation. Sigmoids have a
    bias, and renormalize by default; a softmax does not. dense: the dense layers, or how many there are by default before all
    others. Where the family has moe_layer_freq, only each such layer of these has experts."""
    bias, other = scoring.function == "sigmoid", "num_experts" if fields.reads("num_experts") else "num_local_experts"
    width = fields.count("moe_intermediate_size", width)
    if isinstance(dense, int):
        frequency = fields.count("moe_layer_freq", 1) if fields.reads("moe_layer_freq") else 1
        first = int(fields.number("first_k_dense_replace", dense))
        dense = tuple(i for i in range(fields.count("num_hidden_layers")) if i < first or i % frequency)
    shared = int(fields.number("n_shared_experts", 0 if "n_shared_experts" in fields.values else shared))
    result = _experts(
        fields, experts, top_k, width, names=("n_routed_experts", other),
        shared=width * shared, scoring_bias=bias, renormalize=bias and fields.flag("norm_topk_prob", True), scoring=scoring,
        dense_layers=dense,
    )  # fmt: skip
    return _require_groups(fields, result)


def _require_groups(fields: JsonFields, result: Experts) -> Experts:
    """Raise ModelError where the groups of experts cannot be chosen from."""
    scoring, bias = result.scoring, result.scoring_bias
    assert scoring is not None
    size = result.count // scoring.groups
    if result.count % scoring.groups or scoring.top_groups > scoring.groups or (bias and size < 2):
        raise ModelError(
            f"{fields.file} has n_group={scoring.groups} and topk_group={scoring.top_groups} for {result.count} experts",
            why="groups are of equal size" + (", of 2 experts at least," if bias else "") + " and no more than all are chosen",
        )  # fmt: skip
    if result.per_token > scoring.top_groups * size:
        raise ModelError(
            f"{fields.file} has num_experts_per_tok={result.per_token}",
            why=f"topk_group={scoring.top_groups} groups of {size} have fewer experts",
        )  # fmt: skip
    return result


def _experts(
    fields: JsonFields, count: int, per_token: int, intermediate: int, *,
    names: tuple[str, ...] = ("num_experts", "num_local_experts"),
    per_token_names: tuple[str, ...] = ("num_experts_per_tok",), **traits: Any,
) -> Experts:  # fmt: skip
    """count, per_token: by default. names, per_token_names: the spellings of their fields, in which versions of
    transformers differ."""
    per_token_name = fields.either(*per_token_names)
    experts = Experts(fields.count(fields.either(*names), count), fields.count(per_token_name, per_token), intermediate, **traits)
    if experts.per_token > experts.count:
        raise ModelError(
            f"{fields.file} has {per_token_name}={experts.per_token}", held=f"the model has {experts.count} experts",
            why="a token reaches distinct experts",
        )  # fmt: skip
    return experts


def _unknown(fields: JsonFields, name: str, known: str) -> ModelError:
    return ModelError(
        f"{fields.file} has {name}={fields.values.get(name)!r}, which is not supported", held=f"supported here: {known}"
    )
