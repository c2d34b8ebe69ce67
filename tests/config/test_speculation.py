# SPDX-License-Identifier: Apache-2.0
"""`speculative_config`: vLLM's fields, and errors that name what is wrong and what to write instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.config.options import EngineOptions
from phalanx.config.speculation import SpeculativeConfig
from phalanx.errors import OptionError, UnknownOption

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({}, 5, 5), ({"prompt_lookup_max": 3}, 3, 3), ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, 2, 4),
    ],
)  # fmt: skip
def test_lookups_are_as_long_as_those_of_vllm(fields: dict[str, int], least: int, most: int) -> None:
    config = SpeculativeConfig.of({**NGRAM, **fields})
    assert (config.lookup_min, config.lookup_max) == (least, most)


def test_text_and_mapping_are_one_option() -> None:
    fields = {"num_speculative_tokens": 4, "method": "ngram"}
    options = [EngineOptions.of(model="m", speculative_config=value) for value in (NGRAM, json.dumps(fields))]
    assert options[0] == options[1]
    assert options[0].max_drafts == 4
    assert EngineOptions.of(model="m").max_drafts == 0
    assert EngineOptions(**options[0].model_dump()) == options[0]


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("{", ["is no JSON"]),
        ("[]", ["JSON object"]),
        ({"method": "ngram"}, ["num_speculative_tokens", "required"]),
        ({**NGRAM, "num_speculative_tokens": 0}, ["num_speculative_tokens"]),
        ({**NGRAM, "method": "medusa"}, ["medusa", "not built", "ngram"]),
        ({**NGRAM, "model": "m"}, ["'ngram' takes no model"]),
        ({**NGRAM, "method": "draft_model"}, ["'draft_model' needs a model", "Hub id"]),
        ({**NGRAM, "method": "eagle3"}, ["'eagle3' needs a model"]),
        ({**NGRAM, "method": "mtp", "model": "m"}, ["'mtp' takes no model"]),
        ({"method": "draft_model", "model": "m", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, ["looks up no prompt"]),
        ({**NGRAM, "rejection_sample_method": "block"}, ["block", "own noise"]),
        ({**NGRAM, "draft_tensor_parallel_size": 1}, ["draft_tensor_parallel_size", "not supported"]),
        ({**NGRAM, "posterior_threshold": 0.09}, ["posterior_threshold", "does not sample"]),
        ({**NGRAM, "relaxed_delta": 0.1}, ["relaxed_delta", "does not sample"]),
        ({**NGRAM, "unheard_of": 1}, ["unheard_of"]),
        ({**NGRAM, "revision": "main"}, ["revision='main' does nothing", "'ngram' takes no model"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": []}, ["is empty", "no row would verify drafts"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 2], [3, 9, 1]]}, ["[1, 4, 2] and [3, 9, 1]", "in both"]),
        ({"decoding_type": "NGram", "max_draft_len": 4}, ["decoding_type", '"method"']),
        ({**NGRAM, "max_matching_ngram_size": 3}, ['"prompt_lookup_max"']),
        ({**NGRAM, "--speculative-num-draft-tokens": 3}, ['"num_speculative_tokens"']),
        ({**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, ["prompt_lookup_min=3 exceeds prompt_lookup_max=2"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 5]]}, ["[1, 8, 5]"]),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, ["takes one of"]),
        ({**NGRAM, "synthetic_acceptance_length": 2.0}, ["takes one of"]),
        ({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6}, ["from 1 to 5"]),
        ({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]}, ["4 numbers"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(value: Any, parts: list[str]) -> None:
    with pytest.raises(OptionError) as error:
        EngineOptions.of(model="m", speculative_config=value)
    for part in parts:
        assert part in str(error.value)


def test_flags_of_other_engines_lead_to_the_field() -> None:
    with pytest.raises(UnknownOption, match='use the field "method" of speculative_config'):
        EngineOptions.of(model="m", speculative_algorithm="NGRAM")


@pytest.mark.parametrize("length", [1.0, 1.8, 3.3, 5.0])
def test_a_length_gives_equal_rates(length: float) -> None:
    config = SpeculativeConfig.of({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length})
    rates = config.acceptance
    assert rates is not None
    assert len(set(rates)) == 1
    assert sum(rates[0] ** place for place in range(5)) == pytest.approx(length, abs=1e-6)
