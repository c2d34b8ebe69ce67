# SPDX-License-Identifier: Apache-2.0
"""Prove that at most one schema of a `oneOf` accepts each value: the grammar enforces only `anyOf`.

xgrammar (0.2.8 and 0.2.9) proves by itself that types, listed values, and objects with different constants are disjoint. Where
references, nested unions, or an object beside null come in, which clients send, it falls back to `anyOf` with a warning on stderr.
Hence this proof, whose leaves are types and values again, and the discriminators of pydantic, which xgrammar does not read. A test
says so when xgrammar proves more.

Schemas are disjoint if their types are, if their values (const, enum) are, or, for objects, if a property is: one that is required
with disjoint schemas on both sides, or required on one side and impossible on the other. Other schemas may be disjoint, too, but
this is not proven.
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
"""Limit of nested references and properties that are followed."""
_MAX_COMPARISONS = 100_000
"""Limit of comparisons for all unions of a schema; beyond it nothing is proven."""


Tags = Sequence[tuple[dict[str, Any], str]]
"""Schemas, each with a property that the grammar always writes although the schema does not require it."""


def discriminator_tags(nodes: Iterable[dict[str, Any]], root: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The schemas of a `oneOf`, nested unions included, with a property that OpenAPI's `discriminator` names but they don't require
    (pydantic writes this for a property with a default), each with its name. A value with the property is valid in any case.
    """
    proof, visited, left = DisjointnessProof(root), set[tuple[Any, int]](), _MAX_COMPARISONS
    for node in nodes:
        tag, schemas = node.get("discriminator"), node.get("oneOf")
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        reached = list(schemas) if isinstance(schemas, list) and isinstance(name, str) else []
        for schema in reached:
            left -= 1
            resolved = proof.resolved(schema) if left > 0 else None
            if not isinstance(resolved, dict) or (name, id(resolved)) in visited:
                continue
            visited.add((name, id(resolved)))
            reached += itertools.chain.from_iterable(_choices(resolved))
            required = resolved.get("required", [])
            if isinstance(required, list) and name in _properties(resolved) and name not in required:
                yield resolved, name


class DisjointnessProof:
    """Proves that schemas are disjoint. root: the schema that `$ref` refers to. All unions of a schema share one proof."""

    def __init__(self, root: Any, tags: Tags = ()) -> None:
        self._root, self._left = root, _MAX_COMPARISONS
        self._tags: dict[int, list[str]] = {}
        for schema, name in tags:
            self._tags.setdefault(id(schema), []).append(name)
        self._listed: dict[int, dict[str, Any]] = {}
        self._proven: set[tuple[int, int]] = set()

    def overlapping(self, schemas: Sequence[Any]) -> tuple[int, int] | None:
        """The indices of two of these schemas that may accept the same value, or None if all are disjoint."""
        for i, j in itertools.combinations(range(len(schemas)), 2):
            one, other = schemas[i], schemas[j]
            if not (self._disjoint(one, other, 0) and self._disjoint(other, one, 0)):
                return i, j
        return None

    def _disjoint(self, written: Any, other: Any, depth: int) -> bool:
        """Whether nothing that the grammar writes for `written` is valid for `other`. This is not symmetric: the grammar writes no
        properties that a schema does not mention, but the schema itself allows them."""
        self._left -= 1
        written, other = self.resolved(written), self.resolved(other)
        pair = id(written), id(other)
        if pair not in self._proven and self._compared(written, other, depth):
            self._proven.add(pair)
        return pair in self._proven

    def _compared(self, written: Any, other: Any, depth: int) -> bool:
        """`_disjoint` of resolved schemas that are not yet proven disjoint."""
        if depth > _DEPTH or self._left < 0:
            return False
        if written is False or other is False:
            return True
        if not isinstance(written, dict) or not isinstance(other, dict):
            return False
        for choices in _choices(written):
            return all(self._disjoint(choice, other, depth + 1) for choice in choices)
        for choices in _choices(other):
            return all(self._disjoint(written, choice, depth + 1) for choice in choices)
        values, others = self._values(written), self._values(other)
        if values is not None:
            shared = values if others is None else values.keys() & others.keys()
            return all(excludes_type_of(other, values[text]) for text in shared)
        types = _types(written, guess=True)
        if not types & _types(other):
            return True
        return types == {"object"} and self._disjoint_properties(written, other, depth)

    def _disjoint_properties(self, written: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        # A validator does not know tags: `other` also accepts values without its own.
        present, required = [*_required(written), *self._tags.get(id(written), ())], _required(other)
        if any(_lacks(written, name) for name in required) or any(_forbids(other, name) for name in present):
            return True
        ours, others = _properties(written), _properties(other)
        return any(name in ours and name in others and self._disjoint(ours[name], others[name], depth + 1) for name in present)

    def _values(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The listed values by their canonical texts; None for a schema that lists none."""
        values = _values(schema)
        if values is None:
            return None
        if id(schema) not in self._listed:
            self._listed[id(schema)] = {_canonical(value): value for value in values}
        return self._listed[id(schema)]

    def resolved(self, schema: Any) -> Any:
        """The schema at the end of a chain of references and allOf with one schema; None if the chain has no end."""
        for _ in range(_DEPTH):
            if not isinstance(schema, dict):
                return schema
            reference, every = schema.get("$ref"), schema.get("allOf")
            if isinstance(reference, str):
                schema = referred(self._root, reference)
            elif isinstance(every, list) and len(every) == 1:
                schema = every[0]
            else:
                return schema
        return None


def referred(root: Any, reference: str) -> Any:
    """The target of a JSON pointer ("#/$defs/x"); None if there is none."""
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
    """All values of the schema, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def excludes_type_of(schema: dict[str, Any], value: Any) -> bool:
    """Whether the types of the schema exclude this value."""
    return type_of(value) not in _types(schema)


def _types(schema: dict[str, Any], *, guess: bool = False) -> frozenset[str]:
    """The possible types of values of the schema; a number may be an integer. guess: as the grammar writes it, which assumes that a
    schema with properties and without items is an object."""
    values, declared = _values(schema), schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    if isinstance(declared, list):
        types = frozenset(name for name in declared if isinstance(name, str))
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
    """A text that is the same for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
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
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _lacks(schema: dict[str, Any], name: str) -> bool:
    """Whether no object that the grammar writes for the schema has this property: the grammar writes only mentioned properties."""
    more = (schema.get(keyword, False) is not False for keyword in ("additionalProperties", "unevaluatedProperties"))
    return _properties(schema) != {} and name not in _properties(schema) and "patternProperties" not in schema and not any(more)


def _forbids(schema: dict[str, Any], name: str) -> bool:
    """Whether no object with this property is valid for the schema."""
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return (closed and name not in _properties(schema)) or _properties(schema).get(name) is False
