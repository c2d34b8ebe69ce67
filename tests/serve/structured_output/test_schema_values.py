# SPDX-License-Identifier: Apache-2.0
"""What texts stand for, by their schemas."""

from __future__ import annotations

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.structured_output.schema_values import property_names, property_schema, value_of

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ROOT = {
    "$defs": {
        "Text": {"type": "string"}, "Count": {"type": "integer"}, "Point": {"type": "object", "properties": {"x": {}}},
        "Loop": {"$ref": "#/$defs/Loop"}, "a/b~c": {"type": "boolean"},
    }
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"), ("1", {"type": "integer"}, 1), ("1", {}, "1"), ("1", None, "1"), ("1", True, "1"),
        ("true", {"type": "boolean"}, True), ("True", {"type": "boolean"}, True), ("soon", {"type": "number"}, "soon"),
        ("{'a': None}", {"anyOf": [{"type": "object"}]}, {"a": None}), ("NaN", {"type": "number"}, "NaN"),
        # a string where one is possible, and the model wrote no other value
        ("12345", OPTIONAL, "12345"), ("1.10", OPTIONAL, "1.10"), ("true", OPTIONAL, "true"), ("null", OPTIONAL, None),
        ("None", OPTIONAL, None), ('{"a": 1}', OPTIONAL, '{"a": 1}'), ("12345", {"type": ["string", "null"]}, "12345"),
        ("12", {"type": ["string", "integer"]}, 12), ("1.5", {"type": ["string", "integer"]}, "1.5"),
        ("007", {"type": ["string", "integer"]}, "007"), ("7", {"anyOf": [{"type": "integer", "minimum": 10}, OPTIONAL]}, "7"),
        ("12", {"anyOf": [{"type": "integer", "minimum": 10}, OPTIONAL]}, 12),
        ("3", {"anyOf": [{"type": "integer", "multipleOf": 2}, OPTIONAL]}, "3"),
        ("0.3", {"anyOf": [{"type": "number", "multipleOf": 0.1}, OPTIONAL]}, 0.3),
        ("1e300", {"anyOf": [{"type": "number", "multipleOf": 7}, OPTIONAL]}, "1e300"),
        ("12", {"type": "string", "nullable": True}, "12"), ("null", {"type": "string", "nullable": True}, "null"),
        ("null", {"type": ["string"], "nullable": True}, None),
        # choices have types of their own
        ("1", {"enum": [1, 2]}, 1), ("1", {"enum": ["1", "2"]}, "1"), (" \n1 ", {"enum": ["1", "2"]}, "1"),
        ('"1"', {"enum": ["1", "2"]}, "1"), ("1", {"const": "1"}, "1"), ("1", {"const": 1}, 1), ("true", {"const": True}, True),
        ("1", {"enum": [True, "1"]}, "1"), ("null", {"enum": ["a", None]}, None), ("[1]", {"enum": [[1], "x"]}, [1]),
        (" a ", {"type": "string", "enum": ["a", "b"]}, "a"), (" a ", {"type": "string"}, " a "),
        # behind references and combinations
        ("5", {"$ref": "#/$defs/Text"}, "5"), ("5", {"$ref": "#/$defs/Count"}, 5), ("5", {"$ref": "#/$defs/none"}, "5"),
        ("5", {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "5"), ("true", {"$ref": "#/$defs/a~1b~0c"}, True),
        ("5", {"allOf": [{"description": "n"}, {"$ref": "#/$defs/Count"}]}, 5), ("5", {"$ref": "#/$defs/Loop"}, "5"),
        ("5", {"$ref": "#/$defs/Count", "description": "n"}, 5), ("5", {"oneOf": [{"type": "boolean"}, {"type": "number"}]}, 5),
        # a keyword that speaks of one type
        ('{"x": 1}', {"properties": {"x": {}}}, {"x": 1}), ("1", {"properties": {"x": {}}}, "1"), ("[1]", {"items": {}}, [1]),
    ],
)  # fmt: skip
def test_values(text, schema, value):
    assert repr(value_of(text, schema, ROOT)) == repr(value)


SCHEMAS = st.recursive(
    st.sampled_from([
        {"type": "string"}, {"type": "integer"}, {"type": "number", "minimum": 0}, {"type": "boolean"}, {"type": "null"},
        {"enum": ["a", 1, None]}, {"const": "x"}, {"type": "array"}, {"type": "object"}, {"type": ["string", "boolean"]},
    ]),
    lambda inner: st.dictionaries(
        st.sampled_from(["anyOf", "oneOf"]), st.lists(inner, min_size=1, max_size=3), min_size=1, max_size=1
    ),
    max_leaves=4,
)  # fmt: skip
TEXTS = st.sampled_from(["1", "-1", "0.5", "true", "null", "None", "a", "x", "[1]", "{}", " a ", "12345", "{'a': 1}", '"a"'])


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS, text=TEXTS)
def test_a_value_is_valid_where_the_text_has_a_valid_reading(schema, text):
    """The oracle is jsonschema_rs, with oneOf as anyOf."""
    loose = _loose(schema)
    valid = jsonschema_rs.Draft202012Validator(loose).is_valid
    value = value_of(text, schema, ROOT)
    if valid(text) or valid(text.strip()):
        assert valid(value)
    if isinstance(value, str):
        assert value.strip() in text


def _loose(schema):
    return {("anyOf" if name == "oneOf" else name): [_loose(part) for part in value] if name in ("anyOf", "oneOf") else value
            for name, value in schema.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": {"type": "null"}}}, {"type": "null"}),
        ({"additionalProperties": {"type": "integer"}}, {"type": "integer"}),
        ({"patternProperties": {"^a": {"type": "boolean"}}}, {"type": "boolean"}),
        ({"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"a": {"type": "null"}}}}}, {"type": "null"}),
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "null"}}}]}, {"type": "null"}),
        ({"anyOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"a": {"type": "string"}}}]}, OPTIONAL),
        ({"additionalProperties": False}, {}),
    ],
)
def test_where_the_schema_of_a_property_stands(schema, expected):
    known = property_schema(schema, "a")
    assert known == expected or sorted(map(str, known["anyOf"])) == sorted(map(str, expected["anyOf"]))


def test_the_names_of_properties():
    schema = {"properties": {"a": {}}, "allOf": [{"properties": {"b>c": {}}}, {"$ref": "#/$defs/D"}], "$defs": {"D": {"$ref": "#"}}}
    assert property_names(schema) == {"a", "b>c"}
