# SPDX-License-Identifier: Apache-2.0
"""Schemas of a oneOf that are proven disjoint: nothing that is written for one of them is valid for another."""

from __future__ import annotations

import json
import time
from typing import Annotated, Literal

import pytest
import xgrammar
from pydantic import BaseModel, Field

from phalanx.errors import OptionError
from phalanx.serve.structured_output.json_schema import enforceable
from phalanx.serve.structured_output.oneof import DisjointnessProof

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def objects(*, required=None, **properties):
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


def kind(name):
    return {"type": "string", "const": name}


CAT, DOG = objects(kind=kind("cat"), lives=INTEGER), objects(kind=kind("dog"), lives=INTEGER)


@pytest.mark.parametrize(
    "schemas",
    [
        [INTEGER],
        [INTEGER, STRING, {"type": ["array", "null"]}],
        [{"type": "object"}, STRING],
        [{"const": "a"}, {"const": "b"}, {"enum": ["c", 1]}],
        [{"const": 1}, {"const": True}],
        [STRING, {"enum": [1, None]}],
        [CAT, DOG, {"type": "null"}],
        [{"$ref": "#/$defs/cat"}, {"allOf": [{"$ref": "#/$defs/dog"}]}],
        [{"anyOf": [CAT, {"type": "null"}]}, {"oneOf": [DOG, STRING]}],
        [objects(a=objects(kind=kind("x"))), objects(a=objects(kind=kind("y")))],
        [objects(a=INTEGER), objects(b=INTEGER)],  # neither is written with the other's property
        [{**objects(a=INTEGER), "additionalProperties": False}, objects(a=INTEGER, b=STRING)],
        [{key: CAT[key] for key in ("properties", "required")}, DOG],
        [True, False],
        [INTEGER, {"$ref": "#/$defs/a~1b"}],
    ],
)
def test_apart(schemas):
    root = {"oneOf": schemas, "$defs": {"cat": CAT, "dog": DOG, "a/b": STRING}}
    assert DisjointnessProof(root).overlapping(schemas) is None


@pytest.mark.parametrize(
    "schemas",
    [[CAT, DOG, {"type": "null"}], [{"$ref": "#/$defs/cat"}, {"type": "null"}], [{"anyOf": [INTEGER, {"type": "null"}]}, STRING]],
)
def test_xgrammar_does_not_prove_it(capfd, schemas):
    """Where this fails, xgrammar has learned to, and a part of the proof has become redundant."""
    xgrammar.Grammar.from_json_schema(json.dumps({"oneOf": schemas, "$defs": {"cat": CAT}}))
    assert "oneOf with overlapping or non-provably-disjoint branches" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("schemas", "pair"),
    [
        ([INTEGER, {"type": "number"}], (0, 1)),
        ([{"type": "null"}, {"type": "number"}, {"const": 2.0}], (1, 2)),
        ([{"const": 1}, {"const": 1.0}], (0, 1)),
        ([{"enum": ["a", "b"]}, {"enum": ["b"]}], (0, 1)),
        ([STRING, {"const": "a"}], (0, 1)),
        ([STRING, {}], (0, 1)),
        ([STRING, True], (0, 1)),
        ([{**STRING, "pattern": "^a$"}, {**STRING, "pattern": "^b$"}], (0, 1)),
        ([{**CAT, "required": []}, {**DOG, "required": []}], (0, 1)),
        ([CAT, CAT], (0, 1)),
        ([objects(a=INTEGER), objects(a={"type": "number"})], (0, 1)),
        ([objects(a=INTEGER), objects(a=INTEGER, b=STRING)], (0, 1)),  # the second is valid for the first, which forbids nothing
        ([objects(a=INTEGER), {**objects(b=INTEGER), "additionalProperties": True}], (0, 1)),
        ([{"$ref": "#"}, STRING], (0, 1)),
        ([{"$ref": "#/nowhere"}, STRING], (0, 1)),
        ([{"anyOf": [{"type": "null"}, STRING]}, {"type": ["string", "array"]}], (0, 1)),
    ],
)
def test_not_proven(schemas, pair):
    assert DisjointnessProof({"oneOf": schemas}).overlapping(schemas) == pair


