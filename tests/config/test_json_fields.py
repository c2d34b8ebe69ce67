# SPDX-License-Identifier: Apache-2.0
"""What null means, against transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from phalanx.config.families import FAMILIES
from phalanx.config.json_fields import JsonFields
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError
from tests.support import checkpoints
from tests.support.models_formation import Formation


def outcome(config: dict[str, Any]) -> ModelShape | str:
    """The shape, or why there is none."""
    try:
        return ModelShape.from_config(config, quiet=True)
    except ModelError as error:
        return str(error).split("=")[0]


def flags_of(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The flags of config.json that are read, or that have one value alone."""
    read, flag = set[str](), JsonFields.flag

    def recorded(fields: JsonFields, name: str, default: bool) -> bool:
        if not fields.prefix:
            read.add(name)
        return flag(fields, name, default)

    with monkeypatch.context() as patch:
        patch.setattr(JsonFields, "flag", recorded)
        outcome(config)
    (architecture,) = config["architectures"]
    refused = FAMILIES[architecture].refused
    return read | {name for name, values in refused.items() if any(isinstance(value, bool) for value in values)}


def test_a_flag_that_is_null_is_false_as_transformers_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 refuses null where a field is declared without it, and keeps it elsewhere; transformers 4 keeps it."""
    kept = set[tuple[str, str]]()
    for family in checkpoints.FAMILIES:
        reference = checkpoints.config_of(family)
        config = reference.to_dict()
        for name in sorted(flags_of(config, monkeypatch)):
            null = {**config, name: None}
            assert outcome(null) == outcome({**config, name: False}), (family, name)
            try:
                theirs = type(reference).from_dict(copy.deepcopy(null))
            except (StrictDataclassError, TypeError):
                continue
            assert not getattr(theirs, name), (family, name)
            kept.add((family, name))
    assert kept >= {
        ("deepseek_v3", "norm_topk_prob"), ("deepseek_v3", "rope_interleave"), ("granite_hybrid", "mamba_conv_bias"),
        ("cohere", "use_qk_norm"), ("ernie4_5", "use_bias"),
    }  # fmt: skip


@pytest.mark.parametrize(("family", "names"), [
    ("deepseek_v3", ("norm_topk_prob", "rope_interleave")), ("granite_hybrid", ("attention_multiplier",)),
])  # fmt: skip
def test_what_is_null_gives_the_logits_of_transformers(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Of all numbers of all families, attention_multiplier alone is computed by transformers, and not as by default."""
    folder = checkpoints.write_checkpoint(tmp_path, family, **dict.fromkeys(names))
    tokens = torch.arange(5, 30)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    torch.testing.assert_close(Formation(folder).step([(0, tokens)])[0], expected, rtol=0, atol=5e-4)


def test_a_rotated_part_that_is_null_is_all_of_a_head() -> None:
    config = checkpoints.config_of("glm4_moe").to_dict()
    del config["rope_parameters"]
    theirs = transformers.Glm4MoeConfig.from_dict({**config, "partial_rotary_factor": None})
    assert "partial_rotary_factor" not in theirs.rope_parameters
    assert ModelShape.from_config({**config, "partial_rotary_factor": None}).rope.portion == 1.0
    assert ModelShape.from_config(config).rope.portion == 0.5


@pytest.mark.parametrize("name", ["mamba_conv_bias", "use_conv_bias"])
def test_a_flag_that_must_be_true_may_not_be_null(name: str) -> None:
    family = "granite_hybrid" if name == "mamba_conv_bias" else "nemotron_h"
    with pytest.raises(ModelError, match=f"{name}=None"):
        ModelShape.from_config({**checkpoints.config_of(family).to_dict(), name: None})
