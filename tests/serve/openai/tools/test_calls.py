# SPDX-License-Identifier: Apache-2.0
"""Tool calls are read out of text that comes in pieces of any size; the pieces never change the result."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.openai.tools.calls import CallArguments, CallBegin, CallReader, ContentText
from phalanx.serve.openai.tools.formats import HERMES, LLAMA

NAMES = {"weather", "add"}


def read(how, pieces):
    reader = CallReader(how, NAMES)
    events = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
    text = "".join(e.text for e in events if isinstance(e, ContentText))
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    return text, [tuple(call) for call in calls], reader.complete


CASES = [
    (HERMES, "Plain text.\n", ("Plain text.\n", [], 0)),
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
     ("", [("weather", '{"city": "Oslo"}')], 1)),
    (HERMES, 'Let me see.\n<tool_call>{"arguments": {"a": [1, "}<"]}, "name": "add"}</tool_call>\n'
     '<tool_call>\n{"name": "add"}\n</tool_call>\n',
     ("Let me see.", [("add", '{"a": [1, "}<"]}'), ("add", "{}")], 2)),
    (HERMES, 'a < b <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
     ('a < b <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', [], 0)),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1', ("", [("add", '{"a": 1')], 0)),
    (HERMES, "<tool_call>\nnot json</tool_call> x", ("<tool_call>\nnot json</tool_call> x", [], 0)),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
     ("", [("add", '{"a": "\\u00e9"}')], 1)),
    (LLAMA, '{"name": "weather", "parameters": {"city": "a\\"}b"}}', ("", [("weather", '{"city": "a\\"}b"}')], 1)),
    (LLAMA, ' <|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
     ("", [("add", '{"a": 1}'), ("add", '{"a": 2}')], 2)),
    (LLAMA, '{"answer": 3, "name": "Bob"}', ('{"answer": 3, "name": "Bob"}', [], 0)),
    (LLAMA, '  Sure: {"name": "add", "parameters": {}}', ('  Sure: {"name": "add", "parameters": {}}', [], 0)),
    (LLAMA, "", ("", [], 0)),
    (LLAMA, '{"name": "add", "param', ("", [("add", "")], 0)),
    (LLAMA, '{"na', ('{"na', [], 0)),
    (LLAMA, "<|pyth", ("<|pyth", [], 0)),
]  # fmt: skip


@pytest.mark.parametrize(("how", "text", "expected"), CASES, ids=range(len(CASES)))
def test_whole_and_by_character(how, text, expected):
    assert read(how, [text]) == expected
    assert read(how, list(text)) == expected


@settings(max_examples=200, deadline=None)
@given(
    how=st.sampled_from([HERMES, LLAMA]),
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=4), st.text(max_size=6), max_size=3)), max_size=3
    ),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_pieces_never_matter(how, calls, cuts):
    written = [how.opening(name) + json.dumps(arguments) + how.closing() for name, arguments in calls]
    text = how.between.join(written)
    pieces, at, turn = [], 0, 0
    while at < len(text):
        size = cuts[turn % len(cuts)]
        pieces.append(text[at : at + size])
        at, turn = at + size, turn + 1
    content, calls_read, complete = read(how, pieces)
    assert content == ""
    assert calls_read == [(name, json.dumps(arguments)) for name, arguments in calls]
    assert complete == len(calls)


@settings(max_examples=200, deadline=None)
@given(how=st.sampled_from([HERMES, LLAMA]), text=st.text(alphabet='<tool_call>/{}":, naméwd', max_size=60), cut=st.integers(0, 60))
def test_any_text_is_kept(how, text, cut):
    content, calls, _ = read(how, [text])
    assert read(how, [text[:cut], text[cut:]])[:2] == (content, calls)
    if not calls:
        assert content == text
