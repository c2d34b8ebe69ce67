# SPDX-License-Identifier: Apache-2.0
"""Messages of gpt-oss."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.output_parsing.harmony import MARKERS, HarmonyParser, HarmonyTokenCounter
from tests.support.serve_output_parsing import CALLS, LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special

ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


def make():
    return HarmonyParser(NAMES, LETTERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Read("", [])),
        ("Plain.", Read("Plain.", [])),
        ("<|channel|>final<|message|>Hi.<|return|>", Read("Hi.", [])),
        (ANALYSIS + NEXT + "<|channel|>final<|message|>Hi", Read("Hi", [], "Let me see.")),
        (ANALYSIS + NEXT + CALL, Read("", [("add", '{"a": 1}')], "Let me see.")),
        (f'{NEXT} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}<|call|>', Read("", [("add", '{"a": 1}')])),
        (" to=functions.noon<|channel|>commentary json<|message|> <|call|>", Read("", [("noon", "{}")])),
        ("<|channel|>commentary<|message|>I look.<|end|>" + NEXT + CALL, Read("I look.", [("add", '{"a": 1}')])),
        (
            "<|channel|>commentary<|message|>I look.<|end|>" + NEXT + "<|channel|>final<|message|>Found.",
            Read("I look.\n\nFound.", []),
        ),
        (ANALYSIS + NEXT + ANALYSIS, Read("", [], "Let me see.\n\nLet me see.")),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", Read("", [], "1+1")),
        ("<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>", Read("{}", [])),
        ("<|channel|>analysis<|mess", Read("", [])),
        ("<|channel|>" + "a" * 400, Read("<|channel|>" + "a" * 400, [])),
        ("<|channel|>final<|message|>a <|ret", Read("a <|ret", [])),
        ("<|channel|>final<|message|>a" + NEXT + "<|channel|>analysis<|message|>b", Read("a", [], "b")),
        # `<|start|>`, the role or the end of a message left out
        (ANALYSIS + "<|end|><|channel|>final<|message|>hi", Read("hi", [], "Let me see.")),
        (ANALYSIS + "assistant<|channel|>final<|message|>hi", Read("hi", [], "Let me see.")),
        (
            ANALYSIS + "\nassistant to=functions.add<|channel|>commentary<|message|>null<|call|>",
            Read("", [("add", "{}")], "Let me see."),
        ),
        (ANALYSIS.removesuffix("<|end|>") + "<|channel|>final<|message|>hi", Read("hi", [], "Let me see.")),
        (ANALYSIS + "<|message|>hi", Read("hi", [], "Let me see.")),
        (ANALYSIS + "assistants differ", Read("assistants differ", [], "Let me see.")),
        (ANALYSIS + "assist", Read("assist", [], "Let me see.")),
        (ANALYSIS + "well,<|channel|>final<|message|> hi", Read("well, hi", [], "Let me see.")),
        (CALL.removesuffix("<|call|>") + "<|channel|>final<|message|>hi", Read("hi", [("add", '{"a": 1}')])),
        (CALL.replace('{"a": 1}', "nul"), Read("", [("add", "nul")])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


def test_reasoning_can_stay_in_the_content():
    parser = HarmonyParser(NAMES, LETTERS, reasoning=False)
    assert read(parser, [ANALYSIS + NEXT + "<|channel|>final<|message|>Hi"]) == Read("Let me see.\n\nHi", [])


def test_an_explanation_of_the_format_is_text():
    markers = special(*MARKERS)
    answer = "A message begins with <|channel|>final<|message|> and ends with <|end|>."
    text = markers.encode("<|channel|>final<|message|>") + answer + markers.encode("<|return|>")
    assert read_all_ways(lambda: HarmonyParser(NAMES, markers), text) == Read(answer, [])


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, thought=st.text(alphabet="ab <|\n", max_size=9), sizes=SIZES)
def test_messages_are_read_back(calls, thought, sizes):
    markers = special(*MARKERS)
    texts = [f"<|channel|>analysis<|message|>{thought}<|end|>"]
    texts += [f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(a)}<|call|>" for name, a in calls]
    expected = Read("", [(name, json.dumps(arguments)) for name, arguments in calls], thought)
    assert read(HarmonyParser(NAMES, markers), cut(markers.encode(NEXT.join(texts)), sizes)) == expected


@settings(max_examples=100, deadline=None)
@given(text=shreds(*MARKERS, "assistant", ANALYSIS, CALL, "commentary to=functions.add", " to=functions.add"), sizes=SIZES)
def test_pieces_never_matter(text, sizes):
    assert read(make(), cut(text, sizes)) == read(make(), [text])


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_tokens_of_the_reasoning_are_counted(sizes):
    special_ids = {marker: i for i, marker in enumerate(MARKERS)}
    words = {100: "analysis", 101: "final", 102: "assistant", 103: "a"}
    at = special_ids.__getitem__
    tokens = [at("<|channel|>"), 100, at("<|message|>"), 103, 103, 103, at("<|end|>"), at("<|start|>"), 102, at("<|channel|>"), 101]
    tokens += [at("<|message|>"), 103, at("<|return|>")]
    counter = HarmonyTokenCounter(special_ids, lambda ids: "".join(words[i] for i in ids))
    for piece in cut(tokens, sizes):
        counter.push(piece)
    assert counter.count == 3
