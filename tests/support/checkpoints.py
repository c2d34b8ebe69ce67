# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of every family, written with transformers, each with a small tokenizer beside it.

    folder = write_checkpoint(tmp_path / "llama", "llama", num_key_value_heads=3)

The weights are large enough that every part of the arithmetic changes the outcome.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# transformers has the classes, and knows of no causal model for the configuration.
transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)

VOCAB_SIZE = 384
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"

_TEXT = (
    "A phalanx is a formation of ranks. Each rank holds a slice of every layer, and all ranks wait for the all-reduce. "
    "The scheduler decides which requests run in a step; the cache holds keys and values in blocks of tokens. "
    "What is a rank? A rank is one process with one device. What is a block? A block holds the keys of sixteen tokens. "
    "The user asks, the assistant answers: 0 1 2 3 4 5 6 7 8 9, in words that the user can read. "
) * 4

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.7,
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 10,
            "no_rope_layer_interval": 3,
            "floor_scale": 6,
            "attn_scale": 0.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7,
        "mscale_all_dim": 0.7, "beta_fast": 4.0, "beta_slow": 1.0,
    },
}  # fmt: skip

_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
"""So many heads that none of a key's scores is 0."""

_FAMILIES |= {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    }),
    "gpt_oss": ("GptOss", {
        "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 6, "swiglu_limit": 2.0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False,
        },
    }),
    "deepseek_v2": ("DeepseekV2", {
        **_LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0,
    }),
    "deepseek_v3": ("DeepseekV3", {
        **_LATENT, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    }),
}  # fmt: skip


_FAMILIES |= {
    "deepseek_v32": ("DeepseekV32", {
        **_LATENT, **_INDEXER, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    }),
    "glm_moe_dsa": ("GlmMoeDsa", {
        **_LATENT, **_INDEXER, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "v_head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    "glm4_moe_lite": ("Glm4MoeLite", {
        **_LATENT, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "routed_scaling_factor": 1.8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    "mistral4": ("Mistral4", {
        **_LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 16.0, "original_max_position_embeddings": 8, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
        },
    }),
}  # fmt: skip

_FAMILIES |= {
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "granite": ("Granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5,
    }),
    "granite_hybrid": ("GraniteMoeHybrid", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5,
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 8, "num_experts_per_tok": 3,
        "intermediate_size": 32, "shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 16,
        "mamba_n_groups": 1, "mamba_chunk_size": 16, "position_embedding_type": "nope",
    }),
    "nemotron_h": ("NemotronH", {
        "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba", "attention", "moe"], "head_dim": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        # transformers 5.24 has no time steps below it in prompts, but in single tokens
        "time_step_min": 1e-9,
    }),
    "glm4_moe": ("Glm4Moe", {
        "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    }),
}  # fmt: skip

_FAMILIES |= {
    "minimax_m2": ("MiniMaxM2", {
        # transformers 5.17 reads no rotary_dim, as releases have it, and rotates all of a head: it is told twice.
        "head_dim": 16, "rotary_dim": 8,
        "rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5},
        "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32,
    }),
    "phi3": ("Phi3", {"sliding_window": None}),
    "olmo2": ("Olmo2", {}),
    "exaone4": ("Exaone4", {"head_dim": 16, "sliding_window": 6}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
    }),
    "cohere": ("Cohere", {"logit_scale": 0.4}),
    "cohere2": ("Cohere2", {"logit_scale": 0.4, "sliding_window": 6}),
    "hy_v3": ("HYV3", {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_shared_experts": 2,
    }),
    "olmo3": ("Olmo3", {"sliding_window": 6, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 400.0},
        "full_attention": {"rope_type": "yarn", "rope_theta": 700.0, "factor": 8.0, "original_max_position_embeddings": 32},
    }}),
    "gemma2": ("Gemma2", {
        "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 400.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 8.0},
    }}),
}  # fmt: skip

_FAMILIES |= {
    "gemma4": ("Gemma4", {
        "head_dim": 12, "global_head_dim": 24, "sliding_window": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 400.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
        },
    }),
}  # fmt: skip

