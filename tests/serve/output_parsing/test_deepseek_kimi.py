# SPDX-License-Identifier: Apache-2.0
"""Calls of Kimi-K2."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from phalanx.serve.output_parsing import CallBegin
from phalanx.serve.output_parsing.deepseek import KIMI_MARKERS, KimiParser
from tests.support.serve_output_parsing import CALLS, LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special

BEGIN, END, CALL, CALL_END, ARGUMENTS = KIMI_MARKERS
RECORDED = (
    "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "New\\nYork }", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.noon:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
"""As the chat template writes two calls."""
CALLED = Read("I look.", [("weather", '{"city": "New\\nYork }", "days": 3}'), ("noon", "{}")])


def written(name, arguments, index=0):
    return f"{CALL}functions.{name}:{index}{ARGUMENTS}{arguments}{CALL_END}"


def make():
    return KimiParser(NAMES, LETTERS)


def test_recorded_calls_split_anywhere():
    assert read_all_ways(make, RECORDED) == CALLED
    for at in range(len(RECORDED)):
        assert read(make(), [RECORDED[:at], RECORDED[at:]]) == CALLED, RECORDED[:at]


def test_the_ids_are_the_models():
    events = make().push(RECORDED)
    assert [event.id for event in events if isinstance(event, CallBegin)] == ["functions.weather:0", "functions.noon:1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No call.", Read("No call.", [])),
        (BEGIN + "\n" + written("add", '{"a": 1}', 7) + "\n" + END + " Done.", Read(" Done.", [("add", '{"a": 1}')])),
        (BEGIN + written("add", "{}").replace("functions.", "") + END, Read("", [("add", "{}")])),
        (BEGIN + written("noon", "null") + END, Read("", [("noon", "{}")])),
        (BEGIN + written("other", "{}") + END, Read(BEGIN + written("other", "{}") + END, [])),
        (BEGIN + written("add", "{}").replace(":0", "") + END, Read(BEGIN + written("add", "{}").replace(":0", "") + END, [])),
        (written("add", "{}"), Read("", [("add", "{}")])),
        (BEGIN, Read(BEGIN, [])),
        (BEGIN + CALL + "functions.add:0", Read(BEGIN + CALL + "functions.add:0", [])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


@pytest.mark.parametrize("markers", [LETTERS, special(*KIMI_MARKERS)], ids=["letters", "tokens"])
def test_singular_tags_of_the_section(markers):
    """As a quantized model writes them; they are no tokens of the vocabulary."""
    singular = ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")
    text = markers.encode(RECORDED.replace(BEGIN, singular[0]).replace(END, singular[1] + " Done."))
    assert read_all_ways(lambda: KimiParser(NAMES, markers), text) == CALLED._replace(content="I look. Done.")
    for tag in singular:
        assert read_all_ways(lambda: KimiParser(NAMES, markers), f"{tag} is a tag.") == Read(f"{tag} is a tag.", [])


@pytest.mark.parametrize("head", ["functions_add_2:7", "functions_add_2_7", "functions.add_2_7", "functionsadd_2:7", "add_2:7"])
def test_ids_with_other_separators(head):
    """As the model writes them once a client has sent an id back with other characters."""
    parser = KimiParser({"add_2": {}, "add": {}}, LETTERS)
    events = parser.push(f"{BEGIN}{CALL}{head}{ARGUMENTS}{{}}{CALL_END}{END}")
    assert [(event.name, event.id) for event in events if isinstance(event, CallBegin)] == [("add_2", "functions.add_2:7")]


def test_ids_of_one_completion_differ():
    events = make().push(BEGIN + written("add", "{}") * 2 + written("noon", "{}") + written("add", "{}", 1) + END)
    ids = [event.id for event in events if isinstance(event, CallBegin)]
    assert ids == ["functions.add:0", "functions.add:1", "functions.noon:0", "functions.add:2"]


def test_special_tokens_are_not_letters():
    markers = special(*KIMI_MARKERS)
    assert read(KimiParser(NAMES, markers), [markers.encode(RECORDED)]) == CALLED
    assert read(KimiParser(NAMES, markers), [RECORDED]) == Read(RECORDED, [])


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    text = "".join(written(name, json.dumps(arguments), index) for index, (name, arguments) in enumerate(calls))
    expected = Read("", [(name, json.dumps(arguments)) for name, arguments in calls])
    assert read(make(), cut(BEGIN + text + END if calls else "", sizes)) == expected


@settings(max_examples=100, deadline=None)
@given(text=shreds(*KIMI_MARKERS, BEGIN + written("add", "{}"), "functions.add:0", ARGUMENTS, "{}"), sizes=SIZES)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text
