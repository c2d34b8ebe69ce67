# SPDX-License-Identifier: Apache-2.0
"""Whether exactly one schema of a `oneOf` takes each answer. The grammar enforces `anyOf`; so the schemas must be provably apart.

They are when their types do not meet, when their values (const, enum) do not, or, of objects, when a property tells them apart: one
that is required and described apart on both sides, or required on one side and never there on the other. Anything else may be apart
too, but is not proven.
"""

from __future__ import annotations

import itertools
import json
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_TYPES = frozenset(("integer", "number", "string", "boolean", "null", "object", "array"))
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "propertyNames")
_DEPTH = 12
"""References and properties that are followed, one within the other."""
_MOST = 100_000
"""Comparisons of all unions of a schema; what is left then is not proven."""


Tags = Sequence[tuple[dict[str, Any], str]]
"""Schemas, each with a property that the grammar always writes, though the schema does not require it."""


def tags_of(nodes: Iterable[dict[str, Any]], root: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where OpenAPI's `discriminator` beside a `oneOf` names the property that tells its schemas apart: those that have it and do
    not require it, as pydantic writes one with a default; of a union in the union, each of its own. What has it is valid without
    that, too."""
    proof, seen, left = Proof(root), set[tuple[Any, int]](), _MOST
    for node in nodes:
        tag, schemas = node.get("discriminator"), node.get("oneOf")
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        reached = list(schemas) if isinstance(schemas, list) and isinstance(name, str) else []
        for schema in reached:
            left -= 1
            found = proof.resolved(schema) if left > 0 else None
            if not isinstance(found, dict) or (name, id(found)) in seen:
                continue
            seen.add((name, id(found)))
            reached += itertools.chain.from_iterable(_choices(found))
            wanted = found.get("required", [])
            if isinstance(wanted, list) and name in _properties(found) and name not in wanted:
                yield found, name


class Proof:
    """root: the whole schema, which `$ref` refers to. One proof is for all of its unions, so that they share what it may cost."""

    def __init__(self, root: Any, tags: Tags = ()) -> None:
        self._root, self._left = root, _MOST
        self._tags: dict[int, list[str]] = {}
        for schema, name in tags:
            self._tags.setdefault(id(schema), []).append(name)
        self._listed: dict[int, dict[str, Any]] = {}
        self._proven: set[tuple[int, int]] = set()

    def overlapping(self, schemas: Sequence[Any]) -> tuple[int, int] | None:
        """The places of two of these schemas that may take the same answer of the grammar, or None when there are none."""
        for i, j in itertools.combinations(range(len(schemas)), 2):
            one, other = schemas[i], schemas[j]
            if not (self._apart(one, other, 0) and self._apart(other, one, 0)):
                return i, j
        return None

    def _apart(self, written: Any, other: Any, depth: int) -> bool:
        """Nothing that the grammar writes for one schema is valid for the other. Not the same the other way round: the grammar
        writes no properties that a schema does not mention, while a schema by itself lets them be."""
        self._left -= 1
        written, other = self.resolved(written), self.resolved(other)
        pair = id(written), id(other)
        if pair not in self._proven and self._compared(written, other, depth):
            self._proven.add(pair)
        return pair in self._proven

    def _compared(self, written: Any, other: Any, depth: int) -> bool:
        """What `_apart` says, of schemas that are resolved and not known to be apart."""
        if depth > _DEPTH or self._left < 0:
            return False
        if written is False or other is False:
            return True
        if not isinstance(written, dict) or not isinstance(other, dict):
            return False
        for choices in _choices(written):
            return all(self._apart(choice, other, depth + 1) for choice in choices)
        for choices in _choices(other):
            return all(self._apart(written, choice, depth + 1) for choice in choices)
        values, others = self._values(written), self._values(other)
        if values is not None:
            shared = values if others is None else values.keys() & others.keys()
            return all(refuses(other, values[text]) for text in shared)
        types = _types(written, guess=True)
        if not types & _types(other):
            return True
        return types == {"object"} and self._told_apart(written, other, depth)

    def _told_apart(self, written: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        # A validator does not know of tags: `other` takes what lacks its own.
        there, wanted = [*_required(written), *self._tags.get(id(written), ())], _required(other)
        if any(_lacks(written, name) for name in wanted) or any(_forbids(other, name) for name in there):
            return True
        mine, its = _properties(written), _properties(other)
        return any(name in mine and name in its and self._apart(mine[name], its[name], depth + 1) for name in there)

    def _values(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """By their canonical texts; None for a schema that does not list what it takes."""
        values = _values(schema)
        if values is None:
            return None
        if id(schema) not in self._listed:
            self._listed[id(schema)] = {_canonical(value): value for value in values}
        return self._listed[id(schema)]

    def resolved(self, schema: Any) -> Any:
        """The schema that a chain of references and allOf with one schema ends in; None when it ends nowhere."""
        for _ in range(_DEPTH):
            if not isinstance(schema, dict):
                return schema
            reference, every = schema.get("$ref"), schema.get("allOf")
            if isinstance(reference, str):
                schema = _at(self._root, reference)
            elif isinstance(every, list) and len(every) == 1:
                schema = every[0]
            else:
                return schema
        return None


def _at(root: Any, reference: str) -> Any:
    """What a JSON pointer ("#/$defs/x") refers to; None when there is no such thing."""
    if not reference.startswith("#"):
        return None
    for step in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root


def _choices(schema: dict[str, Any]) -> list[list[Any]]:
    return [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """All that the schema may be, if it lists it."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def refuses(schema: dict[str, Any], value: Any) -> bool:
    """The schema's type is not this value's."""
    return type_of(value) not in _types(schema)


def _types(schema: dict[str, Any], *, guess: bool = False) -> frozenset[str]:
    """The types that values of the schema may have; a number may be an integer. guess: as the grammar writes it, which takes a
    schema that speaks of properties only for an object."""
    values, named = _values(schema), schema.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):
        types = frozenset(name for name in named if isinstance(name, str))
        return types | {"integer"} if "number" in types else types
    if values is not None:
        return frozenset(type_of(value) for value in values)
    if guess and any(name in schema for name in _OF_OBJECTS) and not any(name in schema for name in ("items", "prefixItems")):
        return frozenset(("object",))
    return _TYPES


def type_of(value: Any) -> str:
    """The narrowest type of a JSON value: 1.0 is an integer."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _canonical(value: Any) -> str:
    """The same text for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _lacks(schema: dict[str, Any], name: str) -> bool:
    """No object that the grammar writes for the schema has this property: what is not mentioned is not written."""
    more = (schema.get(keyword, False) is not False for keyword in ("additionalProperties", "unevaluatedProperties"))
    return _properties(schema) != {} and name not in _properties(schema) and "patternProperties" not in schema and not any(more)


def _forbids(schema: dict[str, Any], name: str) -> bool:
    """No object with this property is valid for the schema."""
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return (closed and name not in _properties(schema)) or _properties(schema).get(name) is False