_FAMILIES |= {
    "gemma4_moe": ("Gemma4", {
        **_FAMILIES["gemma4"][1], "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
    }),
    "gemma4_e": ("Gemma4", {
        **_FAMILIES["gemma4"][1], "attention_k_eq_v": False, "hidden_size_per_layer_input": 10,
        "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    }),
}  # fmt: skip

_CONFIGS = {
    "Gemma3": "Gemma3Text",
    "Gemma4": "Gemma4Text",
    "Llama4": "Llama4Text",
    "Qwen3_5": "Qwen3_5Text",
    "Qwen3_5Moe": "Qwen3_5MoeText",
}
"""Stems of classes of configurations, where they are not the model's."""

_GATED_DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "full_attention_interval": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
_FAMILIES |= {
    "qwen3_next": ("Qwen3Next", {**_GATED_DELTA, **_SHARED_EXPERT, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", {**_GATED_DELTA}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_GATED_DELTA, **_SHARED_EXPERT}),
}  # fmt: skip

_SMALL_TOWER = {"hidden_size": 32, "intermediate_size": 48}
_QWEN_TOWER = {**_SMALL_TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
_WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": None, "head_dim": 16}, {
        **_SMALL_TOWER, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 16,
    }),
    "ministral3_vl": ("Mistral3", {**_FAMILIES["ministral3"][1], "model_type": "ministral3"}, {
        **_SMALL_TOWER, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 16,
    }),
    "mistral4_vl": ("Mistral3", {**_FAMILIES["mistral4"][1], "model_type": "mistral4"}, {
        **_SMALL_TOWER, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 16,
    }),
    "llama4_vl": ("Llama4", {**_FAMILIES["llama4"][1], "model_type": "llama4_text"}, {
        **_SMALL_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
    }),
    "qwen2_5_vl": ("Qwen2_5_VL", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]},
    }, {**_QWEN_TOWER, "fullatt_block_indexes": [0]}),
    "qwen3_vl": ("Qwen3VL", {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }, {**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {
        **_FAMILIES["qwen3_moe"][1], "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }, {**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
    "exaone4_5": ("Exaone4_5_", {**_FAMILIES["exaone4"][1], "model_type": "exaone4_5_text"}, {
        **_QWEN_TOWER, "num_key_value_heads": 2, "fullatt_block_indexes": [0],
    }),
    "gemma3_vl": ("Gemma3", {**_FAMILIES["gemma3"][1], "model_type": "gemma3_text"}, {
        **_SMALL_TOWER, "model_type": "siglip_vision_model", "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 16,
    }),
    "ernie4_5_vl": ("Ernie4_5_VLMoe", {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": [32, 16], "moe_num_shared_experts": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]},
    }, {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2}),
    "qwen3_5_vl": ("Qwen3_5", {**_GATED_DELTA}, {**_QWEN_TOWER, "num_position_embeddings": 16}),
    "kimi_k25": ("Kimi_K25", {**_FAMILIES["deepseek_v3"][1], "model_type": "kimi_k2"}, {
        **_SMALL_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4,
        "pos_emb_time": 2,
    }),
}  # fmt: skip
"""Models with a text tower: traits of text_config, and vision_config."""


FAMILIES = tuple(_FAMILIES)


def config_of(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """The configuration of a tiny model: see `write_checkpoint`."""
    if family in _WRAPPERS:
        stem, traits, tower = _WRAPPERS[family]
        text = {**_SIZES, **traits, **overrides}
        tied = text["tie_word_embeddings"]
        config = getattr(transformers, f"{stem}Config")(text_config=text, vision_config=tower, tie_word_embeddings=tied)
    else:
        stem, traits = _FAMILIES[family]
        fields = {**_SIZES, **traits, **overrides}
        for name in ("layer_types", "layers_block_type"):
            if name in traits and name not in overrides:
                fields[name] = fields[name][: fields["num_hidden_layers"]]
        config = getattr(transformers, f"{_CONFIGS.get(stem, stem)}Config")(**fields)
        config.architectures = [f"{stem}ForCausalLM"]
    return config


def write_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer; returns the folder.

    family: a key of _FAMILIES or _WRAPPERS. overrides: fields of the transformers config (of a wrapper: of its text_config), and
    `seed` (default 0), `std` of the weights (default 0.3), `dtype` (torch dtype, default float32), `max_shard_size` (default "1GB";
    less makes an index), `stacked` (default False: names and experts as the first checkpoints have them; else as transformers 5
    holds them, each layer's experts in one tensor).
    """
    seed, std = overrides.pop("seed", 0), overrides.pop("std", 0.3)
    dtype, shard = overrides.pop("dtype", torch.float32), overrides.pop("max_shard_size", "1GB")
    stacked = overrides.pop("stacked", False)
    config = config_of(family, **overrides)
    stem, end = (_WRAPPERS[family][0], "ForConditionalGeneration") if family in _WRAPPERS else (_FAMILIES[family][0], "ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{stem}{end}")(config)
        scatter_weights(model, std)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard, **({"save_original_format": False} if stacked else {}))
    write_tokenizer(folder)
    return folder


def scatter_weights(model: torch.nn.Module, std: float) -> None:
    """Weights of linear layers normal with `std`, norms around 1, biases far from 0: nothing in the model is neutral."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.normal_(0.0, 2.0)
            elif name.endswith("A_log"):  # states last for some tokens, or for many
                weight.uniform_(-5.0, 0.0)
            elif name.endswith("e_score_correction_bias"):
                weight.uniform_(-0.3, 0.2)  # beside a softmax
            elif weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, 1.0 if "embed_tokens" in name else std)
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.uniform_(-0.6, 0.3)
            elif name.endswith("layer_scalar"):
                values.uniform_(0.5, 1.5)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json with a chat template: byte-level BPE over a fixed text, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "clean_up_tokenization_spaces": False, "model_max_length": 256, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


@functools.cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[BOS, EOS, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([_TEXT], trainer)
    return str(tokenizer.to_str(pretty=True))
