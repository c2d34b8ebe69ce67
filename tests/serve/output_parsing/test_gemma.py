# SPDX-License-Identifier: Apache-2.0
"""Calls and reasoning of Gemma 4."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import OptionError
from phalanx.serve.output_parsing.events import ContentParser
from phalanx.serve.output_parsing.formats import CALLS, REASONING
from phalanx.serve.output_parsing.gemma import QUOTE
from phalanx.serve.output_parsing.reasoning import Begin, ReasoningParser
from phalanx.serve.output_parsing.structural_tags import structural_tag
from tests.support.grammars import accepts, opened
from tests.support.serve_output_parsing import LETTERS, NAMES, SIZES, Read, bare, cut, read, read_all_ways, shreds, special

FORMAT = CALLS["gemma4"]
TOKENS = special(*FORMAT.markers)
NOON = "<|tool_call>call:noon{}<tool_call|>"
OSLO = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'


def make(markers=LETTERS):
    return FORMAT.parser(NAMES, markers, FORMAT.syntax)


@pytest.mark.parametrize("markers", [LETTERS, TOKENS], ids=["letters", "tokens"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No <|call>.", Read("No <|call>.", [])),
        (f"I look.\n{OSLO}{NOON}", Read("I look.", [("weather", '{"city": "Oslo", "days": 3}'), ("noon", "{}")])),
        (
            "<|tool_call>call:add{a:-1.5e3,b:true,c:false,d:null,e:None}<tool_call|>",
            Read("", [("add", '{"a": -1.5e3, "b": true, "c": false, "d": null, "e": null}')]),
        ),
        (
            '<|tool_call>call:add{a:[<|"|>x, [y]<|"|>,[],{}],b:{c:{d:<|"|>{"e": "\n"}<|"|>},f:[{g:1},2]}}<tool_call|>',
            Read("", [("add", '{"a": ["x, [y]", [], {}], "b": {"c": {"d": "{\\"e\\": \\"\\n\\"}"}, "f": [{"g": 1}, 2]}}')]),
        ),
        # White space, a key with quotes, an empty string, commas at the ends, and strings without quotes.
        (
            '<|tool_call> call: add { <|"|>a:b<|"|> : <|"|><|"|> , c d : [ 1 , x y , ] , e : 007 , } <tool_call|> Done.',
            Read(" Done.", [("add", '{"a:b": "", "c d": [1, "x y"], "e": "007"}')]),
        ),
        # Strings in the quotes of Python and JSON, as models write them within arrays and objects.
        (
            "<|tool_call>call:add{a:'it's, {so}: é',b:['x', \"y\" ],'c':'',\"d\":{\"e\": \"f\"}}<tool_call|>",
            Read("", [("add", '{"a": "it\'s, {so}: é", "b": ["x", "y"], "c": "", "d": {"e": "f"}}')]),
        ),
        (
            r"""<|tool_call>call:add{a:'it\'s\n "\d" \u00e9',b:"\"\\",c='\u00',d:1}<tool_call|>""",
            Read("", [("add", r"""{"a": "it's\n \"\\d\" \u00e9", "b": "\"\\", "c": "\\u00", "d": 1}""")]),
        ),
        # The first quote of a string is missing.
        ('<|tool_call>call:add{a:in Oslo<|"|>,b:[7<|"|>]}<tool_call|>', Read("", [("add", '{"a": "in Oslo", "b": ["7"]}')])),
        ("<|tool_call>call:add{a:'Os", Read("", [("add", '{"a": "Os')])),
        (f"<|tool_call>call:add{{a:'tis}}<tool_call|>{NOON}", Read("", [("add", '{"a": "tis}'), ("noon", "{}")])),
        # The first tag is missing, as behind reasoning; elsewhere that is text.
        ("call:noon{}<tool_call|>" + OSLO, Read("", [("noon", "{}"), ("weather", '{"city": "Oslo", "days": 3}')])),
        ("Write call:noon{}", Read("Write call:noon{}", [])),
        ("call:other{}", Read("call:other{}", [])),
        ("call:noon", Read("call:noon", [])),
        # Calls of other functions, and no calls.
        (OSLO.replace("weather", "other"), Read(OSLO.replace("weather", "other"), [])),
        ("<|tool_call>[]", Read("<|tool_call>[]", [])),
        # Calls that max_tokens ends, and arguments that break the format.
        ("<|tool_call>call:weather", Read("<|tool_call>call:weather", [])),
        ("<|tool_call>call:weather{ci", Read("", [("weather", "{")])),
        ('<|tool_call>call:weather{city:<|"|>Os', Read("", [("weather", '{"city": "Os')])),
        ("<|tool_call>call:weather{days:3", Read("", [("weather", '{"days": ')])),
        (f"<|tool_call>call:weather{{days:3<tool_call|>{NOON}", Read("", [("weather", '{"days": 3'), ("noon", "{}")])),
        (f"<|tool_call>call:weather{{days<tool_call|>{NOON}", Read("days<tool_call|>", [("weather", "{"), ("noon", "{}")])),
        ("<|tool_call>call:weather{days:[3}} x", Read("}} x", [("weather", '{"days": [3')])),
    ],
)  # fmt: skip
def test_cases(text, expected, markers):
    result = read_all_ways(lambda: make(markers), markers.encode(text))
    assert result._replace(content=markers.decode(result.content)) == expected


def test_the_token_that_ends_a_call_ends_a_string_whose_quote_is_missing():
    text = TOKENS.encode(f'<|tool_call>call:weather{{city:<|"|>Oslo}}<tool_call|>{NOON}')
    assert read_all_ways(lambda: make(TOKENS), text) == Read("", [("weather", '{"city": "Oslo}'), ("noon", "{}")])


def test_letters_of_a_special_token_are_text():
    text = TOKENS.encode('<|tool_call>call:weather{city:<|"|>') + QUOTE + TOKENS.encode('<|"|>}<tool_call|>') + NOON
    assert read_all_ways(lambda: make(TOKENS), text) == Read(NOON, [("weather", json.dumps({"city": QUOTE}))])


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=6).filter(lambda text: "<" not in text)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,4}", fullmatch=True), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,4}", fullmatch=True), VALUES, max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), max_size=3), SIZES, st.sampled_from([LETTERS, TOKENS]))
def test_what_is_written_comes_back(calls, sizes, markers):
    text = "".join(f"<|tool_call>call:{name}{bare(arguments, QUOTE)}<tool_call|>" for name, arguments in calls)
    result = read(make(markers), cut(markers.encode(text), sizes))
    assert result.content == ""
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == calls


@settings(max_examples=150, deadline=None)
@given(
    shreds("a:'", "\\'", "'", "\\u00", OSLO, NOON, "<|tool_call>call:add{", QUOTE, "a:", "[", "1}"),
    SIZES,
    st.sampled_from([LETTERS, TOKENS]),
)
def test_how_a_text_is_cut_changes_nothing(text, sizes, markers):
    encoded = markers.encode(text)
    assert read(make(markers), cut(encoded, sizes)) == read_all_ways(lambda: make(markers), encoded)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nHm.\nYes.\n<channel|>It is.", Read("It is.", [], "Hm.\nYes.")),
        ("<|channel>thought\n<channel|>It is.", Read("It is.", [], "")),
        ("<|channel>thoug", Read("<|channel>thoug", [], "")),
        ("It is.", Read("It is.", [], "")),
    ],
)
def test_reasoning(text, expected):
    tags = REASONING["gemma4"].tags

    def parser():
        return ReasoningParser(tags.opening + tags.label, tags.closing, ContentParser(), Begin.OPEN)

    assert read_all_ways(parser, text) == expected


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"]}


def matcher(properties, **more):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more}
    format_ = {"type": "json_schema", "json_schema": schema, "tool": "f", "quote": QUOTE, "special": {}}
    return opened("structural_tag", structural_tag(format_))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": "^a+$"}, ['<|"|>aa<|"|>'], ['<|"|>ab<|"|>', "aa", '"aa"', '<|"|><|"|>']),
        ({"type": "string", "maxLength": 2}, ['<|"|><|"|>', '<|"|>a,<|"|>'], ['<|"|>abc<|"|>']),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, ["[1,2]", "[1,2,3,4]"], ["[]", "[1]", "[1, 2]", "[1,2,]"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[]", "[1]", "[1,2]"], ["[1,2,3]"]),
        ({"type": ["integer", "null"], "minimum": 3}, ["3", "null", "None"], ["2", "3.5", "true", '<|"|>3<|"|>']),
        ({"enum": ["null", None, [1, {"b": "x", "A": 2}]]}, ['<|"|>null<|"|>', "null", '[1,{A:2,b:<|"|>x<|"|>}]'], ["[1]"]),
        ({"$ref": "#/$defs/node"}, ["{next:null}", "{next:{next:{next:None}}}"], ["{}", "null", "{next:{}}"]),
        ({}, ['{a:[1,<|"|>b<|"|>],c.d:{}}', "[]", "1", "true"], ['"b"', "{a}", "{<}"]),
        (
            {"type": "object", "properties": {"b": {"type": "null"}, "A": {"type": "null"}, "a:b": {"type": "null"}}},
            ["{}", "{A:null}", "{b:null}", "{A:null,b:null}", '{<|"|>a:b<|"|>:null,b:null}'],
            ["{,}", "{A:null,}", "{b:null,A:null}", "{a:b:null}"],
        ),
    ],
)
def test_what_the_grammar_allows(schema, right, wrong):
    grammar = matcher({"x": schema}, **{"$defs": {"node": NODE}})
    for value in right:
        assert accepts(grammar, f"{{x:{value}}}"), value
    for value in wrong:
        assert not accepts(grammar, f"{{x:{value}}}"), value


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"enum": [f"a{QUOTE}"]}, "which holds"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "more than additionalProperties"),
        ({"type": ["string", "null"], "allOf": [{"type": "string"}]}, "more than maxLength"),
    ],
)
def test_what_the_format_cannot_express_is_refused(schema, problem):
    with pytest.raises(OptionError, match=problem):
        matcher({"x": schema})
