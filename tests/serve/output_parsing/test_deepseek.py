# SPDX-License-Identifier: Apache-2.0
"""Calls of DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from phalanx.serve.output_parsing.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, MARKERS, SEPARATOR, DeepSeekParser
from tests.support.serve_output_parsing import CALLS, LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special


def fenced(name, arguments):
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def bare(name, arguments):
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def make():
    return DeepSeekParser(NAMES, LETTERS)


ONE = [("add", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No call.", Read("No call.", [])),
        (CALLS_BEGIN + fenced("add", '{"a": 1}') + CALLS_END, Read("", ONE)),
        (
            f"I look.{CALLS_BEGIN}{fenced('add', '{}')}\n{fenced('noon', '{}')}{CALLS_END} Done.",
            Read("I look. Done.", [("add", "{}"), ("noon", "{}")]),
        ),
        (CALLS_BEGIN + bare("add", '{"a": 1}') + bare("noon", "{}") + CALLS_END, Read("", [*ONE, ("noon", "{}")])),
        (bare("add", '{"a": 1}'), Read("", ONE)),
        (CALLS_BEGIN + bare("add", '{"a": 1}').removesuffix(CALL_END) + CALLS_END, Read("", ONE)),
        (CALLS_BEGIN + bare("add", '{"a": "`'), Read("", [("add", '{"a": "`' + CALL_END)])),
        (CALLS_BEGIN + bare("other", "{}") + CALLS_END, Read(CALLS_BEGIN + bare("other", "{}") + CALLS_END, [])),
        (CALLS_BEGIN + fenced("add", '{"a": 1}').removesuffix(CALL_END) + "\n" + "Done. " * 20, Read("Done. " * 19 + "Done.", ONE)),
        (CALLS_BEGIN + bare("noon", "null") + fenced("noon", "null") + CALLS_END, Read("", [("noon", "{}")] * 2)),
        (CALLS_BEGIN, Read(CALLS_BEGIN, [])),
        (CALLS_BEGIN[:9], Read(CALLS_BEGIN[:9], [])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


def test_special_tokens_are_not_letters():
    markers = special(*MARKERS)
    text = CALLS_BEGIN + fenced("add", '{"a": 1}') + CALLS_END
    assert read(DeepSeekParser(NAMES, markers), [markers.encode(text)]).calls == ONE
    assert read(DeepSeekParser(NAMES, markers), [text]) == Read(text, [])


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    expected = Read("", [(name, json.dumps(arguments)) for name, arguments in calls])
    for between, written in (("\n", fenced), ("", bare)):
        text = between.join(written(name, json.dumps(arguments)) for name, arguments in calls)
        assert read(make(), cut(CALLS_BEGIN + text + CALLS_END if calls else "", sizes)) == expected


@settings(max_examples=100, deadline=None)
@given(
    text=shreds(*MARKERS, CALLS_BEGIN + fenced("add", "{}"), "function" + SEPARATOR + "add\n```json\n", "{}", "add"), sizes=SIZES
)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text
