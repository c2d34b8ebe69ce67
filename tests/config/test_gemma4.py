# SPDX-License-Identifier: Apache-2.0
"""What layers of Gemma 4 share, and where there is nothing to share."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config.model import ModelShape
from phalanx.errors import LayoutError, ModelError
from phalanx.layout import Layout
from phalanx.layout.families import known
from phalanx.layout.layout import require_suits
from phalanx.layout.weights import stage_layers
from tests.support import checkpoints


def shape(**fields: Any) -> ModelShape:
    config = checkpoints.config_of("gemma4_e", num_hidden_layers=6, **fields).to_dict()
    return ModelShape.from_config({**config, **fields})


@pytest.mark.parametrize(("fields", "message"), [
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6"),
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5; num_hidden_layers=6; before these are 1 layers: sliding_attention"),
    ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1"),
    ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input=300 and vocab_size=384"),
    ({"enable_moe_block": True, "num_experts": None}, "no field moe_intermediate_size"),
])  # fmt: skip
def test_what_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    config = {**checkpoints.config_of("gemma4_e", num_hidden_layers=6).to_dict(), **fields}
    with pytest.raises(ModelError) as caught:
        ModelShape.from_config(config)
    assert message in str(caught.value)


def test_sizes_of_layers_may_be_null_as_those_with_a_window() -> None:
    assert shape(per_layer_config=None, attention_k_eq_v=True).heads_in(5).head_dim == 12


def test_layers_that_share_keys_and_values_are_on_one_stage() -> None:
    e2b = ModelShape.from_config(known("gemma-4-e2b"))
    assert [e2b.kv_layer(layer) for layer in (12, 13, 14, 15, 19, 34)] == [12, 13, 14, 13, 14, 14]
    assert e2b.intermediate_in(14) * 2 == e2b.intermediate_in(15) == 12288
    assert [layer for layer in range(35) if e2b.may_begin_stage(layer)] == list(range(14))
    first, second = stage_layers(e2b, "bf16", 2)
    assert first.stop == second.start <= 13
    require_suits(Layout(pp=14), e2b)
    with pytest.raises(LayoutError, match="pipeline_parallel_size=15 is more than the 14 layers"):
        require_suits(Layout(pp=15), e2b)
