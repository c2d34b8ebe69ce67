# SPDX-License-Identifier: Apache-2.0
"""Each keyword is enforced, so that an independent validator takes what the grammar allows, or refused by its name and place."""

from __future__ import annotations

import copy
import json
from typing import Annotated, Literal

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field, HttpUrl, TypeAdapter

from phalanx.errors import OptionError
from phalanx.serve.structured_output.json_schema import KEYWORDS, enforceable, read_json
from tests.support.grammars import accepts, opened, write

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
DEFS = {"$defs": {"a": INTEGER, "s": {"type": "string", "maxLength": 3}}}

HONOURED = {
    "type": [{"type": "null"}, {"type": ["boolean", "array"]}],
    "enum": [{"enum": ["a", 1, None, [1, {"b": 2}], 0.5]}, {"type": "string", "enum": ["a", 1]}, {"enum": [1, 2, 3], "minimum": 2}],
    "const": [{"const": 'say "a"\n\\ü'}, {"const": {"a": [1, 2.5]}}, {"type": "integer", "const": 2.0}],
    "anyOf": [{"anyOf": [INTEGER, STRING]}, {"anyOf": [{"minimum": 3}, {"maximum": 1}], "type": "integer"}],
    "allOf": [
        {"allOf": [INTEGER, {"minimum": 3}, {"maximum": 9}]},
        {"allOf": [{"properties": {"a": INTEGER}}, {"required": ["a"]}]},
    ],
    "$ref": [
        {"$ref": "#/$defs/a", **DEFS},
        {"$ref": "#/$defs/s", "minLength": 2, **DEFS},
        {"items": {"$ref": "#"}, "type": "array"},
    ],
    "items": [{"type": "array", "items": INTEGER}, {"items": STRING}],
    "prefixItems": [{"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2}],
    "additionalItems": [
        {"type": "array", "items": [INTEGER], "additionalItems": STRING, "$schema": "http://json-schema.org/draft-07/schema#"}
    ],
    "minItems": [{"type": "array", "minItems": 1}, {"type": "array", "items": INTEGER, "minItems": 2.0}],
    "maxItems": [{"type": "array", "maxItems": 3}, {"maxItems": 2}],
    "properties": [{"type": "object", "properties": {"a": INTEGER, "b": STRING}}, {"properties": {"a": INTEGER}}],
    "patternProperties": [
        {"type": "object", "patternProperties": {"^a": INTEGER, "^b": STRING}, "properties": {"ab": {"minimum": 3}}}
    ],
    "additionalProperties": [
        {"type": "object", "additionalProperties": INTEGER},
        {"properties": {"a": STRING}, "additionalProperties": INTEGER},
    ],
    "required": [
        {"type": "object", "required": ["a"]},
        {"properties": {"a": INTEGER, "b": INTEGER}, "required": ["b"], "type": "object"},
    ],
    "maxProperties": [{"type": "object", "maxProperties": 2}],
    "minLength": [{"type": "string", "minLength": 3}, {"minLength": 2, "maxLength": 2, "type": "string"}],
    "maxLength": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^a+$", "maxLength": 3}],
    "minimum": [{"type": "integer", "minimum": 5}, {"type": "number", "minimum": 0.5}, {"minimum": 3}],
    "maximum": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}],
    "exclusiveMinimum": [{"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2}],
    "exclusiveMaximum": [{"type": "integer", "exclusiveMaximum": 10, "minimum": 8}],
    "multipleOf": [
        {"type": "integer", "minimum": 0, "multipleOf": 15},
        {"type": "integer", "minimum": -20_000, "maximum": 20_000, "multipleOf": 7},
        {"type": "integer", "multipleOf": 1025},
        {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9},
        {"multipleOf": 3},
    ],
    "oneOf": [
        {"oneOf": [INTEGER, STRING]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/s"}], **DEFS},
        {"oneOf": [{"const": 1}, {"const": 2}, {"enum": ["a", "b"]}]},
    ],
    "pattern": [
        {"type": "string", "pattern": "^[^é]{1,12}$"},
        {"type": "string", "pattern": "b"},
        {"type": "string", "pattern": "^\\S+ \\s\\w$"},
        {"type": "string", "pattern": '^say "a"\\n$'},
        {"pattern": "^a$"},
    ],
    "format": [{"type": "string", "format": "date"}, {"type": "string", "format": "an annotation", "maxLength": 2}],
    "minProperties": [
        {"type": "object", "minProperties": 1},
        {"properties": {"a": INTEGER, "b": {}}, "required": ["a", "b"], "minProperties": 2},
    ],
    "propertyNames": [
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
        {"type": "object", "propertyNames": {"pattern": "^[a-c]{2}$"}, "additionalProperties": INTEGER, "minProperties": 1},
        {"type": "object", "propertyNames": {"enum": ["a.b", "c"]}, "additionalProperties": INTEGER},
        {"type": "object", "propertyNames": {"$ref": "#/$defs/s"}, **DEFS},
        {"type": "object", "propertyNames": {"format": "uuid"}},
    ],
    "unevaluatedProperties": [{"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False}],
    "unevaluatedItems": [{"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}],
    "uniqueItems": [{"type": "array", "uniqueItems": False}, {"type": "array", "uniqueItems": True, "maxItems": 1}],
    "discriminator": [{"oneOf": [INTEGER, STRING], "discriminator": {"propertyName": 3}}],
}
"""Examples of each keyword that is enforced, or of a kind that another one replaces."""

REFUSED = {
    **{
        name: [({name: {}}, f"has '{name}' at #;".replace("$", "\\$"))]
        for name, treatment in KEYWORDS.items()
        if treatment == "refused"
    },
    "not": [
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "has 'not' at #/properties/a~1b/items; the grammar cannot enforce it")
    ],
    "$ref": [
        ({"$ref": "http://example.com/x.json"}, "not part of it"),
        ({"$ref": "#x", "$defs": {"x": {"$anchor": "x"}}}, "the anchor '#x'"),
        ({"items": {"$ref": "#/nowhere"}}, "the reference '#/nowhere' at #/items; it leads nowhere"),
    ],
    "oneOf": [
        (
            {"items": {"oneOf": [INTEGER, {"type": "number"}]}},
            "a 'oneOf' whose alternatives may accept the same value at #/items; ",
        ),
        ({"oneOf": []}, "an empty 'oneOf'"),
        ({"oneOf": [{"const": "a"}, STRING]}, "oneOf"),
    ],
    "anyOf": [
        ({"anyOf": []}, "an empty 'anyOf' at #; no value satisfies it"),
        ({"anyOf": [INTEGER, {"$defs": {"q": {"not": {}}}}]}, "/q"),
    ],
    "allOf": [({"allOf": [INTEGER, STRING]}, "incompatible types")],
    "type": [({"items": {"type": "wish"}}, "at #/items; Invalid type: wish"), ({"type": []}, "an empty 'type'")],
    "enum": [
        ({"enum": []}, "an empty 'enum'"),
        ({"enum": [2**53 + 1]}, "the number 9007199254740993 in 'enum' at #; numbers beyond"),
    ],
    "const": [
        ({"items": {"const": 12345678901234567890}}, "12345678901234567890 in 'const' at #/items"),
        ({"const": {"a": [1e17]}}, "in 'const'"),
    ],
    "pattern": [
        ({"items": {"type": "string", "pattern": "a(?=b)"}}, "at #/items; .*look-ahead"),
        ({"pattern": r"\ba"}, "lookarounds not supported"),
        ({"pattern": "a++"}, r"'pattern' at # has the quantifier '\+' after '\+'"),
        ({"pattern": "("}, "unclosed group"),
        ({"pattern": r"(a)\1"}, "backreferences"),
        ({"pattern": "a^b"}, "at #"),
        ({"pattern": "[]"}, "the empty class"),
    ],
    "uniqueItems": [({"items": {"type": "array", "uniqueItems": True}}, "'uniqueItems' at #/items")],
    "minProperties": [({"type": "object", "minProperties": 2}, "'minProperties' of an object with any names")],
    "propertyNames": [
        ({"propertyNames": {"minLength": 2}, "properties": {}}, "'propertyNames' together"),
        ({"propertyNames": {"anyOf": [{}]}}, "of a kind"),
    ],
    "patternProperties": [
        ({"patternProperties": {"a": {}, "b": {}}}, "not disjoint"),
        ({"patternProperties": {f"^{i}$": {} for i in range(20)}}, "20 patterns"),
        ({"patternProperties": {"(?!a)": {}}}, "look-ahead"),
    ],
    "properties": [({"properties": {f"p{i}": INTEGER for i in range(300)}}, "300 properties")],
    "unevaluatedProperties": [({"allOf": [{}], "unevaluatedProperties": False}, "'unevaluatedProperties' beside")],
    "unevaluatedItems": [({"$ref": "#/$defs/a", "unevaluatedItems": False, **DEFS}, "'unevaluatedItems' beside")],
    "minimum": [({"type": "integer", "minimum": 3, "maximum": 1}, "minimum .* is greater than maximum")],
    "minLength": [({"minLength": -1, "type": "string"}, "minLength")],
}


def json_matcher(schema):
    return opened("json_schema", json.dumps(schema))


def check(schema, seeds=6):
    """What the grammar allows is valid, by an independent validator; at least one text ends."""
    matcher, validator = json_matcher(schema), jsonschema_rs.validator_for(schema)
    texts = [text for seed in range(seeds) if (text := write(matcher, seed)) is not None]
    assert texts
    for text in texts:
        assert validator.is_valid(json.loads(text)), text
    return texts


def test_each_keyword_has_an_example():
    assert set(HONOURED) == {name for name, treatment in KEYWORDS.items() if treatment in ("enforced", "rewritten")}
    assert set(REFUSED) >= {name for name, treatment in KEYWORDS.items() if treatment == "refused"}


@pytest.mark.parametrize(("keyword", "schema"), [(name, schema) for name, schemas in HONOURED.items() for schema in schemas])
def test_what_is_honoured(keyword, schema):
    check(schema)


@pytest.mark.parametrize(("schema", "names"), [each for examples in REFUSED.values() for each in examples])
def test_what_is_refused_is_named(schema, names):
    with pytest.raises(OptionError, match=names):
        json_matcher(schema)


def test_annotations_change_nothing(caplog):
    named = {
        "title": "T",
        "examples": [{"not": 1}],
        "default": {"if": 1},
        "x-order": 3,
        "nullable": True,
        "$id": "http://x/y",
        "readOnly": True,
    }
    with caplog.at_level("INFO"):
        assert enforceable({**INTEGER, **named, "$anchor": "x"}) == {
            **INTEGER,
            **{k: v for k, v in named.items() if k not in ("x-order", "$id")},
        }
        enforceable({"properties": {"a": {"maxlength": 3}}})
    assert "the unknown keyword 'maxlength', at #/properties/a, has no effect" in caplog.text
    names_only = {"type": "object", "properties": {"not": INTEGER, "if": STRING, "uniqueItems": INTEGER}, "required": ["not"]}
    check(names_only)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "array", "maxItems": 3}, ["[]", '[1, "a", {}]'], ["[1, 2, 3, 4]"]),
        ({"type": "object"}, ["{}", '{"a": 1}'], []),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "properties": {"a": INTEGER}}, ['{"a": 1}'], ['{"a": 1, "b": 2}', '{"a":1}']),
        (
            {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}], "type": "object"},
            ['{"a": 1, "b": 2}'],
            ['{"b": "x"}'],
        ),
        ({"type": "number"}, ["0.5", "-12", "100000000000000000"], ["8e556", "1e5", "1" * 30]),
        ({"const": 1e15}, ["1000000000000000"], ["1e15", "999999999999999"]),
        ({"type": "integer", "maximum": 2**63 - 1}, ["9000000000000000000"], ["9223372036854775808", "9" * 20]),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**60}, [str(2**60)], ["1152921504606847000"]),
        ({"type": "number", "minimum": 2**60, "maximum": 1.2e18}, ["1160000000000000000"], ["1152921504606846975"]),
        ({"type": "number", "minimum": 1, "exclusiveMaximum": 2**60}, ["7"], ["1152921504606847000", "1152921504606846990"]),
        ({"type": "number", "minimum": 1, "maximum": float(2**60)}, ["7"], ["1152921504606847000"]),
        ({"type": "string", "pattern": "a|^b$"}, ['"xax"', '"b"'], ['"xb"', '"c"']),
        ({"type": "string", "pattern": "^[a&&b[]+$"}, ['"a&b["'], ['"c"']),
        ({"type": "string", "maxLength": 4}, ['"a\\"\\n\\\\"', '"üüüü"'], ['"abcde"', '"\\u0061"']),
        ({"properties": {"A": STRING}, "additionalProperties": INTEGER}, ['{"A": "x", "\\n": 1}'], ['{"A": 1}', '{"\\u0041": 1}']),
        ({"patternProperties": {".": STRING}, "additionalProperties": INTEGER}, ['{"a": "x", "": 1}'], ['{"\\ubf56": 1}']),
        ({"allOf": [{"properties": {"A": STRING}}, {"required": ["b"]}]}, ['{"A": "x", "b": 1}'], ['{"\\u0041": 1, "b": 1}']),
        ({"type": "string", "format": "email", "pattern": "^b+$"}, ['"bb"'], ['"b@c.de"']),
        ({"type": "string", "format": "email", "maxLength": 8}, ['"ab@c.de"'], ['"abcdef@c.de"', '"abc"']),
    ],
)
def test_values(schema, allowed, refused):
    matcher = json_matcher(schema)
    assert [text for text in allowed if not accepts(matcher, text)] == []
    assert [text for text in refused if accepts(matcher, text)] == []


