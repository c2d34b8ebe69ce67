# SPDX-License-Identifier: Apache-2.0
"""Which JSON schemas we take: those whose every demand the grammar enforces, and small enough to compile in moments.

xgrammar drops some keywords in silence, and some strings that it lets through are not JSON (all seen with 0.2.8); an answer could
then break the schema that it was promised to follow. So each of these is refused by name, with where it stands, or said in another
way. Keywords that only annotate (title, default, description, examples, ...) pass, as the JSON Schema specification has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from phalanx.errors import OptionError
from phalanx.serve.structured_output.oneof import Proof, refuses, tags_of
from phalanx.serve.structured_output.regex import expand_unicode_classes, parts, unsupported_construct

MAX_BYTES = 128 * 1024
MAX_DEPTH = 48
"""Brackets open at once in the text; compile time grows with a power of it."""
MAX_NODES = 10_000
MAX_PROPERTIES = 256
"""Of one object: a grammar in which each may be left out grows with their square."""

_IGNORED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_CHOICES = ("$ref", "anyOf", "oneOf", "allOf")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id", "$anchor",
     "$defs", "definitions", "discriminator", "nullable")
)  # fmt: skip
_ONE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_FOR_ONE_TYPE = (
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
_LENGTHS = ("minLength", "maxLength")
_CONTROL = re.compile(r"[\x00-\x1f]|\\[nrtfv0c]|\\x[01]|\\u00[01]")
_QUOTE = re.compile(r'"|\\\\|\\x(?:22|5[cC])|\\u00(?:22|5[cC])')
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def read_json(text: str, *, what: str) -> Any:
    """The JSON of a guide, bounded in size and nesting. Raises OptionError that says which bound, or where it is not JSON."""
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise OptionError(f"a {what} of {len(text)} characters was asked for", why=f"it may have {MAX_BYTES} bytes")
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        raise OptionError(f"the {what} is not JSON", why=str(error)) from None
    nodes, level = 0, [parsed]
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        level = [child for node in level for child in _children(node)]
    if level:
        raise _too_deep(what)
    if nodes > MAX_NODES:
        raise OptionError(f"a {what} of {nodes} values was asked for", why=f"it may have {MAX_NODES}")
    return parsed


def enforceable(schema: Any, *, what: str = "json_schema") -> Any:
    """A schema (parsed JSON; changed in place) as xgrammar enforces it whole.

    A string with a length becomes one with a pattern, since xgrammar's own rule for lengths lets control characters into the JSON.
    Raises OptionError for the first demand that the grammar would not enforce.
    """
    if not isinstance(schema, (dict, bool)):
        raise OptionError(f"the {what} is {json.dumps(schema)[:60]}", why="a schema is a JSON object")
    tags = list(tags_of((node for _, node in _schemas(schema, "#")), schema))
    proof = Proof(schema, tags)
    for where, node in _schemas(schema, "#"):
        complaint = _complaint(node) or _complaint_of_one_of(node, proof)
        if complaint is not None:
            raise OptionError(f"the {what} asks at {where} for {complaint.demand}", why=complaint.why, next=complaint.next)
        if isinstance(node.get("pattern"), str):
            node["pattern"] = expand_unicode_classes(node["pattern"])
        if isinstance(node.get("patternProperties"), dict):
            node["patternProperties"] = {expand_unicode_classes(name): child for name, child in node["patternProperties"].items()}
        low, high = node.get("minLength", 0), node.get("maxLength", "")
        if (
            any(name in node for name in _LENGTHS)
            and isinstance(low, int)
            and isinstance(high or 0, int)
            and 0 <= low <= (high or low)
        ):
            node["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{low},{high}}}$'
            for name in _LENGTHS:
                node.pop(name, None)
    for node, name in tags:
        wanted = node.get("required", [])
        node["required"] = wanted if name in wanted else [*wanted, name]
    return schema


class _Complaint(NamedTuple):
    demand: str
    why: str = "the grammar cannot enforce it"
    next: str = "leave it out"


def _complaint(node: dict[str, Any]) -> _Complaint | None:
    for keyword in _IGNORED:
        if keyword in node:
            return _Complaint(repr(keyword))
    if node.get("uniqueItems") is True:
        return _Complaint("'uniqueItems'")
    for of in (_complaint_of_choice, _complaint_of_listed, _complaint_of_value, _complaint_of_pattern, _complaint_of_object):
        complaint = of(node)
        if complaint is not None:
            return complaint
    return None


def _complaint_of_choice(node: dict[str, Any]) -> _Complaint | None:
    for keyword in ("type", "anyOf", "oneOf", "allOf"):
        if node.get(keyword) == []:
            return _Complaint(f"an empty {keyword!r}", why="nothing satisfies it", next="name a choice, or leave it out")
    if isinstance(node.get("$ref"), str) and not node["$ref"].startswith("#"):
        return _Complaint(f"the schema {node['$ref']!r}, which is not part of it")
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        return _Complaint("'allOf' with more than one schema")
    choices = [keyword for keyword in _CHOICES if keyword in node]
    beside = sorted(set(node) - _ANNOTATIONS - set(choices[:1])) if choices else []
    return _Complaint(f"{choices[0]!r} together with {', '.join(repr(name) for name in beside)}") if beside else None


def _complaint_of_one_of(node: dict[str, Any], proof: Proof) -> _Complaint | None:
    """The grammar takes what any of the schemas takes; that is `oneOf` where no two of them take the same."""
    schemas = node.get("oneOf")
    pair = proof.overlapping(schemas) if isinstance(schemas, list) else None
    if pair is None:
        return None
    return _Complaint(
        f"a 'oneOf' whose schemas {pair[0]} and {pair[1]} may take the same value",
        why="the grammar cannot enforce that only one takes it",
        next="use 'anyOf', or tell them apart by type, or by a required property with another 'const' in each",
    )


def _complaint_of_listed(node: dict[str, Any]) -> _Complaint | None:
    """Values are written as they are listed, whatever stands beside them."""
    listed = [keyword for keyword in ("const", "enum") if keyword in node]
    if not listed:
        return None
    beside = sorted(set(node) - _ANNOTATIONS - {listed[0], "type", "format"})
    if beside:
        return _Complaint(f"{listed[0]!r} together with {', '.join(repr(name) for name in beside)}")
    values = [node["const"]] if listed[0] == "const" else node["enum"]
    for value in values if isinstance(values, list) else ():
        if "type" in node and refuses(node, value):
            said = json.dumps(value)
            return _Complaint(
                f"the value {said[:60]} in {listed[0]!r}", why=f"its 'type' {json.dumps(node['type'])[:60]} refuses it",
                next="leave one of them out",
            )  # fmt: skip
    return None


def _complaint_of_value(node: dict[str, Any]) -> _Complaint | None:
    typed = [keyword for keyword in _FOR_ONE_TYPE if keyword in node]
    if typed and not any(keyword in node for keyword in ("type", "enum", "const")):
        return _Complaint(f"{typed[0]!r} without a 'type'")
    named = node.get("type")
    if "multipleOf" in node and (named == "number" or (isinstance(named, list) and "number" in named)):
        return _Complaint("'multipleOf' of a 'number'", next="use the type 'integer', or leave it out")
    length = any(name in node for name in _LENGTHS)
    for keyword in ("pattern", "format"):
        if length and keyword in node:
            return _Complaint(f"{keyword!r} together with a length")
    return None


def _complaint_of_pattern(node: dict[str, Any]) -> _Complaint | None:
    """Of `pattern`, and of the patterns of property names."""
    mapped = node.get("patternProperties")
    for keyword, patterns in (
        ("pattern", [node.get("pattern")]),
        ("patternProperties", mapped if isinstance(mapped, dict) else ()),
    ):
        for pattern in patterns:
            if not isinstance(pattern, str):
                continue
            part = unsupported_construct(pattern)
            if part is not None:
                return _Complaint(f"a {keyword!r} with {part}", next="say it without")
            # Such a character comes out as it is, not escaped; classes leave quotation marks out by themselves.
            if any(
                (_QUOTE.search(text) and kind != "class") or (_CONTROL.search(text) and not text.startswith("[^"))
                for kind, text in parts(pattern)
            ):
                return _Complaint(
                    f"a {keyword!r} with a character that JSON escapes (a quotation mark, a backslash, a control character)"
                )
    return None


def _complaint_of_object(node: dict[str, Any]) -> _Complaint | None:
    properties, required, patterns = node.get("properties", {}), node.get("required", []), node.get("patternProperties", {})
    if not (isinstance(properties, dict) and isinstance(required, list) and isinstance(patterns, dict)):
        return None
    if len(properties) > MAX_PROPERTIES:
        return _Complaint(f"{len(properties)} properties in one object (the most is {MAX_PROPERTIES})")
    unknown = [name for name in required if not isinstance(name, str) or name not in properties]
    if unknown:
        return _Complaint(f"the required property {unknown[0]!r}, which 'properties' does not describe")
    # A name that two of these speak of is held to one of them only.
    for keyword in ("properties", "patternProperties"):
        if "propertyNames" in node and node.get(keyword):
            return _Complaint(f"'propertyNames' together with {keyword!r}")
    if patterns and (properties or len(patterns) > 1):
        return _Complaint("'patternProperties' together with " + ("'properties'" if properties else "another pattern"))
    return None


def _schemas(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its JSON pointer; data (enum, const, default) and property names are not schemas."""
    if not isinstance(schema, dict):
        return
    yield where, schema
    for keyword in _ONE:
        yield from _schemas(schema.get(keyword), f"{where}/{keyword}")
    for keyword in _LISTS:
        listed = schema.get(keyword)
        for i, child in enumerate(listed if isinstance(listed, list) else ()):
            yield from _schemas(child, f"{where}/{keyword}/{i}")
    for keyword in _MAPS:
        mapped = schema.get(keyword)
        for name, child in mapped.items() if isinstance(mapped, dict) else ():
            yield from _schemas(child, f"{where}/{keyword}/{name}")


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _too_deep(what: str) -> OptionError:
    return OptionError(f"a {what} nested deeper than {MAX_DEPTH} was asked for", why="compiling it would take too long")
