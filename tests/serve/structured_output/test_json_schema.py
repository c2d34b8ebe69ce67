# SPDX-License-Identifier: Apache-2.0
"""Schemas that the grammar would not enforce, or not compile in moments, are refused by name."""

from __future__ import annotations

import copy
import json

import pytest
import xgrammar

from phalanx.errors import OptionError
from phalanx.serve.structured_output.json_schema import enforceable, read_json

INTEGER = {"type": "integer"}


NOT_ENFORCED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": INTEGER}, "'not'"),
    ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, "has 'if' at #/properties/a"),
    ({"type": "array", "items": {"contains": {}}}, "has 'contains' at #/items"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, "'pattern' together"),
    ({"$ref": "http://example.com/x.json"}, "not part of it"),
    ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "integer"}}}, "the anchor '#x' as a reference at #;"),
    ({"allOf": [INTEGER, {"minimum": 3}]}, "allOf"),
    ({"anyOf": [{"required": ["a"]}], "type": "object"}, "'anyOf' together with 'type'"),
    ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}, "minimum": 3}, "'\\$ref' together with 'minimum'"),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "'b'"),
    ({"type": "object", "properties": {f"p{i}": INTEGER for i in range(300)}}, "300 properties"),
    ({"anyOf": [INTEGER, {"$defs": {"q": {"not": {}}}}]}, "#/anyOf/1/\\$defs/q"),
    ({"type": "string", "format": "email", "maxLength": 3}, "'format' together"),
    ({"type": "string", "format": "email", "pattern": "^b+$"}, "'pattern' together with the 'format' 'email'"),
    ({"minimum": 3}, "'minimum' without a 'type'"),
    ({"type": "string", "pattern": 'say "a"'}, "JSON escapes"),
    ({"type": "string", "pattern": "a\\nb"}, "JSON escapes"),
    ({"type": "string", "pattern": "[\\t ]b"}, "JSON escapes"),
    ({"type": "string", "pattern": "a\\\\b"}, "JSON escapes"),
    ({"type": "string", "pattern": 'a\\["]'}, "JSON escapes"),
    (
        {"type": "string", "pattern": "a(?=b)"},
        "has a 'pattern' with a lookahead at #; the grammar cannot enforce it; rewrite it without",
    ),
    ({"type": "object", "patternProperties": {"a^b": {}}}, "'patternProperties' with the anchor"),
    ({"type": "object", "patternProperties": {'a"': {}}}, "JSON escapes"),
    (
        {"type": "object", "patternProperties": {"a": {}}, "properties": {"b": {}}},
        "'patternProperties' together with 'properties'",
    ),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "another pattern"),
    ({"type": "object", "propertyNames": {"type": "string"}, "properties": {"b": {}}}, "'propertyNames' together"),
    ({"items": {"oneOf": [INTEGER, {"type": "number"}]}}, "has a 'oneOf' whose schemas 0 and 1 .* at #/items; .* use 'anyOf'"),
    ({"anyOf": []}, "has an empty 'anyOf' at #; no value satisfies it"),
    ({"oneOf": []}, "an empty 'oneOf'"),
    ({"allOf": []}, "an empty 'allOf'"),
    ({"type": []}, "an empty 'type'"),
    ({"enum": [1, 2, 3], "minimum": 2}, "'enum' together with 'minimum'"),
    ({"const": "a", "enum": ["a"]}, "'const' together with 'enum'"),
    ({"type": "integer", "enum": [1, "a"]}, "the value \"a\" in 'enum' at #; its 'type' \"integer\""),
    ({"type": ["integer", "null"], "const": 1.5}, "the value 1.5 in 'const'"),
    ({"type": ["number", "null"], "multipleOf": 2}, "'multipleOf' of a 'number'"),
]


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        *NOT_ENFORCED,
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "only to itself at #/items",
        ),
        ({"$ref": "#"}, "the reference '#', which leads only to itself at #; no finite text satisfies it"),
        ({"type": "object", "properties": {}, "required": [["a"]]}, "the required property \\['a'\\]"),
        ([], "is not a JSON object"),
        (3, "is not a JSON object"),
    ],
)
def test_what_is_not_enforced_is_named(schema, names):
    with pytest.raises(OptionError, match=names):
        enforceable(copy.deepcopy(schema))


