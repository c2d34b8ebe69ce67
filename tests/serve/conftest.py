# SPDX-License-Identifier: Apache-2.0
"""A checkpoint without weights, which is all that the fake executor needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.serve_small_tokenizers import byte_level, write

LENGTH = 20_000


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), byte_level()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "rope_theta": 10000.0, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return write(folder, tokenizer)
