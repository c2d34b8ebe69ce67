# SPDX-License-Identifier: Apache-2.0
"""Calls of Mistral, in both forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from phalanx.serve.output_parsing.mistral import MARKERS, MistralParser
from tests.support.serve_output_parsing import CALLS, LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special

ADD = '{"name": "add", "arguments": {"a": 1}}'


def make():
    return MistralParser(NAMES, LETTERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No call.", Read("No call.", [])),
        (f"[TOOL_CALLS] [{ADD}]", Read("", [("add", '{"a": 1}')])),
        (
            f'[TOOL_CALLS][{ADD}, {{"name": "noon", "arguments": {{}}, "id": "abcdefghi"}}]',
            Read("", [("add", '{"a": 1}'), ("noon", "{}")]),
        ),
        (f"I look.\n[TOOL_CALLS] {ADD}", Read("I look.", [("add", '{"a": 1}')])),
        (
            '[TOOL_CALLS]add[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]noon[ARGS]{}',
            Read("", [("add", '{"a": {"b": "}"}}'), ("noon", "{}")]),
        ),
        ('[TOOL_CALLS]add[CALL_ID]x12345678[ARGS]{"a": 1}', Read("", [("add", '{"a": 1}')])),
        ('[TOOL_CALLS]add{"a": 1', Read("", [("add", '{"a": 1')])),
        ("[TOOL_CALLS]noon[ARGS]null[TOOL_CALLS]add[ARGS] null", Read("", [("noon", "{}"), ("add", "{}")])),
        ('[TOOL_CALLS] [{"name": "noon", "arguments": null}]', Read("", [("noon", "{}")])),
        ("[TOOL_CALLS]other[ARGS]{}", Read("[TOOL_CALLS]other[ARGS]{}", [])),
        ("[TOOL_CALLS] [1, 2]", Read("[TOOL_CALLS] [1, 2]", [])),
        ("[TOOL_CALLS]", Read("[TOOL_CALLS]", [])),
        ("see [TOOL_", Read("see [TOOL_", [])),
        ('[TOOL_CALLS] [{"name": "other"}]', Read('[TOOL_CALLS] [{"name": "other"}]', [])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


def test_special_tokens_are_not_letters():
    markers = special(*MARKERS)
    text = f"[TOOL_CALLS] [{ADD}]"
    assert read(MistralParser(NAMES, markers), [markers.encode(text)]).calls == [("add", '{"a": 1}')]
    assert read(MistralParser(NAMES, markers), [text]) == Read(text, [])


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    array = ", ".join(json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    named = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    expected = Read("", [(name, json.dumps(arguments)) for name, arguments in calls])
    assert read(make(), cut(named, sizes)) == expected
    if calls:
        assert read(make(), cut(f"[TOOL_CALLS] [{array}]", sizes)) == expected


@settings(max_examples=100, deadline=None)
@given(text=shreds(*MARKERS, "[", ADD, "add", '{"a": 1}', ", "), sizes=SIZES)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text
