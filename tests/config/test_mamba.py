# SPDX-License-Identifier: Apache-2.0
"""Granite 4's and Nemotron-H's config.json: which layers keep a state, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config.mamba import Mamba2
from phalanx.config.model import ModelShape
from phalanx.config.rope import NOPE
from phalanx.errors import ModelError
from phalanx.layout.families.registry import known

SMALL = known("granite-4.0-h-small") or {}
NANO = known("nemotron-3-nano-30b-a3b") or {}


def test_granite_4_h_small() -> None:
    shape = ModelShape.from_config(SMALL)
    layers = tuple(layer for layer in range(40) if layer not in (5, 15, 25, 35))
    assert shape.mamba == Mamba2(layers, 128, 64, 1, 128, 4)
    assert shape.recurrent is shape.mamba
    assert {shape.rope_in(layer) for layer in range(40)} == {NOPE}
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.per_token, shape.experts.intermediate, shape.experts.shared) == (72, 10, 768, 1536)


def test_a_model_of_attention_alone_has_no_states() -> None:
    """Granite 4.0 micro: its layers are all of attention, with RoPE, and it has no experts."""
    fields = {"layer_types": ["attention"] * 40, "position_embedding_type": "rope", "num_local_experts": 0}
    shape = ModelShape.from_config({**SMALL, **fields})
    assert (shape.recurrent, shape.experts, shape.layer_ropes, shape.intermediate_size) == (None, None, (), 1536)


@pytest.mark.parametrize(("field", "value"), [
    ("layer_types", ["mamba"] * 39), ("layer_types", ["mamba"] * 39 + ["moe"]), ("mamba_n_groups", 3), ("mamba_d_head", 32),
    ("mamba_d_conv", 1), ("mamba_conv_bias", False), ("mamba_proj_bias", True), ("time_step_limit", [0.0, 0.1]),
    ("position_embedding_type", "alibi"), ("normalization_function", "layernorm"), ("hidden_act", "gelu"),
])  # fmt: skip
def test_what_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=field):
        ModelShape.from_config({**SMALL, field: value})


@pytest.mark.parametrize("limit", [None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]])
def test_no_limit_of_time_steps_is_none(limit: Any) -> None:
    assert ModelShape.from_config({**SMALL, "time_step_limit": limit}).mamba is not None


def test_nemotron_3_nano() -> None:
    shape = ModelShape.from_config(NANO)
    assert shape.mamba is not None
    assert (len(shape.mamba.layers), shape.mamba.heads, shape.mamba.groups, shape.mamba.inner) == (23, 64, 8, 4096)
    assert [layer for layer, block in enumerate(shape.blocks) if block == "attention"] == [5, 12, 19, 26, 33, 42]
    assert (shape.norms, shape.activation, shape.rope, shape.num_kv_heads) == ("single", "relu2", NOPE, 2)
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.per_token, shape.experts.shared, shape.experts.gated) == (128, 6, 3712, False)
    assert [shape.experts_in(layer) is not None for layer in range(4)] == [False, True, False, True]


def test_transformers_writes_types_and_no_number_of_layers() -> None:
    written = {name: value for name, value in NANO.items() if name not in ("num_hidden_layers", "hybrid_override_pattern")}
    types = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    written["layers_block_type"] = [types[letter] for letter in NANO["hybrid_override_pattern"]]
    assert ModelShape.from_config(written) == ModelShape.from_config(NANO)


@pytest.mark.parametrize(("field", "value"), [
    ("hybrid_override_pattern", "M" * 51 + "X"), ("hybrid_override_pattern", "M" * 51), ("layers_block_type", ["moe"] * 52),
    ("n_groups", 3), ("conv_kernel", 1), ("use_conv_bias", False), ("moe_latent_size", 1024), ("mlp_hidden_act", "silu"),
    ("mamba_hidden_act", "gelu"), ("residual_in_fp32", True), ("sliding_window", 4096), ("attention_bias", True),
    ("topk_group", 2), ("num_experts_per_tok", 129),
])  # fmt: skip
def test_what_is_refused_of_nemotron_h(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=field):
        ModelShape.from_config({**NANO, field: value})