ZOD = {
    "email": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        ["a.b'c+d@x-y.org"],
        ["a..b@c.de", ".a@c.de", "a@c", "a.@c.de"],
    ),
    "uuid": (
        r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|00000000-0000-0000-0000-000000000000)$",
        ["00000000-0000-0000-0000-000000000000"],
        ["0000000-0000-0000-0000-000000000000"],
    ),
    "date": (
        r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
        r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))$",
        ["2024-02-29"],
        ["2023-02-29"],
    ),
    "time": (r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$", ["12:30"], ["24:00"]),
    "ipv4": (
        r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])$",
        ["1.2.3.4"],
        ["1.2.3"],
    ),
    "duration": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        ["P3W", "P1Y2M3DT4H5M6S"],
        ["P", "PT", "P1W2D"],
    ),
}


@pytest.mark.parametrize("format_", ZOD)
def test_formats_of_zod_have_its_patterns(format_):
    pattern, allowed, refused = ZOD[format_]
    test_values(
        {"type": "string", "format": format_, "pattern": pattern},
        [f'"{text}"' for text in allowed],
        [f'"{text}"' for text in refused],
    )


def test_a_url_of_pydantic():
    schema = TypeAdapter(HttpUrl).json_schema()
    assert schema["maxLength"] == 2083
    for text in check(schema):
        assert len(json.loads(text)) <= 2083


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    radius: int


