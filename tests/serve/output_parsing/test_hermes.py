# SPDX-License-Identifier: Apache-2.0
"""Calls of Hermes and Qwen."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from phalanx.serve.output_parsing.hermes import HermesParser
from tests.support.serve_output_parsing import CALLS, LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def make():
    return HermesParser(NAMES, LETTERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Read("", [])),
        ("Plain text.\n", Read("Plain text.\n", [])),
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            Read("", [("weather", '{"city": "Oslo"}')]),
        ),
        (
            'Let me see.\n<tool_call>{"arguments": {"a": [1, "}<"]}, "name": "add"}</tool_call>\n<tool_call>\n{"name": "add"}\n'
            "</tool_call>\n",
            Read("Let me see.", [("add", '{"a": [1, "}<"]}'), ("add", "{}")]),
        ),
        (
            'a < b <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
            Read('a < b <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', []),
        ),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1', Read("", [("add", '{"a": 1')])),
        ("<tool_call>\nnot json</tool_call> x", Read("<tool_call>\nnot json</tool_call> x", [])),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
            Read("", [("add", '{"a": "\\u00e9"}')]),
        ),
        ("see <tool_c", Read("see <tool_c", [])),
        ('<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>', Read("}", [("add", "")])),
        (CALL + " done", Read(" done", [("add", '{"a": 1}')])),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}} </tool_call>\nend', Read("}\nend", [("add", '{"a": 1}')])),
        (CALL.removesuffix("\n</tool_call>") + CALL, Read("", [("add", '{"a": 1}')] * 2)),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


def test_special_tokens_are_not_letters():
    markers = special("<tool_call>", "</tool_call>")
    assert read(HermesParser(NAMES, markers), [markers.encode(CALL)]).calls == [("add", '{"a": 1}')]
    assert read(HermesParser(NAMES, markers), [CALL]) == Read(CALL, [])


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>' for name, arguments in calls
    ]
    expected = Read("", [(name, json.dumps(arguments)) for name, arguments in calls])
    assert read(make(), cut("\n".join(written), sizes)) == expected


@settings(max_examples=100, deadline=None)
@given(text=shreds("<tool_call>", "</tool_call>", CALL), sizes=SIZES)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text
