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


def write_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer; returns the folder.

    family: a key of _FAMILIES. overrides: fields of the family's transformers config, and `seed` (default 0), `std` of the weights
    (default 0.3), `dtype` (torch dtype, default float32), `max_shard_size` (default "1GB"; less makes an index), `stacked`
    (default False: experts as the first checkpoints have them; else as transformers 5 holds them, each layer's in one tensor).
    """
    seed, std = overrides.pop("seed", 0), overrides.pop("std", 0.3)
    dtype, shard = overrides.pop("dtype", torch.float32), overrides.pop("max_shard_size", "1GB")
    stacked = overrides.pop("stacked", False)
    stem, traits = _FAMILIES[family]
    config = getattr(transformers, f"{stem}Config")(**{**_SIZES, **traits, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{stem}ForCausalLM")(config)
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
            elif weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, 1.0 if "embed_tokens" in name else std)
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.uniform_(-0.6, 0.3)


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
