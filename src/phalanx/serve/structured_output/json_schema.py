# SPDX-License-Identifier: Apache-2.0
"""Check JSON schemas: accepted are those that the grammar enforces completely and that compile quickly.

xgrammar ignores some keywords silently or with a line on stderr, and allows some strings that are not JSON (observed with 0.2.8 and
0.2.9); an answer could then violate its schema. Each such keyword is rejected by name and place, or rewritten. Keywords that only
annotate (title, default, description, examples, ...) are accepted, as the JSON Schema specification demands.

Each check but one is here because xgrammar compiles what it rejects: keywords that xgrammar does not know; a keyword beside `$ref`,
`anyOf`, `enum` or `const`; an anchor as a reference; a bound without a type; a pattern beside a length or format; a pattern whose
text JSON escapes; a property that two keywords describe. The one: references that lead only to each other, which xgrammar 0.2.9
rejects, and older versions do not; all get the same message here. What xgrammar rejects by itself (values that are no schemas,
bounds that exclude each other, `false`) is left to it. Tests say so when a version of xgrammar rejects one of these by itself.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from phalanx.errors import OptionError
from phalanx.serve.structured_output.oneof import DisjointnessProof, discriminator_tags, excludes_type_of, referred
from phalanx.serve.structured_output.regex import expand_unicode_classes, parts, unsupported_construct

MAX_BYTES = 128 * 1024
MAX_DEPTH = 48
"""Open brackets at once in the text; compile time grows with a power of it."""
MAX_NODES = 10_000
MAX_PROPERTIES = 256
"""Properties of one object; a grammar in which each is optional grows with their square."""

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
_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uri-template", "uuid",
     "json-pointer", "relative-json-pointer")
)  # fmt: skip
"""Those that the grammar enforces. Any other is an annotation."""
_CONTROL = re.compile(r"[\x00-\x1f]|\\[nrtfv0c]|\\x[01]|\\u00[01]")
_QUOTE = re.compile(r'"|\\\\|\\x(?:22|5[cC])|\\u00(?:22|5[cC])')
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def read_json(text: str, *, what: str) -> Any:
    """Parse JSON of limited size and nesting. Raises OptionError naming the limit, or the place of the syntax error."""
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise OptionError(f"the {what} has {len(text)} characters", why=f"the limit is {MAX_BYTES} bytes", next="simplify it")
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        raise OptionError(f"the {what} is not valid JSON", why=str(error)) from None
    nodes, level = 0, [parsed]
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        level = [child for node in level for child in _children(node)]
    if level:
        raise _too_deep(what)
    if nodes > MAX_NODES:
        raise OptionError(f"the {what} has {nodes} values", why=f"the limit is {MAX_NODES}", next="simplify it")
    return parsed


def enforceable(schema: Any, *, what: str = "json_schema") -> Any:
    """Rewrite a schema (parsed JSON; changed in place) into one that xgrammar enforces completely.

    A length of a string becomes a pattern, because xgrammar's own rule for lengths allows control characters in the JSON. Raises
    OptionError for the first part that the grammar would not enforce.
    """
    if not isinstance(schema, (dict, bool)):
        raise OptionError(f"the {what} is not a JSON object: {json.dumps(schema)[:60]}")
    tags = list(discriminator_tags((node for _, node in _schemas(schema, "#")), schema))
    proof = DisjointnessProof(schema, tags)
    ending: set[int] = set()
    for where, node in _schemas(schema, "#"):
        complaint = _complaint(node) or _complaint_of_chain(node, schema, ending) or _complaint_of_one_of(node, proof)
        if complaint is not None:
            raise OptionError(f"the {what} has {complaint.part} at {where}", why=complaint.why, next=complaint.next)
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
        required = node.get("required", [])
        node["required"] = required if name in required else [*required, name]
    if isinstance(schema, dict):
        _share_patterns(schema)
    return schema


def _share_patterns(schema: dict[str, Any]) -> None:
    """Let equal strings with a pattern refer to one definition: xgrammar writes a rule for each place, and one per definition.

    A pattern of 200 characters in each of ten optional properties of ten alternatives is a rule of 200 states instead of hundreds
    of such rules.
    """
    places: dict[str, list[dict[str, Any]]] = {}
    for _, node in _schemas(schema, "#"):
        if node is not schema and node.get("type") == "string" and isinstance(node.get("pattern"), str):
            kept = {name: value for name, value in node.items() if name not in _ANNOTATIONS}
            if set(kept) == {"type", "pattern"}:
                places.setdefault(kept["pattern"], []).append(node)
    shared = [(pattern, nodes) for pattern, nodes in places.items() if len(nodes) > 1]
    if not shared or not isinstance(schema.get("$defs", {}), dict):
        return
    definitions = schema.setdefault("$defs", {})
    for pattern, nodes in shared:
        name = next(name for i in itertools.count() if (name := f"pattern_{i}") not in definitions)
        definitions[name] = {"type": "string", "pattern": pattern}
        for node in nodes:
            node.clear()
            node["$ref"] = f"#/$defs/{name}"


class _Complaint(NamedTuple):
    part: str
    why: str = "the grammar cannot enforce it"
    next: str = "remove it"


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
            return _Complaint(f"an empty {keyword!r}", why="no value satisfies it", next="add a choice, or remove it")
    if isinstance(node.get("$ref"), str) and node["$ref"] != "#" and not node["$ref"].startswith("#/"):
        if node["$ref"].startswith("#"):  # the grammar would allow any value
            return _Complaint(f"the anchor {node['$ref']!r} as a reference", next="refer to its place, as in '#/$defs/name'")
        return _Complaint(f"the schema {node['$ref']!r}, which is not part of it")
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        return _Complaint("'allOf' with more than one schema")
    choices = [keyword for keyword in _CHOICES if keyword in node]
    others = sorted(set(node) - _ANNOTATIONS - set(choices[:1])) if choices else []
    return _Complaint(f"{choices[0]!r} together with {', '.join(repr(name) for name in others)}") if others else None


def _complaint_of_chain(node: dict[str, Any], root: Any, ending: set[int]) -> _Complaint | None:
    """Follow the references from a node. ending: ids of the nodes from which a chain is known to end; extended."""
    chain: set[int] = set()
    while isinstance(node, dict) and isinstance(node.get("$ref"), str) and id(node) not in ending:
        if id(node) in chain:
            return _Complaint(
                f"the reference {node['$ref']!r}, which leads only to itself",
                why="no finite text satisfies it",
                next="let the chain of references end at a schema",
            )
        chain.add(id(node))
        node = referred(root, node["$ref"])
    ending |= chain
    return None


def _complaint_of_one_of(node: dict[str, Any], proof: DisjointnessProof) -> _Complaint | None:
    """The grammar enforces `anyOf`, which equals `oneOf` if no two of the schemas accept the same value."""
    schemas = node.get("oneOf")
    pair = proof.overlapping(schemas) if isinstance(schemas, list) else None
    if pair is None:
        return None
    return _Complaint(
        f"a 'oneOf' whose schemas {pair[0]} and {pair[1]} may accept the same value",
        why="the grammar cannot enforce that only one accepts it",
        next="use 'anyOf', or give them different types, or a required property with a different 'const' in each",
    )


def _complaint_of_listed(node: dict[str, Any]) -> _Complaint | None:
    """The grammar writes listed values and ignores other keywords beside them."""
    listed = [keyword for keyword in ("const", "enum") if keyword in node]
    if not listed:
        return None
    others = sorted(set(node) - _ANNOTATIONS - {listed[0], "type", "format"})
    if others:
        return _Complaint(f"{listed[0]!r} together with {', '.join(repr(name) for name in others)}")
    values = [node["const"]] if listed[0] == "const" else node["enum"]
    for value in values if isinstance(values, list) else ():
        if "type" in node and excludes_type_of(node, value):
            shown = json.dumps(value)
            return _Complaint(
                f"the value {shown[:60]} in {listed[0]!r}", why=f"its 'type' {json.dumps(node['type'])[:60]} does not allow it",
                next="remove one of them",
            )  # fmt: skip
    return None


def _complaint_of_value(node: dict[str, Any]) -> _Complaint | None:
    typed = [keyword for keyword in _FOR_ONE_TYPE if keyword in node]
    if typed and not any(keyword in node for keyword in ("type", "enum", "const")):
        return _Complaint(f"{typed[0]!r} without a 'type'")
    named = node.get("type")
    if "multipleOf" in node and (named == "number" or (isinstance(named, list) and "number" in named)):
        return _Complaint("'multipleOf' of a 'number'", next="use the type 'integer', or remove it")
    length = any(name in node for name in _LENGTHS)
    for keyword in ("pattern", "format"):
        if length and keyword in node:
            return _Complaint(f"{keyword!r} together with a length")
    if "pattern" in node and isinstance(node.get("format"), str) and node["format"] in _FORMATS:  # the pattern is ignored
        return _Complaint(f"'pattern' together with the 'format' {node['format']!r}")
    return None


def _complaint_of_pattern(node: dict[str, Any]) -> _Complaint | None:
    """Checks `pattern`, and the patterns of property names."""
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
                return _Complaint(f"a {keyword!r} with {part}", next="rewrite it without")
            # The grammar writes such a character unescaped; classes exclude quotation marks anyway.
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
        return _Complaint(f"{len(properties)} properties in one object (the limit is {MAX_PROPERTIES})")
    unknown = [name for name in required if not isinstance(name, str) or name not in properties]
    if unknown:
        return _Complaint(f"the required property {unknown[0]!r}, which 'properties' does not describe")
    # The grammar applies only one of these keywords to a name that matches two of them.
    for keyword in ("properties", "patternProperties"):
        if "propertyNames" in node and node.get(keyword):
            return _Complaint(f"'propertyNames' together with {keyword!r}")
    if patterns and (properties or len(patterns) > 1):
        return _Complaint("'patternProperties' together with " + ("'properties'" if properties else "another pattern"))
    return None


def _schemas(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas within a schema, with their JSON pointers. Data (enum, const, default) and property names are not schemas."""
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
    return OptionError(f"the {what} is nested deeper than {MAX_DEPTH} levels", why="compiling it would take too long")
