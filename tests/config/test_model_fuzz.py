# SPDX-License-Identifier: Apache-2.0
"""config.json as transformers reads it: generated files of every family, each field in every place and spelling that it may have.

A file is read as transformers reads it, or refused. A failure prints the seed of its file.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import warnings
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from phalanx.config.families import FAMILIES, model_type
from phalanx.config.json_fields import JsonFields
from phalanx.config.model import ModelShape
from phalanx.config.model_fields import MODEL
from phalanx.errors import ModelError
from phalanx.models.layers.rope import inv_freq
from tests.support.fuzz import fuzz_seeds

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 32,
}  # fmt: skip
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.25},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"factor": 1.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)  # fmt: skip
EIGHT_EXPERTS: dict[str, tuple[str, ...]] = {
    "Mixtral": ("num_local_experts", "num_experts"),
    "Qwen3Moe": ("num_experts", "num_local_experts"),
    "GptOss": ("num_local_experts", "num_experts"),
    "DeepseekV2": ("n_routed_experts", "num_experts"),
    "DeepseekV3": ("n_routed_experts", "num_local_experts"),
    "Glm4Moe": ("n_routed_experts", "num_local_experts"),
    "DeepseekV32": ("n_routed_experts", "num_local_experts"),
    "GlmMoeDsa": ("n_routed_experts", "num_local_experts"),
    "Glm4MoeLite": ("n_routed_experts", "num_local_experts"),
    "Mistral4": ("n_routed_experts", "num_local_experts"),
    "GraniteMoeHybrid": ("num_local_experts",),
    "Llama4": ("num_local_experts",),
    "NemotronH": ("n_routed_experts", "num_local_experts"),
    "MiniMaxM2": ("num_local_experts", "num_experts"),
    "HYV3": ("num_experts", "num_local_experts"),
    "Ernie4_5_Moe": ("moe_num_experts", "num_experts"),
    "Qwen3Next": ("num_experts",),
    "Qwen3_5Moe": ("num_experts",),
}
LATENT = ("DeepseekV2", "DeepseekV3", "DeepseekV32", "GlmMoeDsa", "Glm4MoeLite", "Mistral4")
SPARSE: dict[str, tuple[Any, ...]] = {
    "num_experts_per_tok": (2,), "first_k_dense_replace": (0, 1, 2), "n_group": (2,), "topk_group": (1, 2),
    "n_shared_experts": (1, 2),
    "routed_scaling_factor": (1.5,), "q_lora_rank": (16,), "norm_topk_prob": (True, False), "num_nextn_predict_layers": (0, 1),
    "mlp_layer_types": (None, ["dense", "sparse", "sparse", "dense"]), "index_topk": (8,), "index_n_heads": (4,),
    "index_head_dim": (64, 80), "rope_interleave": (True,), "indexer_rope_interleave": (None,),
}  # fmt: skip
"""Of models with sparse attention."""
GATED_DELTA: dict[str, tuple[Any, ...]] = {
    "head_dim": (16, 32),
    "attention_bias": (True, False),
    "full_attention_interval": (2, 4),
    "layer_types": (None, ["full_attention", "linear_attention"] * 2),
    "linear_num_key_heads": (4,),
    "linear_num_value_heads": (32, 64),
    "linear_key_head_dim": (8,),
    "linear_value_head_dim": (12,),
    "linear_conv_kernel_dim": (3,),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("swish",),
}
OF_ALL: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (None, 2, 4),
    "rms_norm_eps": (1e-5, 1e-6),
    "max_position_embeddings": (128, 256, 4096),
    "tie_word_embeddings": (True, False),
    "torch_dtype": ("bfloat16", "float16", "half", "float", None),
    "dtype": ("bfloat16", "float32", None),
    "eos_token_id": (7, [7, 9], -1, None),
    "bos_token_id": (3, -1, None),
    "hidden_act": ("silu",),
    "use_cache": (True,),
    "temperature": (0.6,),
}
OF_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "Llama": {"head_dim": (None, 16, 32), "attention_bias": (True, False), "mlp_bias": (True, False)},
    "Mistral": {"head_dim": (None, 32), "sliding_window": (None, 8)},
    "Llama4": {
        "head_dim": (16, 32), "attention_bias": (True, False), "use_qk_norm": (True, False), "no_rope_layers": ([], [1, 0, 0, 1]),
        "no_rope_layer_interval": (2, 4), "layer_types": (None, ["chunked_attention", "full_attention"] * 2),
        "attention_chunk_size": (8, 16), "attn_temperature_tuning": (True, False), "attn_scale": (0.2,), "floor_scale": (64,),
        "intermediate_size_mlp": (64,), "moe_layers": (None, [1, 3]), "interleave_moe_layer_step": (1, 2),
        "num_experts_per_tok": (1,),
    },
    "Ministral3": {"head_dim": (None, 32), "sliding_window": (None, 8)},
    "Qwen2": {
        "use_sliding_window": (True, False), "sliding_window": (None, 8), "max_window_layers": (0, 2, 4),
        "layer_types": (None, ["full_attention", "sliding_attention"] * 2),
    },
    "Qwen3": {
        "head_dim": (16, 32), "use_sliding_window": (True, False), "sliding_window": (None, 8), "max_window_layers": (0, 2),
        "layer_types": (None, ["full_attention", "sliding_attention"] * 2), "attention_bias": (True, False),
    },
    "Mixtral": {"head_dim": (None, 32), "sliding_window": (None, 8), "num_experts_per_tok": (1, 3)},
    "Qwen3Moe": {
        "head_dim": (16,), "use_sliding_window": (True, False), "sliding_window": (None, 8), "norm_topk_prob": (True, False),
        "decoder_sparse_step": (1, 2), "mlp_only_layers": ([], [1]), "moe_intermediate_size": (32,), "num_experts_per_tok": (2,),
    },
    "GptOss": {
        "head_dim": (16, 32), "sliding_window": (8,), "layer_types": (None, ["full_attention", "sliding_attention"] * 2),
        "swiglu_limit": (3.0,), "swiglu_alpha": (1.5,), "num_experts_per_tok": (2,), "attention_bias": (True, False),
    },
    "DeepseekV2": {
        "num_experts_per_tok": (2,), "n_group": (None, 2), "topk_group": (None, 1), "q_lora_rank": (None, 16),
        "topk_method": ("greedy", "group_limited_greedy"), "first_k_dense_replace": (0, 1), "n_shared_experts": (1, 2),
        "routed_scaling_factor": (1.0, 16.0),
    },
    "DeepseekV3": {
        "num_experts_per_tok": (2,), "n_group": (2,), "topk_group": (1, 2), "first_k_dense_replace": (0, 1),
        "routed_scaling_factor": (2.5,), "q_lora_rank": (None, 16), "norm_topk_prob": (True, False),
        "rope_interleave": (True, False), "num_nextn_predict_layers": (0, 1),
    },
    "DeepseekV32": SPARSE,
    "GlmMoeDsa": {
        **SPARSE, "indexer_types": (["full", "shared", "full", "full"],), "index_topk_pattern": ("FSFS", ["full", "shared"] * 2),
        "index_topk_freq": (2, 3), "index_skip_topk_offset": (1, 2),
    },
    "Glm4MoeLite": {
        "num_experts_per_tok": (2,), "n_group": (2,), "topk_group": (1, 2), "n_shared_experts": (1, 2), "q_lora_rank": (None, 16),
        "routed_scaling_factor": (2.5,), "norm_topk_prob": (True, False), "rope_interleave": (True, False),
        "mlp_layer_types": (None, ["dense", "sparse", "sparse", "dense"]), "num_nextn_predict_layers": (0, 1),
    },
    "Mistral4": {
        "num_experts_per_tok": (2,), "first_k_dense_replace": (0, 1), "n_shared_experts": (1, 2), "q_lora_rank": (None, 16),
        "routed_scaling_factor": (2.5,), "norm_topk_prob": (True, False), "rope_interleave": (True, False),
    },
    "SeedOss": {"head_dim": (16, 32), "attention_bias": (True, False), "attention_out_bias": (True, False), "mlp_bias": (True,)},
    "SmolLM3": {
        "head_dim": (16,), "attention_bias": (True, False), "mlp_bias": (True,), "use_sliding_window": (True, False),
        "sliding_window": (None, 8), "layer_types": (None, ["full_attention", "sliding_attention"] * 2),
        "no_rope_layers": (None, [1, 0, 0, 1]), "no_rope_layer_interval": (2, 4),
    },
    "Granite": {
        "head_dim": (16,), "attention_bias": (True, False), "mlp_bias": (True,), "embedding_multiplier": (12.0,),
        "residual_multiplier": (0.22,), "attention_multiplier": (0.015625,), "logits_scaling": (8,),
    },
    "GraniteMoeHybrid": {
        "head_dim": (16,), "attention_bias": (True, False), "embedding_multiplier": (12.0,), "residual_multiplier": (0.22,),
        "attention_multiplier": (0.015625,), "logits_scaling": (8,), "position_embedding_type": (None, "nope", "rope"),
        "layer_types": (None, ["mamba", "attention"] * 2, ["linear_attention", "full_attention"] * 2, ["attention"] * 4),
        "layers_block_type": (None,), "num_experts_per_tok": (2,), "shared_intermediate_size": (64,), "mamba_n_heads": (16, 32),
        "mamba_n_groups": (1, 4), "mamba_d_head": ("auto",), "mamba_d_state": (64,), "mamba_d_conv": (3,), "mamba_expand": (2, 4),
        "mamba_conv_bias": (True,), "mamba_proj_bias": (False,),
    },
    "NemotronH": {
        "head_dim": (16, 32), "layers_block_type": (None, ["mamba", "mlp", "attention", "moe"]),
        "layer_types": (["mamba", "mlp", "attention", "moe"],), "hybrid_override_pattern": ("M-*E",), "n_group": (2,),
        "topk_group": (1, 2), "norm_topk_prob": (True, False),
        "routed_scaling_factor": (2.5,), "num_experts_per_tok": (2,), "moe_intermediate_size": (32,),
        "moe_shared_expert_intermediate_size": (48,), "mamba_num_heads": (16,), "mamba_head_dim": (32,), "n_groups": (4,),
        "mamba_n_groups": (4,), "ssm_state_size": (64,), "conv_kernel": (3,), "mamba_d_conv": (3,), "use_conv_bias": (True,),
        "layer_norm_epsilon": (1e-6,), "mlp_hidden_act": ("relu2",),
    },
    "Glm4Moe": {
        "head_dim": (16, 32), "attention_bias": (True, False), "use_qk_norm": (True, False), "n_group": (2,), "topk_group": (1, 2),
        "first_k_dense_replace": (0, 1), "routed_scaling_factor": (2.5,), "norm_topk_prob": (True, False),
        "n_shared_experts": (1, 2), "num_experts_per_tok": (2,), "moe_intermediate_size": (32,), "num_nextn_predict_layers": (0, 1),
    },
    "MiniMaxM2": {
        "head_dim": (16, 32), "rotary_dim": (8, 16), "num_experts_per_tok": (2,), "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "attn_type_list": ([1] * 4,),
    },
    "Phi3": {"head_dim": (None,), "sliding_window": (None, 8)},
    "Olmo2": {"head_dim": (16, 32), "attention_bias": (True, False)},
    "Cohere": {
        "use_qk_norm": (True, False), "head_dim": (16, 32), "attention_bias": (True, False), "logit_scale": (0.25,),
        "layer_norm_eps": (1e-6,),
    },
    "Cohere2": {
        "attention_bias": (True, False), "logit_scale": (0.25,), "layer_norm_eps": (1e-6,), "sliding_window": (8,),
        "sliding_window_pattern": (2, 3), "layer_types": (None, ["full_attention", "sliding_attention"] * 2),
    },
    "Exaone4": {
        "head_dim": (16, 32), "sliding_window": (None, 8), "sliding_window_pattern": (2, 3),
        "layer_types": (None, ["full_attention", "sliding_attention"] * 2),
    },
    "Ernie4_5": {"head_dim": (None, 16, 32), "use_bias": (True, False)},
    "Ernie4_5_Moe": {
        "num_key_value_heads": (2, 4), "head_dim": (None, 16), "moe_k": (2, 3), "moe_num_shared_experts": (0, 1),
        "moe_intermediate_size": (32,), "moe_layer_start_index": (0, 2), "moe_layer_end_index": (-1, 2),
        "moe_layer_interval": (1, 2), "moe_norm_min": (1e-6,),
        "num_nextn_predict_layers": (1,), "moe_use_aux_free": (True,), "moe_gate": ("topk",),
    },
    "HYV3": {
        "head_dim": (16, 32), "attention_bias": (True, False), "num_experts_per_tok": (2,), "num_shared_experts": (1, 2),
        "moe_intermediate_size": (32,), "router_scaling_factor": (2.5,), "num_nextn_predict_layers": (0, 1),
        "mlp_layer_types": (None, ["dense", "sparse", "sparse", "dense"]),
    },
    "Gemma2": {
        "head_dim": (16, 32), "attention_bias": (True, False), "sliding_window": (8,), "query_pre_attn_scalar": (16, 24),
        "layer_types": (None, ["full_attention", "sliding_attention"] * 2), "attn_logit_softcapping": (None, 20.0),
        "final_logit_softcapping": (None, 10.0), "hidden_activation": ("gelu_pytorch_tanh",),
    },
    "Gemma3": {
        "head_dim": (16, 32), "attention_bias": (True, False), "sliding_window": (8,), "query_pre_attn_scalar": (16, 24),
        "layer_types": (None, ["full_attention", "sliding_attention"] * 2), "attn_logit_softcapping": (None, 20.0),
        "final_logit_softcapping": (None, 10.0), "hidden_activation": ("gelu_pytorch_tanh",), "sliding_window_pattern": (2, 3),
        "rope_local_base_freq": (20_000.0,),
    },
    "Gemma4": {
        "head_dim": (16, 32), "global_head_dim": (48,), "attention_bias": (True, False), "sliding_window": (8,),
        "layer_types": (None, ["full_attention", "sliding_attention"] * 2), "attention_k_eq_v": (True, False),
        "num_global_key_value_heads": (1,), "final_logit_softcapping": (None, 10.0), "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, "vision"), "hidden_size_per_layer_input": (0, 16), "num_kv_shared_layers": (0, 1, 2),
        "vocab_size_per_layer_input": (300_000,), "use_double_wide_mlp": (True, False), "enable_moe_block": (True, False),
        "per_layer_config": ({"3": {"head_dim": 24, "num_key_value_heads": 2}}, {"1": {"head_dim": 24}}, None),
    },
    "Olmo3": {
        "head_dim": (16, 32), "attention_bias": (True, False), "sliding_window": (8,),
        "layer_types": (None, ["full_attention", "sliding_attention"] * 2),
    },
    "Qwen3Next": {
        **GATED_DELTA, "norm_topk_prob": (True, False), "decoder_sparse_step": (1, 2), "mlp_only_layers": ([], [1]),
        "moe_intermediate_size": (32,), "num_experts_per_tok": (2,), "shared_expert_intermediate_size": (64,),
    },
    "Qwen3_5": GATED_DELTA,
    "Qwen3_5Moe": {
        **GATED_DELTA, "moe_intermediate_size": (32,), "num_experts_per_tok": (2,), "shared_expert_intermediate_size": (64,),
    },
}  # fmt: skip


def generate(seed: int) -> tuple[str, dict[str, Any]]:
    """The stem of a family, which take turns, and a config.json of it."""
    chance, stem = random.Random(seed), list(OF_FAMILY)[seed % len(OF_FAMILY)]
    architecture = f"{stem}ForCausalLM"
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type(architecture), **SIZES}
    if stem.startswith("Gemma"):
        config["hidden_act"] = chance.choice(("gelu", "gelu_pytorch_tanh"))  # which nothing reads
    for name, values in {**OF_ALL, **OF_FAMILY[stem]}.items():
        if chance.random() < 0.4:
            config[name] = chance.choice(values)
    if stem in LATENT:
        config["num_key_value_heads"] = chance.choice((None, 32))
    if stem in EIGHT_EXPERTS:
        config[chance.choice(EIGHT_EXPERTS[stem])] = 8
        if "moe_k" not in config:
            config.setdefault("num_experts_per_tok", 1 if stem == "Llama4" else 2)
    if stem.startswith(("Deepseek", "Glm", "Nemotron")):
        config.setdefault("topk_group", 1)
        config.setdefault("n_group", 2)
    for place in ("rope_parameters", "rope_scaling"):
        if chance.random() < 0.45:
            config[place] = chance.choice(({}, None, *SCALINGS * 2))
            if config[place]:
                config[place] = respelled(chance, config[place])
    if chance.random() < 0.3:
        config["rope_theta"] = chance.choice((500.0, 1e6, 10_000))
    if chance.random() < 0.1:
        config["original_max_position_embeddings"] = 16
    if chance.random() < 0.1:
        config["partial_rotary_factor"] = chance.choice((1.0, 0.5))
    if stem == "Gemma4":  # which transformers does not read of it, and we refuse
        for name in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
            config.pop(name, None)
        if config.get("enable_moe_block"):
            config |= {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    return stem, config


def respelled(chance: random.Random, scaling: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(scaling)
    if "rope_type" in scaling and chance.random() < 0.3:
        scaling["type"] = scaling.pop("rope_type")
    if chance.random() < 0.4:
        scaling["rope_theta"] = chance.choice((500.0, 1e6))
    return scaling


def reference_of(stem: str, config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of the file, in the terms of `ours`."""
    text = "Text" if stem.startswith(("Qwen3_5", "Llama4", "Gemma4")) else ""
    kind = f"{stem}TextConfig" if text or stem in ("Gemma3", "Gemma4") else f"{stem}Config"
    read = getattr(transformers, kind).from_dict(copy.deepcopy(config))
    if stem == "Gemma4":  # the sizes of layers with a window; those of all layers are compared below
        read.allow_global_per_layer_attribute_access = True
    folder = read.model_type.removesuffix("_text")
    modeling = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=["x"])
    has_rope = stem != "NemotronH" and getattr(read, "position_embedding_type", "rope") == "rope"
    rotary = getattr(modeling, f"{stem}{text}RotaryEmbedding")(read) if has_rope else None
    if stem == "Mistral4" and 2 * len(rotary.inv_freq) != read.qk_rope_head_dim:
        raise KeyError("its attention cannot take what its RoPE gives")
    layers = read.num_hidden_layers
    windows: tuple[int | None, ...] = (None,) * layers
    if stem in ("Qwen2", "Qwen3", "GptOss", "Olmo3", "Gemma2", "Gemma3", "Gemma4", "Cohere2", "Exaone4"):
        windows = tuple(read.sliding_window if kind == "sliding_attention" else None for kind in read.layer_types)
    elif stem == "SmolLM3":
        windows = tuple(
            read.sliding_window if read.use_sliding_window and kind == "sliding_attention" else None for kind in read.layer_types
        )
    elif stem in ("Mistral", "Ministral3", "Mixtral", "Qwen3Moe", "Phi3"):
        windows = (read.sliding_window,) * layers
    eos = read.eos_token_id if isinstance(read.eos_token_id, list) else [read.eos_token_id]
    facts = {
        "kv_heads": read.num_key_value_heads, "eps": getattr(read, FAMILIES[f"{stem}ForCausalLM"].eps_field),
        "tied": read.tie_word_embeddings, "windows": windows,
        "dtype": None if read.dtype is None else str(read.dtype).removeprefix("torch."),
        "eos": [token for token in eos if token not in (None, -1)] if "eos_token_id" in config else None,
        "max_positions": (
            read.max_position_embeddings if rotary is None or stem in RAW_POSITIONS or rotary.rope_type in AS_STATED else None
        ),
        **({} if rotary is None else rotary_facts(rotary)),
    }  # fmt: skip
    if stem not in LATENT:
        facts["head_dim"] = getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
    else:
        attention = getattr(modeling, f"{stem}Attention")(read, 0)
        facts["softmax_scale"] = attention.scaling
        facts["ranks"] = read.q_lora_rank, read.kv_lora_rank, read.qk_nope_head_dim, read.qk_rope_head_dim, read.v_head_dim
        if hasattr(read, "index_topk"):
            kinds = getattr(read, "indexer_types", ["full"] * layers)
            facts["indexer"] = read.index_n_heads, read.index_head_dim, read.index_topk, [kind == "full" for kind in kinds]
    if hasattr(read, "n_shared_experts") and stem != "NemotronH":
        dense = range(getattr(read, "first_k_dense_replace", 0))
        facts["shared"] = read.n_shared_experts * read.moe_intermediate_size
        facts["scale"] = read.routed_scaling_factor
    if stem in EIGHT_EXPERTS and "moe" in getattr(read, "layers_block_type", ["moe"]):
        facts["experts"] = getattr(read, EIGHT_EXPERTS[stem][0]), read.num_experts_per_tok
        if stem in ("Qwen3Moe", "Qwen3Next"):
            sparse = [i not in read.mlp_only_layers and (i + 1) % read.decoder_sparse_step == 0 for i in range(layers)]
            dense = [i for i in range(layers) if not sparse[i]]
        if hasattr(read, "mlp_layer_types"):
            dense = [layer for layer, kind in enumerate(read.mlp_layer_types) if kind == "dense"]
        if stem == "HYV3":
            facts["shared"] = read.num_shared_experts * read.moe_intermediate_size
            facts["scale"] = read.router_scaling_factor
        if stem == "Llama4":
            dense = [layer for layer in range(layers) if layer not in read.moe_layers]
            facts["shared"] = read.intermediate_size
        if stem == "Ernie4_5_Moe":
            inside = range(read.moe_layer_start_index, read.moe_layer_end_index + 1)
            dense = [i for i in range(layers) if i not in inside or (i + 1) % read.moe_layer_interval]
            facts["shared"], facts["floor"] = read.moe_num_shared_experts * read.moe_intermediate_size, read.moe_norm_min
        if stem == "NemotronH":
            dense = [layer for layer, kind in enumerate(read.layer_types) if kind != "moe"]
            facts["shared"], facts["scale"] = read.moe_shared_expert_intermediate_size, read.routed_scaling_factor
        every = ("Mixtral", "GptOss", "MiniMaxM2", "Qwen3_5Moe", "GraniteMoeHybrid")
        facts["dense"] = tuple(dense) if stem not in every else ()
        if hasattr(read, "norm_topk_prob"):
            facts["renormalize"] = read.norm_topk_prob
        if stem == "GptOss":
            facts["swiglu"] = read.swiglu_alpha, read.swiglu_limit
    if hasattr(read, "shared_expert_intermediate_size"):
        facts["shared"] = read.shared_expert_intermediate_size
    if hasattr(read, "linear_num_key_heads"):
        layers_of_state = tuple(layer for layer, kind in enumerate(read.layer_types) if kind == "linear_attention")
        facts["gated_delta"] = (
            layers_of_state, read.linear_num_key_heads, read.linear_num_value_heads, read.linear_key_head_dim,
            read.linear_value_head_dim, read.linear_conv_kernel_dim,
        )  # fmt: skip
    for name in ("attention_bias", "mlp_bias"):
        if hasattr(read, name) and stem not in LATENT:
            facts[name] = getattr(read, name)
    if hasattr(read, "use_bias"):
        facts["attention_bias"] = facts["mlp_bias"] = read.use_bias
    if hasattr(read, "attention_out_bias"):
        facts["attention_out_bias"] = read.attention_out_bias
    if hasattr(read, "use_qk_norm"):
        facts["qk_norm"] = read.use_qk_norm
    if stem == "Llama4":
        facts["chunks"] = tuple(read.attention_chunk_size if kind == "chunked_attention" else None for kind in read.layer_types)
        tuned = read.attn_temperature_tuning and 0 in read.no_rope_layers
        facts["temperature"] = (read.attn_scale, read.floor_scale, 1) if tuned else None
    if stem == "Exaone4":
        facts["nope_layers"] = tuple(i for i in range(layers) if windows[i] is None) if read.sliding_window is not None else ()
    if stem in ("SmolLM3", "Llama4"):
        facts["nope_layers"] = tuple(layer for layer in range(layers) if not read.no_rope_layers[layer])
    if stem == "Gemma4":
        try:
            sharing = read.kv_sharing_modes
        except ValueError:
            raise KeyError("layers share keys and values of no layer") from None
        facts["heads"] = [
            (
                of_layer.num_key_value_heads, of_layer.head_dim, read.attention_k_eq_v and windows[layer] is None,
                sharing[layer] == "reuse",
            )
            for layer in range(layers) for of_layer in (read.per_layer_config[layer],)
        ]  # fmt: skip
        facts["cap"] = read.final_logit_softcapping
        width = read.hidden_size_per_layer_input
        facts["layer_inputs"] = (width, read.vocab_size_per_layer_input) if width else None
        facts["widths"] = [
            read.intermediate_size * (2 if read.use_double_wide_mlp and mode == "reuse" else 1) for mode in sharing
        ]  # fmt: skip
        moe = read.num_experts, read.top_k_experts, read.moe_intermediate_size, read.intermediate_size
        facts["beside"] = moe if read.enable_moe_block else None
    elif stem.startswith("Gemma"):
        facts["caps"] = read.attn_logit_softcapping, read.final_logit_softcapping
        facts["softmax_scale"] = read.query_pre_attn_scalar**-0.5
    if stem == "NemotronH":
        facts["nope_layers"] = tuple(range(layers))
        names = {"linear_attention": "mamba", "full_attention": "attention", "moe": "experts"}
        facts["blocks"] = tuple(names.get(kind, kind) for kind in read.layer_types)
        facts["mamba"] = (
            tuple(layer for layer, kind in enumerate(read.layer_types) if kind == "linear_attention"), read.mamba_num_heads,
            read.mamba_head_dim, read.n_groups, read.ssm_state_size, read.conv_kernel, 0,
        )  # fmt: skip
    if stem == "GraniteMoeHybrid":
        facts["nope_layers"] = tuple(range(layers)) if read.position_embedding_type != "rope" else ()
        of_state = tuple(layer for layer, kind in enumerate(read.layer_types) if kind == "linear_attention")
        facts["shared"] = read.shared_intermediate_size
        facts["mamba"] = of_state and (
            of_state, read.mamba_n_heads, read.mamba_d_head, read.mamba_n_groups, read.mamba_d_state, read.mamba_d_conv, 0,
        )  # fmt: skip
    if stem.startswith("Granite"):
        facts["multipliers"] = [read.embedding_multiplier, read.residual_multiplier, read.logits_scaling, read.attention_multiplier]
    return facts


