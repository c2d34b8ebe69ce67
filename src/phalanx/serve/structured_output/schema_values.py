# SPDX-License-Identifier: Apache-2.0
"""What a text without quotes stands for, by the JSON schema of its argument: formats in XML write strings as they are.

It is a string where the schema allows one, unless it is the JSON (or a Python literal) of another value that the schema allows. A
schema that says nothing of types stands for a string, as in the reference parser of Qwen3-Coder.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

_MAX_DEPTH = 32
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int, float), "number": (int, float), "boolean": (bool,), "null": (type(None),), "array": (list,),
    "object": (dict,),
}  # fmt: skip
_STATES = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
"""Keywords that say of which type a value is."""
_IMPLIES = {
    "properties": dict, "required": dict, "additionalProperties": dict, "patternProperties": dict, "items": list,
    "prefixItems": list, "minItems": list, "maxItems": list,
}  # fmt: skip
"""Keywords that speak of one type: without a statement, a value is of that type or a string."""


def value_of(text: str, schema: Any, root: Any = None) -> Any:
    """The value of an argument. root: the schema that `$ref` refers to."""
    if not isinstance(schema, Mapping) or schema.get("type") == "string":
        return _nearest(text, schema, root)
    others = list(_literals(text.strip()))
    for value in others:
        if not isinstance(value, str) and _allows(schema, value, root):
            return value
    nearest = _nearest(text, schema, root)
    if _allows(schema, nearest, root):
        return nearest
    for value in others:  # quotation marks around a choice
        if _allows(schema, value, root):
            return value
    return others[0] if others else text  # wrong, as the model wrote it


def is_text(schema: Any) -> bool:
    """Whether `value_of` gives every text as it is, so that a part of the text is a part of the value."""
    if not isinstance(schema, Mapping):
        return True
    return not schema.keys() & (_STATES - {"type"}) and (
        schema.get("type") == "string" if "type" in schema else not schema.keys() & _IMPLIES.keys()
    )


def _nearest(text: str, schema: Any, root: Any) -> str:
    """The text, or without white space around it where only that is one of the schema's choices."""
    return text if _allows(schema, text, root) or not _allows(schema, text.strip(), root) else text.strip()


def _literals(text: str) -> Iterator[Any]:
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # refuses infinity and half of a character
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        yield value


def property_schema(schema: Any, key: str, root: Any = None, depth: int = 0) -> Any:
    """The schema of an object's property, wherever it stands: in `properties`, `patternProperties` or `additionalProperties`, here
    or behind `$ref`, `allOf`, `anyOf` and `oneOf`. {} if it is not known."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {}
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if _finds(pattern, key):
            return value
    inner = [schema_at(root, schema["$ref"])] if "$ref" in schema else []
    inner += [part for name in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(name))]
    known = [inner_schema for part in inner if (inner_schema := property_schema(part, key, root, depth + 1))]
    if known:
        return known[0] if len(known) == 1 else {"anyOf": known}
    additional = schema.get("additionalProperties")
    return additional if isinstance(additional, Mapping) else {}


def property_names(schema: Any, root: Any = None, depth: int = 0) -> set[str]:
    """The names of an object's properties, as far as they are stated."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    properties = schema.get("properties")
    names = set(map(str, properties)) if isinstance(properties, Mapping) else set()
    inner = [schema_at(root, schema["$ref"])] if "$ref" in schema else []
    inner += [part for name in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(name))]
    return names.union(*(property_names(part, root, depth + 1) for part in inner))


def schema_at(root: Any, reference: Any) -> Any:
    """The schema that `$ref` names: "#", or a path such as "#/$defs/Point". {} if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    schema = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and step.isdigit() and int(step) < len(schema):
            schema = schema[int(step)]
        elif isinstance(schema, Mapping) and step in schema:
            schema = schema[step]
        else:
            return {}
    return schema


def _allows(schema: Any, value: Any, root: Any, depth: int = 0) -> bool:
    """Whether a schema allows a value, by its type, choices and bounds."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return isinstance(value, str)
    if not schema.keys() & _STATES:
        return isinstance(value, (str, *(_IMPLIES[name] for name in schema.keys() & _IMPLIES.keys())))
    if value is None and schema.get("nullable") is True:
        return True
    types = schema.get("type", list(_TYPES))
    if not any(_is(value, name) for name in ([types] if isinstance(types, str) else _list(types))):
        return False
    if "const" in schema and not _same(schema["const"], value):
        return False
    if isinstance(schema.get("enum"), list) and not any(_same(choice, value) for choice in schema["enum"]):
        return False
    if "$ref" in schema and not _allows(schema_at(root, schema["$ref"]), value, root, depth + 1):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(_allows(part, value, root, depth + 1) for part in _list(schema[name])):
            return False
    stating = [part for part in _list(schema.get("allOf")) if isinstance(part, Mapping) and part.keys() & _STATES]
    return all(_allows(part, value, root, depth + 1) for part in stating) and _within(schema, value)


def _within(schema: Mapping[str, Any], value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    bounds = [schema.get(name) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
    low, high, above, below = (
        bound if isinstance(bound, int | float) and not isinstance(bound, bool) else None for bound in bounds
    )
    step = schema.get("multipleOf")
    if isinstance(step, int | float) and 0 < step < math.inf and Fraction(str(value)) % Fraction(str(step)):
        return False
    return not (
        (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    )


def _is(value: Any, name: Any) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(name, str) and isinstance(value, _TYPES.get(name, ()))


def _same(choice: Any, value: Any) -> bool:
    """Equality of JSON, in which true is not 1."""
    return bool(choice == value) and isinstance(choice, bool) == isinstance(value, bool)


def _finds(pattern: Any, key: str) -> bool:
    try:
        return re.search(str(pattern), key) is not None
    except re.error:
        return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
