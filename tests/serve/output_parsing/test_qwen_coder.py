# SPDX-License-Identifier: Apache-2.0
"""Calls of Qwen3-Coder."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.output_parsing.qwen_coder import QwenCoderParser, value_of
from tests.support.serve_output_parsing import LETTERS, SIZES, Read, cut, read, read_all_ways, shreds

ARGUMENTS = {"a": {"type": "integer"}, "b": {"type": ["array", "null"]}, "text": {"type": "string"}}
FUNCTIONS = {"add": {"type": "object", "properties": ARGUMENTS}, "noon": {"type": "object"}}
NOON = "<tool_call>\n<function=noon>\n</function>\n</tool_call>"
ADD = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def make():
    return QwenCoderParser(FUNCTIONS, LETTERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No <call>.", Read("No <call>.", [])),
        (f"I add.\n{ADD}\n{NOON}", Read("I add.", [("add", '{"a": 1}'), ("noon", "{}")])),
        (
            "<tool_call>\n<function=add>\n<parameter=text>\n1\n<b>\n\n</parameter>\n"
            "<parameter=b>\n[1, None]\n</parameter>\n</function>",
            Read("", [("add", '{"text": "1\\n<b>\\n", "b": [1, null]}')]),
        ),
        ("<function=noon></function></tool_call> x", Read(" x", [("noon", "{}")])),
        ("<tool_call><function=add><parameter=a>1</parameter></tool_call>", Read("", [("add", '{"a": 1}')])),
        ("<tool_call><function=add><parameter=a>1", Read("", [("add", "")])),
        ("<tool_call>\n<function=other>\n</function>", Read("<tool_call>\n<function=other>\n</function>", [])),
        ("<tool_call>\n{}</tool_call>", Read("<tool_call>\n{}</tool_call>", [])),
        ("<tool_call>\n<func", Read("<tool_call>\n<func", [])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"),
        ("1", {"type": "integer"}, 1),
        ("1", {}, "1"),
        ("1", None, "1"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("{'a': None}", {"anyOf": [{"type": "object"}]}, {"a": None}),
        ("NaN", {"type": "number"}, "NaN"),
        ("soon", {"type": "number"}, "soon"),
    ],
)
def test_values_follow_the_schema(text, schema, value):
    assert value_of(text, schema) == value


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(),
        "b": st.lists(st.integers() | st.text(max_size=3), max_size=3) | st.none(),
        "text": st.text(alphabet='a"<é\n', max_size=6),
    },
)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(VALUES, max_size=3), sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    texts = [{key: value if key == "text" else json.dumps(value) for key, value in values.items()} for values in calls]
    written = [
        "<tool_call>\n<function=add>\n"
        + "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
        + "</function>\n</tool_call>"
        for values in texts
    ]
    result = read(make(), cut("\n".join(written), sizes))
    assert result.content == ""
    assert [json.loads(arguments) for _, arguments in result.calls] == calls


@settings(max_examples=150, deadline=None)
@given(
    text=shreds("<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>", "</parameter>", "</function>", NOON), sizes=SIZES
)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text
