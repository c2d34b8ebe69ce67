# SPDX-License-Identifier: Apache-2.0
"""config.json of EAGLE-3 heads: both ways of counting layers, all published formats, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.model import ModelShape
from phalanx.errors import ModelError
from phalanx.layout.eagle3 import Eagle3

LAYER: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
    "vocab_size": 128256, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "model_type": "llama", "rope_theta": 5e5,
}  # fmt: skip
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000, **LAYER}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
    "transformer_layer_config": LAYER, "speculators_config": {"algorithm": "eagle3"},
}  # fmt: skip


def target(layers: int = 32, **traits: Any) -> ModelShape:
    fields = {**LAYER, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, **traits}
    return ModelShape.from_config(fields, quiet=True)


def head(folder: Path, config: dict[str, Any], of: ModelShape | None = None) -> Eagle3:
    (folder / "config.json").write_text(json.dumps(config))
    return Eagle3.from_folder(folder, of or target())


def ids(*layers: int, nested: bool = True) -> dict[str, Any]:
    stated = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return {"eagle_config": stated} if nested else stated


@pytest.mark.parametrize(
    ("config", "layers", "inner"),
    [
        (SPECFORGE, 32, (2, 16, 29)),
        (SPECULATORS, 80, (2, 40, 77)),
        ({**SPECFORGE, **ids(1, 15, 28)}, 32, (2, 16, 29)),
        ({**SPECFORGE, **ids(1, 29, 57)}, 61, (2, 30, 58)),
        ({**SPECFORGE, **ids(46, 1, 90)}, 94, (2, 47, 91)),
        ({**SPECFORGE, **ids(2, 18, 33)}, 36, (2, 18, 33)),
        ({**SPECFORGE, **ids(24, 30, 36, nested=False)}, 36, (24, 30, 36)),
        ({**SPECULATORS, **ids(1, 15, 28, nested=False)}, 32, (1, 15, 28)),
        ({**SPECFORGE, **ids(3, 9, 15, 21)}, 32, (3, 9, 15, 21)),
    ],
    ids=["SafeAILab", "speculators", "SpecForge", "outputs of 61", "in any order", "boundaries", "the end", "from 1 on", "four"],
)  # fmt: skip
def test_inner_states_are_those_before_layers(tmp_path: Path, config: dict[str, Any], layers: int, inner: tuple[int, ...]) -> None:
    read = head(tmp_path, config, target(layers))
    assert read.inner_layers == inner
    assert (read.draft_vocab, read.shape.hidden_size, read.shape.vocab_size) == (32000, 4096, 128256)
    shapes = {tensor.name: tensor.shape for tensor in read.tensors()}
    assert shapes["fc.weight"] == (4096, len(inner) * 4096)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (1024, 8192)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (4096, 4096)
    assert "embed_tokens.weight" not in shapes
    assert "embed_tokens.weight" in {tensor.name for tensor in read.with_embedding(True).tensors()}


@pytest.mark.parametrize(
    ("config", "traits", "parts"),
    [
        ({**LAYER, "architectures": ["LlamaForCausalLM"]}, {}, ["no EAGLE-3 head", "draft_vocab_size"]),
        ({**SPECFORGE, "fc_norm": True}, {}, ["fc_norm", "not built"]),
        ({**SPECFORGE, "num_hidden_layers": 2}, {}, ["num_hidden_layers=2", "one layer"]),
        ({**SPECULATORS, "transformer_layer_config": {**LAYER, "model_type": "qwen3"}}, {}, ["qwen3"]),
        ({**SPECFORGE, "eagle_config": {"use_aux_hidden_state": False}}, {}, ["use_aux_hidden_state=false"]),
        ({**SPECFORGE, **ids(1, 40, 76)}, {}, ["before layers 2, 41, 77", "32 layers", "another target"]),
        (SPECFORGE, {"num_hidden_layers": 4}, ["4 layers", "published default"]),
        (SPECFORGE, {"hidden_size": 8192, "head_dim": 128}, ["another target", "4096", "8192"]),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused(tmp_path: Path, config: dict[str, Any], traits: dict[str, Any], parts: list[str]) -> None:
    of = target(traits.pop("num_hidden_layers", 32), **traits)
    with pytest.raises(ModelError) as error:
        head(tmp_path, config, of)
    for part in parts:
        assert part in str(error.value)


def test_a_head_of_another_width_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    read = head(tmp_path, {**SPECFORGE, "target_hidden_size": 8192}, target(hidden_size=8192, head_dim=128))
    assert {tensor.name: tensor.shape for tensor in read.tensors()}["fc.weight"] == (4096, 3 * 8192)
    assert read.with_embedding(True).own_embedding
    with pytest.raises(ModelError, match="no embedding"):
        read.with_embedding(False)
