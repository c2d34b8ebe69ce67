# SPDX-License-Identifier: Apache-2.0
"""Reasoning between tags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.output_parsing.deepseek import KIMI_MARKERS, KimiParser
from phalanx.serve.output_parsing.events import ContentParser
from phalanx.serve.output_parsing.formats import CALLS
from phalanx.serve.output_parsing.reasoning import AnswerParser, Begin, ReasoningParser, TagTokenCounter
from tests.support.serve_output_parsing import LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def hermes():
    return CALLS["hermes"].parser(NAMES, LETTERS, CALLS["hermes"].syntax)


def make(begin, answer=ContentParser):
    return ReasoningParser("<think>", "</think>", answer(), begin)


@pytest.mark.parametrize(
    ("begin", "text", "expected"),
    [
        (Begin.OPEN, "<think>\nHm.\n\nYes.\n</think>\n\nHello.", Read("Hello.", [], "Hm.\n\nYes.")),
        (Begin.OPEN, "Hello. <think>no</think>", Read("Hello. <think>no</think>", [])),
        (Begin.OPEN, "  <thinking", Read("  <thinking", [])),
        (Begin.OPEN, " <thi", Read(" <thi", [])),
        (Begin.OPEN, "<think>\n\n</think>\n\nHello.", Read("Hello.", [])),
        (Begin.INSIDE, "Hm. </think>Hello. </think> <think>", Read("Hello. </think> <think>", [], "Hm.")),
        (Begin.INSIDE, "<think>\nHm.</think>Hello.", Read("Hello.", [], "Hm.")),
        (Begin.INSIDE, "Hm. </thi", Read("", [], "Hm. </thi")),
        (Begin.INSIDE, "a < b </ think>", Read("", [], "a < b </ think>")),
        (Begin.AFTER, "\n\nHello.</think>", Read("Hello.</think>", [])),
        (Begin.OPEN, "", Read("", [])),
    ],
)
def test_cases(begin, text, expected):
    assert read_all_ways(lambda: make(begin), text) == expected


def test_calls_follow_the_reasoning():
    text = f"<think>I could write {CALL}.</think>\n\nI look.\n{CALL}"
    result = read_all_ways(lambda: make(Begin.OPEN, hermes), text)
    assert result == Read("I look.", [("add", '{"a": 1}')], f"I could write {CALL}.")


def test_a_special_token_that_begins_calls_ends_the_reasoning():
    markers = special(*KIMI_MARKERS)
    begin, end, call, call_end, arguments = map(markers.encode, KIMI_MARKERS)
    text = f"<think>Hm.\n{begin}{call}functions.add:0{arguments}{{}}{call_end}{end}"

    def parser():
        return ReasoningParser(
            "<think>", "</think>", KimiParser(NAMES, markers), Begin.OPEN, (begin, lambda: KimiParser(NAMES, markers))
        )

    assert read_all_ways(parser, text) == Read("", [("add", "{}")], "Hm.")


MINIMAX_CALL = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n</minimax:tool_call>'
)


def unclosed(name):
    format_ = CALLS[name]

    def calls():
        return format_.parser(NAMES, LETTERS, format_.syntax)

    return ReasoningParser("<think>", "</think>", calls(), Begin.INSIDE, (format_.syntax.trigger, calls))


@pytest.mark.parametrize(("name", "call"), [("minimax_m2", MINIMAX_CALL), ("hermes", CALL)])
def test_calls_end_a_reasoning_without_closing_tag(name, call):
    called = [("weather", '{"city": "Oslo"}')] if name == "minimax_m2" else [("add", '{"a": 1}')]
    tag = CALLS[name].syntax.trigger
    for text, expected in (
        (f"Hm.\n{call}\n", Read("", called, "Hm.")),
        (call, Read("", called)),
        (f"The tag {tag} begins it.\n{call}", Read("", called, f"The tag {tag} begins it.")),
        # The reasoning goes on behind them, is closed, or ends within them.
        (f"Say {call} or so.", Read("", [], f"Say {call} or so.")),
        (f"Say {call}\n</think>\nNo.", Read("No.", [], f"Say {call}")),
        (f"Say {call}\n</think>\n{call}", Read("", called, f"Say {call}")),
        (f"Say {call[:-30]}", Read("", [], f"Say {call[:-30]}")),
        (f"Say {tag}", Read("", [], f"Say {tag}")),
        (f"Say {call.replace('weather', 'other').replace('add', 'other')}",) * 2,
    ):
        wanted = expected if isinstance(expected, Read) else Read("", [], expected)
        assert read_all_ways(lambda: unclosed(name), text) == wanted, text


@settings(max_examples=150, deadline=None)
@given(text=shreds("<think>", "</think>", MINIMAX_CALL, "<minimax:tool_call>", "\n\n"), sizes=SIZES)
def test_pieces_never_matter_without_closing_tag(text, sizes):
    assert read(unclosed("minimax_m2"), cut(text, sizes)) == read(unclosed("minimax_m2"), [text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>Hm.</think>\n\n<response>\nHello.\n\nBye.\n</response>\n", Read("Hello.\n\nBye.", [], "Hm.")),
        (f"<think>Hm.</think>\n\n{CALL}\n", Read("", [("add", '{"a": 1}')], "Hm.")),
        (f"<response>I look.</response>{CALL}", Read("I look.", [("add", '{"a": 1}')])),
        ("<response>a</response>\n<response>b</response>", Read("ab", [])),
        ("Hello <response>.", Read("Hello <response>.", [])),
        ("<response>Hel", Read("Hel", [])),
        ("<resp", Read("<resp", [])),
        (" Hello", Read(" Hello", [])),
        ("", Read("", [])),
    ],
)
def test_tags_around_the_answer(text, expected):
    def parser():
        return make(Begin.OPEN, lambda: AnswerParser("<response>", "</response>", hermes()))

    assert read_all_ways(parser, text) == expected
    for at in range(len(text)):
        assert read(parser(), [text[:at], text[at:]]) == expected


@settings(max_examples=100, deadline=None)
@given(text=shreds("<think>", "</think>", "<response>", "</response>", CALL), sizes=SIZES)
def test_pieces_never_matter_with_tags_around_the_answer(text, sizes):
    def parser():
        return make(Begin.OPEN, lambda: AnswerParser("<response>", "</response>", hermes()))

    assert read(parser(), cut(text, sizes)) == read(parser(), [text])


@settings(max_examples=150, deadline=None)
@given(begin=st.sampled_from(Begin), text=shreds("<think>", "</think>", "\n\n", CALL), sizes=SIZES)
def test_pieces_never_matter(begin, text, sizes):
    def parser():
        return make(begin, hermes)

    assert read(parser(), cut(text, sizes)) == read(parser(), [text])


@pytest.mark.parametrize(
    ("begin", "tokens", "count"),
    [
        (Begin.OPEN, [1, 5, 5, 2, 5], 2),
        (Begin.OPEN, [6, 1, 5, 2, 5, 1, 5], 1),
        (Begin.OPEN, [5, 1, 5, 2], 0),
        (Begin.INSIDE, [5, 6, 5], 3),
        (Begin.INSIDE, [1, 5, 2, 5], 1),
        (Begin.INSIDE, [5, 3, 5], 1),
        (Begin.AFTER, [5, 2, 5], 0),
    ],
)
def test_tokens_are_counted(begin, tokens, count):
    for size in (1, 2, len(tokens)):
        counter = TagTokenCounter(1, (2, 3), {1: "<think>", 2: "</think>", 5: "a", 6: "\n"}.__getitem__, begin)
        for piece in cut(tokens, [size]):
            counter.push(piece)
        assert counter.count == count
