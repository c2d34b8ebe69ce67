# SPDX-License-Identifier: Apache-2.0
"""A model that is a config.json, and one engine with dummy weights of it for all tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.bench import offline
from phalanx.config.sources import RawOptions

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_shape(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def requested_options(model, **options) -> RawOptions:
    values = {"model": str(model), "load_format": "dummy", "device": "cpu", "kv_cache_bytes": 1 << 22, **options}
    return RawOptions(values, dict.fromkeys(values, "the test"))


@pytest.fixture
def target(tiny_shape):
    with offline.target(requested_options(tiny_shape)) as target:
        yield target


@pytest.fixture(scope="session")
def running(tiny_shape):
    """(target, LLM)"""
    with offline.target(requested_options(tiny_shape)) as target, offline.engine(target) as (llm, seconds):
        assert seconds > 0
        yield target, llm