def test_large_unions_take_no_time():
    began = time.monotonic()
    assert DisjointnessProof({}).overlapping([objects(kind=kind(f"k{i}"), a=STRING, b=STRING) for i in range(120)]) is None
    assert DisjointnessProof({}).overlapping([{"enum": [f"{i}-{j}" for j in range(100)]} for i in range(90)]) is None
    deep = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 8}}}
    assert DisjointnessProof(deep).overlapping([{"$ref": "#/$defs/a"}, STRING]) == (0, 1)
    definitions = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 8} for i in range(5)} | {"a5": INTEGER}
    unions = {f"p{i}": {"oneOf": [{"$ref": "#/$defs/a0"}, STRING]} for i in range(200)}
    assert enforceable({"$defs": definitions, **objects(**unions)})
    assert time.monotonic() - began < 10


def test_all_unions_of_a_schema_share_what_their_proof_may_cost():
    def forty(name):
        return {"anyOf": [{"type": name} for _ in range(40)]}

    with pytest.raises(OptionError, match="has a 'oneOf' whose schemas 0 and 1 may accept the same value at #/properties/p30"):
        enforceable(objects(**{f"p{i}": {"oneOf": [forty("integer"), forty("string")]} for i in range(40)}))


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    radius: int


class Nothing(BaseModel):
    kind: Literal["nothing"] = "nothing"
    why: str | None = None


class Drawing(BaseModel):
    shape: Annotated[Circle | Nothing, Field(discriminator="kind")]


class Square(BaseModel):
    kind: Literal["polygon"] = "polygon"
    sides: Literal[4] = 4


class Triangle(BaseModel):
    kind: Literal["polygon"] = "polygon"
    sides: Literal[3] = 3


class Sketch(BaseModel):
    shape: Annotated[Circle | Annotated[Square | Triangle, Field(discriminator="sides")], Field(discriminator="kind")]


def test_a_discriminator_with_a_default_is_written_all_the_same():
    """Else both schemas would take what says no kind. Without the discriminator that is so, and is refused."""
    schema = Drawing.model_json_schema()
    assert "kind" not in schema["$defs"]["Circle"]["required"]
    schema = enforceable(schema)
    assert [schema["$defs"][name]["required"] for name in ("Circle", "Nothing")] == [["radius", "kind"], ["kind"]]
    bare = Drawing.model_json_schema()
    del bare["properties"]["shape"]["discriminator"]
    with pytest.raises(OptionError, match="may accept the same value"):
        enforceable(bare)
    odd = {"oneOf": [objects(a=INTEGER), STRING], "discriminator": {"propertyName": "kind"}}
    assert enforceable(odd)["oneOf"][0]["required"] == ["a"]
    assert enforceable({"oneOf": [INTEGER, STRING], "discriminator": {"propertyName": 3}})


def test_a_union_in_a_union_has_the_discriminators_of_both():
    schema = enforceable(Sketch.model_json_schema())["$defs"]
    assert [sorted(schema[name]["required"]) for name in ("Circle", "Square")] == [["kind", "radius"], ["kind", "sides"]]
    turning = {"oneOf": [{"anyOf": [{"$ref": "#/oneOf/0"}, objects(a=INTEGER)]}, STRING], "discriminator": {"propertyName": "a"}}
    with pytest.raises(OptionError, match="may accept the same value"):
        enforceable(turning)


def test_a_discriminator_tells_nothing_apart_from_what_does_not_have_it():
    """A validator takes {"b": 1} for both: it does not know that the grammar always writes the kind of the first."""
    schemas = [objects(kind={"const": "k"}, required=[]), objects(b=INTEGER)]
    with pytest.raises(OptionError, match="may accept the same value"):
        enforceable({"oneOf": schemas, "discriminator": {"propertyName": "kind"}})