@pytest.mark.parametrize("schema", [schema for schema, _ in NOT_ENFORCED], ids=lambda schema: json.dumps(schema)[:50])
def test_xgrammar_would_not_reject_it(schema):
    """Where this fails, xgrammar has learned to say no, and the check has become redundant."""
    xgrammar.Grammar.from_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": INTEGER, "if": {"type": "string"}, "uniqueItems": INTEGER}, "required": ["not"]},
        {"enum": [{"not": 1}], "default": {"contains": 1}, "examples": [{"if": 1}]},
        {"$ref": "#/$defs/x", "description": "fine", "$defs": {"x": INTEGER}},
        {
            "$ref": "#/$defs/x",
            "$defs": {"x" * i: {"$ref": f"#/$defs/{'x' * (i + 1)}"} for i in range(1, 30)} | {"x" * 30: INTEGER},
        },
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "X"},
        {"type": "array", "uniqueItems": False},
        {"allOf": [INTEGER]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": INTEGER}},
        {"type": "integer", "enum": [1, 2.0]},
        {"type": ["string", "null"], "enum": ["a", None], "format": "email", "title": "x"},
        {"type": "integer", "multipleOf": 2},
        {"type": "object", "patternProperties": {"^a": {}}},
        {"type": "string", "format": "an annotation", "pattern": "^a$"},
        {"type": "string", "pattern": '^[^"\\\\\\n]+[a-z"]\\d\\.$'},
    ],
)
def test_what_is_enforced_passes_as_it_is(schema):
    assert enforceable(read_json(json.dumps(schema), what="json_schema")) == schema


@pytest.mark.parametrize(
    ("bounds", "times"), [({"minLength": 2}, "{2,}"), ({"maxLength": 5}, "{0,5}"), ({"minLength": 1, "maxLength": 1}, "{1,1}")]
)
def test_a_length_becomes_a_pattern_that_keeps_to_json(bounds, times):
    rewritten = enforceable({"type": "array", "items": {"type": "string", **bounds}})["items"]
    assert rewritten == {"type": "string", "pattern": '^[^"\\\\\\x00-\\x1f]' + times + "$"}


def test_a_pattern_says_what_is_no_blank_beyond_ascii():
    assert enforceable({"type": "string", "pattern": "^a.$"})["pattern"] == r"^a[^\n\r\u2028\u2029]$"
    assert enforceable({"type": "object", "patternProperties": {"^a.$": {}}}) == {
        "type": "object", "patternProperties": {r"^a[^\n\r\u2028\u2029]$": {}}
    }  # fmt: skip


@pytest.mark.parametrize("bounds", [{"minLength": 3, "maxLength": 1}, {"maxLength": "3"}, {"minLength": -1}])
def test_lengths_that_make_no_sense_are_left_to_the_compiler(bounds):
    assert enforceable({"type": "string", **bounds}) == {"type": "string", **bounds}


@pytest.mark.parametrize("schema", [{"type": 5, "multipleOf": 2}, {"type": "object", "patternProperties": 5}])
def test_what_is_no_schema_is_left_to_the_compiler(schema):
    assert enforceable(dict(schema)) == schema


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 49 + "]" * 49, "nested deeper"),
        ("[" * 20000 + "]" * 20000, "nested deeper"),
        ('{"enum": [' + "1," * 20000 + "1]}", "values"),
        ('"' + "x" * 140000 + '"', "bytes"),
        ('"' + "é" * 70000 + '"', "bytes"),
    ],
)
def test_bounds(text, why):
    with pytest.raises(OptionError, match=why):
        read_json(text, what="json_schema")


def test_nesting_up_to_the_bound_passes():
    read_json("[" * 48 + "]" * 48, what="json_schema")
