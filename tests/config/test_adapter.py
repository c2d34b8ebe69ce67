# SPDX-License-Identifier: Apache-2.0
"""adapter_config.json: what is honoured, and what is refused by name."""

from __future__ import annotations

import json
import logging

import pytest

from phalanx.config.adapter import FIELDS, AdapterConfig
from phalanx.errors import ModelError
from tests.support.adapters import CONFIG, scale_of

MODULE = "model.layers.3.mlp.up_proj"


@pytest.mark.parametrize("change", [
    {}, {"use_rslora": True}, {"r": 16, "lora_alpha": 1}, {"rank_pattern": {"up_proj": 3}}, {"alpha_pattern": {"mlp.up_proj": 5}},
    {"rank_pattern": {"p_proj": 3, "layers.3.mlp.up_proj": 2, "up_proj": 1}, "alpha_pattern": {"q_proj": 1}, "use_rslora": True},
    {"rank_pattern": {MODULE: 6}}, {"rank_pattern": {r"^model\.layers\.3\.mlp\.up_proj": 6}},
])  # fmt: skip
def test_ranks_and_scales_are_those_of_peft(change):
    values = {**CONFIG, **change}
    config = AdapterConfig.from_values(values)
    assert config.scale_of(MODULE) == pytest.approx(scale_of({**values, "rank_pattern": plain(values["rank_pattern"])}, MODULE))


def plain(pattern):
    return {key.removeprefix("^"): rank for key, rank in pattern.items()}


def test_the_defaults_are_those_of_peft():
    config = AdapterConfig.from_values({"peft_type": "LORA"})
    assert (config.rank, config.alpha, config.root_of_rank, config.target_modules) == (8, 8.0, False, None)


@pytest.mark.parametrize(("field", "value"), [
    ("bias", "all"), ("bias", "lora_only"), ("lora_bias", True), ("use_dora", True), ("modules_to_save", ["lm_head"]),
    ("fan_in_fan_out", True), ("target_parameters", ["mlp.experts.down_proj"]), ("trainable_token_indices", [1, 2]),
    ("layer_replication", [[0, 2]]), ("megatron_config", {"a": 1}), ("alora_invocation_tokens", [1]), ("use_qalora", True),
    ("use_bdlora", {"nblocks": 2}), ("loftq_config", {"loftq_bits": 4}), ("init_lora_weights", "pissa"),
    ("init_lora_weights", "olora"), ("corda_config", {"x": 1}), ("ensure_weight_tying", True),
])  # fmt: skip
def test_what_changes_the_output_and_is_not_computed_is_refused_by_name(field, value):
    with pytest.raises(ModelError, match=f"{field}="):
        AdapterConfig.from_values({**CONFIG, field: value})
    nothing = FIELDS.refused[field]
    for value in (None, *nothing):
        AdapterConfig.from_values({**CONFIG, field: value})


@pytest.mark.parametrize(("change", "failure"), [
    ({"peft_type": "IA3"}, "peft_type='IA3'"), ({"peft_type": None}, "peft_type=None"), ({"r": 0}, "r=0"), ({"r": True}, "r=True"),
    ({"lora_alpha": float("nan")}, "lora_alpha=nan"), ({"lora_alpha": -1}, "lora_alpha=-1"), ({"use_rslora": 1}, "use_rslora=1"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj=0"), ({"rank_pattern": [1]}, "rank_pattern="),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern.q_proj='8'"), ({"target_modules": [1]}, "target_modules="),
    ({"rank_pattern": {"(a+)+b": 2}}, r"rank_pattern has the key '\(a\+\)\+b'"),
])  # fmt: skip
def test_impossible_values_are_refused_by_name(change, failure):
    with pytest.raises(ModelError, match=failure):
        AdapterConfig.from_values({**CONFIG, **change})


def test_a_field_that_nobody_knows_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        AdapterConfig.from_values({**CONFIG, "use_newest_trick": True, "another": None})
    assert "Phalanx knows nothing of use_newest_trick: not used" in caplog.text
    assert "another" not in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{", b"\xff\xfe{}", "[" * 100_000, None])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, content):
    if content is not None:
        (tmp_path / "adapter_config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        AdapterConfig.from_folder(tmp_path)


def test_a_file_of_megabytes_is_not_read(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, "revision": "x" * (2 << 20)}))
    with pytest.raises(ModelError, match="is too large"):
        AdapterConfig.from_folder(tmp_path)


@pytest.mark.parametrize(("targets", "named"), [
    (["up_proj", "q_proj"], True), (["mlp.up_proj"], True), ([MODULE], True), (["p_proj"], False), (["q_proj"], False), ([], False),
    ("all-linear", True), (r".*\.q_proj", True), (None, True),
])  # fmt: skip
def test_which_modules_are_targets(targets, named):
    assert AdapterConfig.from_values({**CONFIG, "target_modules": targets}).targets(MODULE) is named
