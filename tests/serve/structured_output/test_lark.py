# SPDX-License-Identifier: Apache-2.0
"""Grammars and structural tags of clients: each form that is honoured, and what is refused."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import OptionError
from phalanx.serve.structured_output.parameters import QWEN_PARAMETER
from tests.support.grammars import accepts, opened

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY_OF_FIVE = {"type": "regex", "pattern": "(?s:.{1,5})"}
CALL = {"begin": "<call=a>", "content": NUMBER, "end": "</call>"}


def text(value):
    return {"type": "const_string", "value": value}


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('start: "(" start ")" | /[0-9]+/', ["((12))"], ["((12)", "()"]),
        ('root ::= "(" root ")" | [0-9]+', ["((12))"], ["((12)", "()"]),
        ('root ::= "a" x{2}\nx ::= [b-d] | "\\n"', ["ab\n"], ["ab"]),
        ("start: A & ~B\nA: /[ab]+/\nB: /a+/" if False else "start: T\nT: A & ~B\nA: /[ab]+/\nB: /a+/", ["ab"], ["aa"]),
        ('start: "x" %json {"type": "integer"}', ["x12"], ["x"]),
    ],
)
def test_grammars(grammar, allowed, refused):
    matcher = opened("grammar", grammar)
    assert [each for each in allowed if not accepts(matcher, each)] == []
    assert [each for each in refused if accepts(matcher, each)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("", "is empty"),
        ("start: nobody", "nobody"),
        ("root ::= nobody", "nobody"),
        ("start: /(/", "unclosed"),
        ('start: "a', "not valid|cannot"),
        ("start: T\nT: /a/\nx[temperature=0.5]: T", "an attribute without effect"),
        ("a" * 40_000, "40000 characters"),
        ("\ud800", "not valid text"),
        ("start: " + "(" * 3_000 + '"a"' + ")" * 3_000, "nested|cannot"),
    ],
)
def test_bad_grammars(grammar, why):
    with pytest.raises(OptionError, match=why):
        opened("grammar", grammar)


@pytest.mark.parametrize(
    ("format_", "allowed", "refused"),
    [
        (text('a"\n/'), ['a"\n/'], ["a"]),
        (NUMBER, ["12"], ["x"]),
        ({"type": "regex", "pattern": "[a/]+"}, ["a/a"], ["b"]),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, ["b"], ["c"]),
        (
            {"type": "sequence", "elements": [text("a"), {"type": "any_text"}, text("b."), NUMBER]},
            ["ab.1", "axx\nb.12"],
            ["a1", "ab.x"],
        ),
        ({"type": "or", "elements": [text("a"), NUMBER]}, ["a", "7"], ["b"]),
        ({"type": "star", "content": text("ab")}, ["", "abab"], ["aba"]),
        ({"type": "plus", "content": text("ab")}, ["abab"], [""]),
        ({"type": "optional", "content": text("ab")}, ["", "ab"], ["abab"]),
        ({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": ["</a>"]}, ["<a>x<y></a>"], ["<a>x</a>y"]),
        ({"type": "tag", "begin": "<a>", "content": NUMBER, "end": ["</a>", "</b>"]}, ["<a>1</b>"], ["<a>1"]),
        # a text or an expression that could swallow its end
        ({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": ["</a>", "</b>"]}, ["<a>x</b>"], ["<a>x"]),
        ({"type": "tag", "begin": "<a>", "content": ANY_OF_FIVE, "end": "</a>"}, ["<a>x</a>", "<a>abcde</a>"], ["<a>abcdef</a>"]),
        (
            {"type": "tag", "begin": "", "content": {"type": "or", "elements": [ANY_OF_FIVE, text("long text")]}, "end": "."},
            ["x.", "long text."],
            ["x", "longer."],
        ),
        ({"type": "sequence", "elements": [ANY_OF_FIVE, text("e"), NUMBER]}, ["axe1", "abcdfe1"], ["ae", "abcdefe1"]),
        (
            {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL]},
            ["", "hi", "x <call=a>1</call> y"],
            ["<call=b>1</call>", "<call=a>x"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL], "at_least_one": True, "stop_after_first": True},
            ["x <call=a>1</call>"],
            ["x", "<call=a>1</call> y"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": "\n"},
            ["", "<call=a>1</call>\n<call=a>2</call>"],
            ["<call=a>1</call>\n"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": "", "at_least_one": True, "stop_after_first": True},
            ["<call=a>1</call>"],
            [""],
        ),
    ],
)
def test_structural_tags(format_, allowed, refused):
    matcher = opened("structural_tag", json.dumps({"type": "structural_tag", "format": format_}))
    assert [each for each in allowed if not accepts(matcher, each)] == []
    assert [each for each in refused if accepts(matcher, each)] == []


def test_the_older_form_of_a_structural_tag():
    structure = {"begin": "<call=a>", "schema": {"type": "integer"}, "end": "</call>"}
    matcher = opened("structural_tag", json.dumps({"type": "structural_tag", "structures": [structure], "triggers": ["<call="]}))
    assert accepts(matcher, "I see. <call=a>12</call>")
    assert not accepts(matcher, "I see. <call=a>x</call>")


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ({}, "has no format 'None'"),
        ([], "not a JSON object"),
        ({"format": {"type": "wish"}}, "has no format 'wish'"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "'not' at #"),
        ({"format": {"type": "regex", "pattern": "a$b"}}, "cannot be enforced"),
        ({"format": {"type": "sequence", "elements": []}}, "a list 'elements'"),
        ({"format": {"type": "const_string"}}, "a text 'value'"),
        ({"format": {"type": "token", "token": "<x>"}}, "a token is given by its id"),
        ({"format": {"type": "triggered_tags", "triggers": ["<x"], "tags": [CALL]}}, "no tag begins with it"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "'excludes'"),
    ],
)
def test_bad_structural_tags(tag, why):
    with pytest.raises(OptionError, match=why):
        opened("structural_tag", json.dumps(tag))


def call(schema, *, strict, style="json"):
    content = {"type": "json_schema", "json_schema": schema, "tool": "look", "strict": strict}
    if style == "qwen_xml":
        content["parameter"] = QWEN_PARAMETER
    return json.dumps({"format": {"type": "sequence", "elements": [content, text(";")]}})


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": {"a": {"not": {}}}}, {"type": "object", "properties": {"a": {"pattern": "(?=a)"}}}]
)
@pytest.mark.parametrize("style", ["json", "qwen_xml"])
def test_a_tool_that_cannot_be_enforced_is_named_where_it_is_strict(schema, style):
    with pytest.raises(OptionError, match=r"the parameters of the tool 'look' .*rewrite them, or remove 'strict'"):
        opened("structural_tag", call(schema, strict=True, style=style))
    free = opened("structural_tag", call(schema, strict=False, style=style))
    assert accepts(free, '{"a": [1]};' if style == "json" else "<parameter=a>\n[1]\n</parameter>\n;")


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "1", 2]},
        "days": {"type": "integer", "minimum": 1},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[A-Z]+$", "maxLength": 3},
        "where": {"$ref": "#/$defs/place"},
        "nick": {"type": "string", "minLength": 2, "maxLength": 7},
        "alias": {"anyOf": [{"type": "string", "minLength": 5}, {"type": "null"}, {"enum": ["a\nb"]}]},
        "size": {"anyOf": [{"type": "string", "minLength": 3, "maxLength": 9}, {"type": "integer"}]},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}


@pytest.mark.parametrize(
    ("named", "valid"),
    [
        ({"city": "Oslo", "days": "3"}, True),
        ({"city": 'a\n"b" <x> null', "unit": "1", "days": "12"}, True),
        ({"city": "", "days": "1", "note": "12"}, True),
        ({"city": "x", "unit": "2", "days": "1", "code": "ABC", "where": '{"lat": 1.5}'}, True),
        ({"city": "x", "days": "1", "nick": "a\n</"}, True),
        ({"city": "x", "days": "1", "nick": "a"}, False),
        ({"city": "x", "days": "1", "alias": "null"}, True),
        ({"city": "x", "days": "1", "alias": "a\nb", "size": "12"}, True),
        ({"city": "x", "days": "1", "alias": "null\n or not", "size": "size 5"}, True),
        ({"city": "x", "days": "1", "alias": "nul"}, False),
        ({"city": "x", "days": "1", "size": "a\nb"}, False),
        ({"city": "x"}, False),
        ({"days": "3", "city": "x"}, False),
        ({"city": "x", "days": "0"}, False),
        ({"city": "x", "days": " 3"}, False),
        ({"city": "x", "unit": "D", "days": "1"}, False),
        ({"city": "x", "days": "1", "code": "ABCD"}, False),
        ({"city": "x", "days": "1", "z": "1"}, False),
        ({"city": "x", "days": "1", "where": "{}"}, False),
    ],
)
def test_parameters_of_qwen_coder(named, valid):
    matcher = opened("structural_tag", call(PARAMETERS, strict=True, style="qwen_xml"))
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in named.items())
    assert accepts(matcher, written + ";") == valid


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "properties": {"a": {"const": "</parameter>"}}}, "which holds </parameter>"),
        ({"type": "object", "anyOf": [{}, {"required": ["a"]}]}, "more than 'properties'"),
    ],
)
def test_what_a_call_of_qwen_coder_cannot_express(schema, why):
    with pytest.raises(OptionError, match=why):
        opened("structural_tag", call(schema, strict=True, style="qwen_xml"))