RAW_POSITIONS, AS_STATED = ("Olmo3", "Gemma3", "Gemma4"), ("default", "llama3", "longrope")
"""Families, and kinds of RoPE, with the context that the file states."""


def rotary_facts(rotary: torch.nn.Module) -> dict[str, Any]:
    """Frequencies and factors, of each type of layers where they differ."""
    if hasattr(rotary, "inv_freq"):
        return {"inv_freq": rotary.inv_freq, "attention_factor": rotary.attention_scaling}
    kinds = {"": "full_attention", "window_": "sliding_attention"}
    return {
        f"{prefix}{name}": getattr(rotary, f"{kind}_{theirs}")
        for prefix, kind in kinds.items()
        for name, theirs in (("inv_freq", "inv_freq"), ("attention_factor", "attention_scaling"))
        if hasattr(rotary, f"{kind}_inv_freq")
    }


def ours(stem: str, shape: ModelShape, stated: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The same facts, of our shape."""
    full = next((layer for layer in range(4) if shape.rope_in(layer) == shape.rope), 0)
    facts = {
        "kv_heads": shape.num_kv_heads, "eps": shape.rms_norm_eps, "tied": shape.tie_word_embeddings, "windows": shape.windows,
        "dtype": None if reference["dtype"] is None else {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[shape.dtype],
        "eos": list(shape.eos_token_ids) if "eos_token_id" in stated else None,
        "max_positions": shape.max_positions if stem in RAW_POSITIONS or shape.rope.kind in AS_STATED else None,
        "inv_freq": inv_freq(shape.within(1).rope, shape.rotary_in(full).rotated),
        "attention_factor": shape.rope.attention_factor,
        "chunks": shape.chunks, "qk_norm": shape.qk_norm,
        "temperature": next((shape.rope_in(each).temperature for each in range(4) if not shape.rope_in(each).portion), None),
        "head_dim": shape.head_dim, "mlp_bias": shape.mlp_bias,
        "attention_bias": shape.qkv_bias if stem in ("SeedOss", "Glm4Moe") else shape.output_bias,
        "attention_out_bias": shape.output_bias,
        "nope_layers": tuple(layer for layer in range(shape.num_layers) if not shape.rope_in(layer).portion),
        "multipliers": [
            shape.multipliers.embedding, shape.multipliers.residual, 1 / shape.multipliers.logits, shape.multipliers.attention,
        ],
    }  # fmt: skip
    window = next((shape.rotary_in(layer) for layer, size in enumerate(shape.windows) if size is not None), None)
    if window is not None:
        facts["window_inv_freq"] = inv_freq(window.rope, window.rotated)
        facts["window_attention_factor"] = window.rope.attention_factor
    facts["heads"] = [tuple(shape.heads_in(layer)) for layer in range(shape.num_layers)]
    facts["cap"], facts["layer_inputs"] = shape.multipliers.logits_cap, shape.layer_inputs
    facts["widths"] = [shape.intermediate_in(layer) for layer in range(shape.num_layers)]
    facts["beside"] = shape.experts and (
        shape.experts.count, shape.experts.per_token, shape.experts.intermediate, shape.experts.shared,
    )  # fmt: skip
    facts["caps"] = shape.multipliers.attention_cap, shape.multipliers.logits_cap
    facts["softmax_scale"] = shape.multipliers.attention
    if shape.gated_delta is not None:
        assert shape.gated_delta.kept == 0, "no file says how many drafts there are"
        facts["gated_delta"] = dataclasses.astuple(shape.gated_delta)[:-1]
    facts["blocks"] = shape.blocks
    facts["mamba"] = () if shape.mamba is None else dataclasses.astuple(shape.mamba)
    if shape.latent is not None:
        latent = shape.latent
        facts["ranks"] = latent.q_rank, latent.kv_rank, latent.nope, latent.rope, latent.v
        facts["softmax_scale"] = latent.softmax_scale
        if (indexer := latent.indexer) is not None:
            facts["indexer"] = indexer.heads, indexer.head_dim, indexer.topk, list(indexer.computes)
    if shape.experts is not None:
        experts = shape.experts
        facts["experts"], facts["dense"] = (experts.count, experts.per_token), experts.dense_layers
        facts["renormalize"], facts["shared"] = experts.renormalize, experts.shared
        facts["swiglu"], facts["scale"] = experts.swiglu, None if experts.scoring is None else experts.scoring.scale
        facts["floor"] = None if experts.scoring is None else experts.scoring.floor
    return {name: facts[name] for name in reference}


def read_by_transformers(stem: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """`reference_of`; None for a file that its strict classes refuse, such as a null where it has an integer."""
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of rope_scaling, in families without RoPE
            return reference_of(stem, config)
    except (StrictDataclassError, KeyError, TypeError, ZeroDivisionError):  # the last: EXAONE 4 whose sliding_window is null
        return None


def compare(stem: str, config: dict[str, Any]) -> str:
    """What became of the file; fails where we read it otherwise than transformers, or refuse it without a known reason."""
    shape, refusal = None, ""
    try:
        shape = ModelShape.from_config(config, quiet=True)
    except ModelError as error:
        refusal = str(error)
    if any(reason in refusal for reason in REFUSED):
        return "refused"
    reference = read_by_transformers(stem, config)
    if shape is None:
        assert reference is None, f"refused, and transformers reads {reference}: {refusal}"
        return "refused"
    if reference is None:
        return "refused by transformers alone"
    different = differences(reference, ours(stem, shape, config, reference))
    assert different == {}, different
    return stem


def differences(reference: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    different = {}
    for name, value in reference.items():
        if isinstance(value, torch.Tensor):
            same = value.shape == facts[name].shape and torch.allclose(value, facts[name], rtol=1e-5, atol=0)
        elif isinstance(value, float):
            same = facts[name] == pytest.approx(value, rel=1e-9)
        else:
            same = facts[name] == value
        if not same:
            different[name] = (value, facts[name])
    return different


REFUSED = (
    "rope_type='dynamic'", "rope_type='longrope'", "factors in short_factor", "by the type of a layer",
    "partial_rotary_factor other than 1", "rope_scaling, and rope_parameters",
    "norm_topk_prob=true", "other sizes by layer are not computed",
)  # fmt: skip
"""What is refused, and transformers reads."""


def test_generated_files_are_read_as_transformers_reads_them() -> None:
    outcomes: Counter[str] = Counter()
    with fuzz_seeds(8 * len(OF_FAMILY)) as seeds:
        for seed in seeds:
            stem, config = generate(seed)
            seeds.case = f"{stem} {json.dumps(config)}"
            before = copy.deepcopy(config)
            outcomes[compare(stem, config)] += 1
            assert config == before
    print(f"{seeds.count} files: {dict(outcomes)}")
    assert set(outcomes) >= {*OF_FAMILY, "refused"}
    assert outcomes["refused"] < seeds.count / 2


def test_every_honoured_field_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that a table calls honoured is read by some file of its family. Others cannot be read: see `JsonFields.value`."""
    read: dict[str, set[str]] = {f"{stem}ForCausalLM": set() for stem in OF_FAMILY}
    assert set(read) == set(FAMILIES) == set(MODEL)
    value = JsonFields.value
    architecture = ""

    def recorded(fields: JsonFields, name: str) -> Any:
        if not fields.prefix and architecture:
            read[architecture].add(name)
        return value(fields, name)

    monkeypatch.setattr(JsonFields, "value", recorded)
    for seed in range(60 * len(OF_FAMILY)):
        stem, config = generate(seed)
        architecture = f"{stem}ForCausalLM"
        with suppress(ModelError):
            ModelShape.from_config(config, quiet=True)
    assert read == {architecture: set(table.honoured) for architecture, table in MODEL.items()}
