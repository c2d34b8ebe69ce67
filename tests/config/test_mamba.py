# SPDX-License-Identifier: Apache-2.0
"""Granite 4's config.json: which layers keep a state, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config.mamba import Mamba2
from phalanx.config.model import ModelShape
from phalanx.config.rope import NOPE
from phalanx.errors import ModelError
from phalanx.layout.families.registry import known

SMALL = known("granite-4.0-h-small") or {}


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
