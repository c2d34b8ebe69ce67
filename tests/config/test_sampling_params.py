# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import SamplingParams, StructuredOutputParams
from phalanx.errors import OptionError

NUMBERS = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
}  # fmt: skip
INTEGERS = {"n": (1, 128), "max_tokens": (1, 2**31 - 1), "min_tokens": (0, 32), "top_k": (-1, 2**31 - 1), "logprobs": (0, 20)}


@given(st.sampled_from(sorted(NUMBERS)), st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_is_accepted_or_rejected_by_name(name, value):
    low, high = NUMBERS[name]
    good = math.isfinite(value) and low <= value <= high and not (value == 0 and name in ("top_p", "repetition_penalty"))
    if good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    else:
        with pytest.raises(OptionError, match=name):
            SamplingParams(**{name: value})


@given(st.sampled_from(sorted(INTEGERS)), st.integers() | st.booleans() | st.floats() | st.just("3"))
def test_an_integer_is_accepted_or_rejected_by_name(name, value):
    low, high = INTEGERS[name]
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        assert getattr(SamplingParams(**{name: value}), name) == value
    else:
        with pytest.raises(OptionError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ""), ("stop", ["a", ""]), ("stop", [3]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
        ("logit_bias", {-1: 0.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101.0}), ("seed", 2**63), ("seed", 1.5),
        ("prompt_logprobs", 21), ("n", 0), ("n", 10**9), ("stop", 5), ("stop", ("",)), ("stop_token_ids", 5), ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}), ("structured_output", {"regex": "a"}), ("ignore_eos", "no"), ("detokenize", None),
        ("cache_salt", "\ud800"), ("cache_salt", ""), ("cache_salt", b"a"),
        ("stop", "a\udfff"), ("stop", ["a", "\ud800"]), ("adapter", "\ud800"),
    ],
)  # fmt: skip
def test_bad_values(name, value):
    with pytest.raises(OptionError, match=name):
        SamplingParams(**{name: value})


def test_min_tokens_beyond_max_tokens():
    with pytest.raises(OptionError, match=r"^min_tokens=5 exceeds max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_unknown_field():
    with pytest.raises(TypeError, match="'temprature' is unknown; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="0 without a name"):
        SamplingParams(0)


def test_stops_is_a_list():
    assert SamplingParams().stops == []
    assert SamplingParams(stop="a").stops == ["a"]
    assert SamplingParams(stop=["a", "b"]).stops == SamplingParams(stop=("a", "b")).stops == ["a", "b"]


def test_structured_output_has_one_format():
    with pytest.raises(OptionError, match="exactly one"):
        StructuredOutputParams()
    with pytest.raises(OptionError, match="2 are set"):
        StructuredOutputParams(regex="a", grammar="b")
    assert StructuredOutputParams(json_object=True).json_object
    with pytest.raises(OptionError, match=r"regex='\\ud800' is not valid; character 0 is a surrogate"):
        StructuredOutputParams(regex="\ud800")
    with pytest.raises(OptionError, match=r"json_schema=\{'type': 'object'\} .*json\.dumps"):
        StructuredOutputParams(json_schema={"type": "object"})
    with pytest.raises(TypeError, match="did you mean 'json_schema'"):
        StructuredOutputParams(json_scheme="{}")


def test_travels_in_msgpack():
    params = SamplingParams(stop=["x"], logit_bias={5: 1.5}, structured_output=StructuredOutputParams(regex="a+"), seed=-3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
