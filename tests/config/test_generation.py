# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's defaults of requests."""

from __future__ import annotations

import pytest
import transformers

from phalanx.config.generation import FIELDS, GENERATION, WITHOUT_EFFECT, read_sampling_defaults, require_possible, with_defaults
from phalanx.config.json_fields import JsonFields
from phalanx.config.sampling_params import SamplingParams
from phalanx.errors import ModelError

LLAMA = {
    "_from_model_config": True, "bos_token_id": 128000, "eos_token_id": [128001, 128009], "do_sample": True, "temperature": 0.6,
    "top_p": 0.9, "transformers_version": "4.42.3",
}  # fmt: skip
QWEN = {"do_sample": True, "top_k": 20, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05, "pad_token_id": 151643}


def read(values, config=None):
    fields = JsonFields(values, GENERATION).sorted_by(FIELDS)
    return read_sampling_defaults(fields, config or {}), fields.additions


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        ({}, {}),
        (LLAMA, {"temperature": 0.6, "top_p": 0.9}),
        (QWEN, {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}),
        ({"min_p": 0.05, "top_k": 0, "top_p": None}, {"min_p": 0.05, "top_k": 0}),
        ({"max_new_tokens": 2048, "min_new_tokens": 2}, {"max_tokens": 2048, "min_tokens": 2}),
        ({"do_sample": False, "max_new_tokens": 2048}, {"temperature": 0.0, "max_tokens": 2048}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ],
)
def test_the_defaults_of_known_files(values, defaults):
    assert read(values) == (defaults, [])
    SamplingParams(**require_possible(defaults))


def test_a_folder_of_transformers_4_has_them_in_its_config():
    assert read({}, {"temperature": 0.6, "top_k": 40, "vocab_size": 9})[0] == {"temperature": 0.6, "top_k": 40}
    assert read({"top_p": 0.5}, {"temperature": 0.6})[0] == {"top_p": 0.5}, "generation_config.json replaces it"


def test_what_is_not_honoured_is_named():
    values = {"num_beams": 4, "suppress_tokens": [5], "max_length": 4096, "no_repeat_ngram_size": 0, "typical_p": 1.0, "vendor": 1}
    additions = read(values)[1]
    assert additions == [
        "vendor", *(f"{GENERATION}: {name}" for name in ("max_length=4096", "num_beams=4", "suppress_tokens=[5]"))
    ]  # fmt: skip


def test_the_table_has_every_field_of_transformers_and_its_neutral_values():
    stated = transformers.GenerationConfig().to_dict()
    assert FIELDS.unknown(stated) == []
    assert read({name: value for name, value in stated.items() if value is not None}) == ({}, [])
    assert FIELDS.harmless.isdisjoint(FIELDS.honoured)
    assert WITHOUT_EFFECT.keys() <= FIELDS.honoured


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_k": 0.5}, {"top_p": "0.9"}, {"repetition_penalty": 0}])
def test_impossible_defaults(values):
    with pytest.raises(ModelError, match=r"generation_config\.json states impossible defaults.*--generation_config none"):
        require_possible(read(values)[0])


@pytest.mark.parametrize(
    ("stated", "defaults", "fields"),
    [
        ({"temperature": 0}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"max_tokens": 3}, {"min_tokens": 5}, {"max_tokens": 3, "min_tokens": 3}),
        ({"min_tokens": 9}, {"max_tokens": 5}, {"max_tokens": 9, "min_tokens": 9}),
        ({"min_tokens": 9, "max_tokens": 5}, {}, {"min_tokens": 9, "max_tokens": 5}),
    ],
)
def test_a_stated_field_wins(stated, defaults, fields):
    assert with_defaults(stated, defaults) == fields
