# SPDX-License-Identifier: Apache-2.0
"""Calls of Llama 3 as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from phalanx.serve.output_parsing.llama import LlamaJsonParser
from tests.support.serve_output_parsing import CALLS, LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special


def make():
    return LlamaJsonParser(NAMES, LETTERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Read("", [])),
        ("  ", Read("  ", [])),
        ('{"name": "weather", "parameters": {"city": "a\\"}b"}}', Read("", [("weather", '{"city": "a\\"}b"}')])),
        (
            ' <|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
            Read("", [("add", '{"a": 1}'), ("add", '{"a": 2}')]),
        ),
        ('{"answer": 3, "name": "Bob"}', Read('{"answer": 3, "name": "Bob"}', [])),
        ('  Sure: {"name": "add", "parameters": {}}', Read('  Sure: {"name": "add", "parameters": {}}', [])),
        ('{"name": "add", "param', Read("", [("add", "")])),
        ('{"na', Read('{"na', [])),
        ("<|pyth", Read("<|pyth", [])),
        ('<|python_tag|>{"name": "other"}', Read('<|python_tag|>{"name": "other"}', [])),
        ('{"name": "add", "parameters": {}} I added.', Read(" I added.", [("add", "{}")])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


def test_the_tag_as_a_special_token():
    markers = special("<|python_tag|>")
    text = '<|python_tag|>{"name": "noon", "parameters": {}}'
    assert read(LlamaJsonParser(NAMES, markers), [markers.encode(text)]).calls == [("noon", "{}")]


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    written = [f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}' for name, arguments in calls]
    expected = Read("", [(name, json.dumps(arguments)) for name, arguments in calls])
    assert read(make(), cut("; ".join(written), sizes)) == expected


@settings(max_examples=100, deadline=None)
@given(text=shreds("<|python_tag|>", '{"name": "add", "parameters": {"a": "}"}}', "; "), sizes=SIZES)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text
