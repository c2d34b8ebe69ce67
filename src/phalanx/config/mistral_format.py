# SPDX-License-Identifier: Apache-2.0
"""Mistral's own format of a checkpoint: params.json and consolidated*.safetensors, without config.json (Mistral Large 3).

It is read as the config.json that the same model would have, and its tensors by the names that they would have there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.errors import ModelError

PARAMS, WEIGHTS, WEIGHTS_INDEX = "params.json", "consolidated*", "consolidated.safetensors.index.json"

_NAMES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps", "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}  # fmt: skip
_MOE_NAMES = {
    "num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok", "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace", "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor", "num_expert_groups": "n_group", "num_expert_groups_per_tok": "topk_group",
}  # fmt: skip
_YARN_NAMES = {
    "factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings", "beta": "beta_fast",
    "alpha": "beta_slow",
}  # fmt: skip
_TABLE = FieldTable.of(
    f"rope_theta yarn llama_4_scaling moe quantization quantization_config vision_encoder max_seq_len {' '.join(_NAMES)}",
    "model_type model_parallel", {"causal": (True,), "use_biases": (False,), "multimodal": (), "_sliding_window": ()},
)  # fmt: skip
_MOE = FieldTable.of(
    " ".join(_MOE_NAMES), "expert_parallel expert_model_parallel",
    {"route_every_n": (1,), "use_load_balancing_bias": (False,), "renorm_strategy": ("WEIGHTS",)},
)  # fmt: skip
_YARN = FieldTable.of(f"apply_scale {' '.join(_YARN_NAMES)}")
_TEMPERATURE = FieldTable.of("beta original_max_position_embeddings")
_QUANTIZATION = FieldTable.of("qformat_weight qscheme_act")

_PARTS = {
    "tok_embeddings": "model.embed_tokens", "output": "lm_head", "norm": "model.norm", "layers": "model.layers",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention": "self_attn", "feed_forward": "mlp",
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm",
    "wq_b": "q_b_proj", "wkv_a_with_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj",
    "gate": "mlp.gate", "experts": "mlp.experts", "shared_experts": "mlp.shared_experts", "w1": "gate_proj", "w2": "down_proj",
    "w3": "up_proj", "qscale_weight": "weight_scale", "qscale_act": "input_scale",
}  # fmt: skip
"""Parts of the names of tensors -> in transformers."""
OTHER_TOWERS = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
"""The beginnings of the names of tensors of no text model."""
_OF_TEXT = ("tok_embeddings.", "output.", "norm.", "layers.")


def tensor_name(name: str) -> str:
    """The name that transformers has for a tensor of the text model; those of other towers keep theirs."""
    return ".".join(_PARTS.get(part, part) for part in name.split(".")) if name.startswith(_OF_TEXT) else name


def as_config(params: Mapping[str, Any], file: str = PARAMS) -> dict[str, Any]:
    """The config.json of the model of a params.json. Fields that neither knows keep their names, so that they are warned of.

    Raises ModelError for what is not computed, and for experts without shared ones (Mixtral's released files have config.json).
    """
    fields = JsonFields(params, file).sorted_by(_TABLE)
    others = {name: value for name, value in params.items() if name not in _TABLE.honoured and name in fields.additions}
    text = {"dtype": "bfloat16", "eos_token_id": 2, **others, **_renamed(fields, _NAMES), "rope_parameters": _rope(fields)}
    if text.get("max_position_embeddings") is None and fields.value("max_seq_len") is not None:
        text["max_position_embeddings"] = fields.count("max_seq_len")
    moe = fields.optional_mapping("moe")
    latent = params.get("qk_nope_head_dim") is not None
    if (moe is None) == latent:
        raise ModelError(
            f"{file} has {'no moe' if latent else 'moe'} {'beside' if latent else 'without'} qk_nope_head_dim",
            held="read are dense models, and experts with latent attention",
            next="use a checkpoint of this model that has config.json",
        )  # fmt: skip
    if moe is not None:
        text |= _renamed(fields.inner("moe", moe).sorted_by(_MOE), _MOE_NAMES)
        text.pop("head_dim", None)  # of queries and keys, which the parts of a head say
    else:
        text["sliding_window"] = params.get("sliding_window")
    # Pairs that are rotated together are neighbours, and transformers' files have the rows in another order.
    text |= {"model_type": "mistral4" if latent else "ministral3", "rope_interleave": True}
    quantization = _quantization(fields)
    if quantization is not None:
        text["quantization_config"] = quantization
    if fields.value("vision_encoder") is None:
        return {**text, "architectures": ["Mistral4ForCausalLM" if latent else "Ministral3ForCausalLM"]}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}


def _renamed(fields: JsonFields, names: Mapping[str, str]) -> dict[str, Any]:
    return {new: fields.value(name) for name, new in names.items() if fields.value(name) is not None}


def _rope(fields: JsonFields) -> dict[str, Any]:
    """apply_scale: whether YaRN's magnitude correction is applied, which with latent attention is of the softmax's scale."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.positive("rope_theta", 10_000.0)}
    yarn, temperature = fields.optional_mapping("yarn"), fields.optional_mapping("llama_4_scaling")
    if yarn is not None:
        inner = fields.inner("yarn", yarn).sorted_by(_YARN)
        rope |= {"rope_type": "yarn", **_renamed(inner, _YARN_NAMES)}
        if not inner.flag("apply_scale", True):
            rope["attention_factor"] = 1.0
        elif "qk_nope_head_dim" in fields.values:
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if temperature is not None:
        inner = fields.inner("llama_4_scaling", temperature).sorted_by(_TEMPERATURE)
        interval = inner.count("original_max_position_embeddings")
        stated = rope.setdefault("original_max_position_embeddings", interval)
        if stated != interval:
            raise ModelError(
                f"{fields.file} has original_max_position_embeddings={stated} in yarn, and {interval} in llama_4_scaling",
                why="transformers has one for both",
            )  # fmt: skip
        rope["llama_4_scaling_beta"] = inner.positive("beta")
    return rope


def _quantization(fields: JsonFields) -> Mapping[str, Any] | None:
    stated = fields.optional_mapping("quantization")
    if stated is None:
        return fields.optional_mapping("quantization_config")
    inner = fields.inner("quantization", stated).sorted_by(_QUANTIZATION)
    scheme, known = inner.text("qscheme_act", "TENSOR"), {"TENSOR": "static", "NO_SCALES": "dynamic"}
    if inner.text("qformat_weight") != "fp8_e4m3" or scheme not in known:
        raise ModelError(
            f"{fields.file} has quantization={dict(stated)}",
            held="read are qformat_weight='fp8_e4m3' with qscheme_act 'TENSOR' or 'NO_SCALES'",
        )  # fmt: skip
    return {"quant_method": "fp8", "activation_scheme": known[scheme]}