class Nothing(BaseModel):
    kind: Literal["nothing"] = "nothing"
    why: str | None = None


class Drawing(BaseModel):
    shape: Annotated[Circle | Nothing, Field(discriminator="kind")]
    colours: dict[Annotated[str, Field(pattern="^[a-z]+$")], float] = {}


def test_a_union_of_pydantic_with_a_discriminator():
    """The kind has a default, so it is not required; without it, both alternatives would take the same value."""
    for text in check(Drawing.model_json_schema(), seeds=12):
        assert "kind" in json.loads(text)["shape"]
        Drawing.model_validate_json(text)
    bare = Drawing.model_json_schema()
    del bare["properties"]["shape"]["discriminator"]
    with pytest.raises(OptionError, match="a 'oneOf' whose alternatives may accept the same value at #/properties/shape"):
        json_matcher(bare)


CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, CIRCLE])
def test_what_no_text_satisfies_is_refused(schema):
    with pytest.raises(OptionError, match="no text satisfies it"):
        json_matcher(schema)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"const": "\\ud800"}', "not valid JSON"),
        ('"' + "x" * 140000 + '"', "bytes"),
        ('"' + "é" * 70000 + '"', "bytes"),
    ],
)
def test_bounds(text, why):
    with pytest.raises(OptionError, match=why):
        read_json(text, what="json_schema")


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ("0.25", "0.0001"), ("0", "0.0", "-0", "0.5")),
        ({"exclusiveMinimum": 7, "maximum": 7.25}, ("7.25", "7.1"), ("7", "7.0", "7.3")),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ("-1.5", "-1.2"), ("-1", "-1.0")),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ("-0.1",), ("-0", "0", "-0.5")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}, ("0.0000000005",), ("0", "0.000000001")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ("0.5",), ("0", "1")),
    ],
)
def test_integers_that_are_exclusive_bounds_are_outside(bounds, inside, outside):
    """Also where the other bound is less than 1 away, which the library reads otherwise."""
    matcher = json_matcher({"type": "number", **bounds})
    assert all(accepts(matcher, text) for text in inside)
    assert not any(accepts(matcher, text) for text in outside)


def test_what_is_no_schema_is_refused():
    for schema in ([], 3, "x"):
        with pytest.raises(OptionError, match="is not a JSON object"):
            enforceable(copy.deepcopy(schema))
    assert enforceable(True) is True
    with pytest.raises(OptionError, match="false"):
        json_matcher(False)
