# SPDX-License-Identifier: Apache-2.0
"""Prepare JSON schemas for llguidance, which enforces a schema completely or says that it cannot.

`KEYWORDS` lists what becomes of each keyword. Three kinds of schemas are written anew, so that they can be enforced, or so that
Python's parsers load every answer: formats and patterns (`formats`, `regex`), numbers, and keywords that another one replaces.
Objects are strict: properties that a schema does not mention are not allowed, unless it says so or is combined with other schemas.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import unquote

from phalanx.errors import OptionError
from phalanx.log import get_logger
from phalanx.serve.structured_output.formats import EQUAL_PATTERNS, FORMATS
from phalanx.serve.structured_output.regex import rust_regex
from phalanx.serve.structured_output.validation import json_rule, problem_of

logger = get_logger(__name__)

MAX_BYTES = 128 * 1024
MAX_PROPERTIES = 256
"""Properties of one object; a grammar in which each is optional grows with their square."""
MAX_PATTERN_PROPERTIES = 16
"""Patterns of one object, each two of which are compared."""
NUMBER_LIMIT = 9e18
"""Numbers without a bound are between -9e18 and 9e18, and written without an exponent: 8e556 is infinite to Python's parsers."""
_EXACT = 2**53

Treatment = Literal["enforced", "rewritten", "annotation", "refused"]


def _table(**names: str) -> dict[str, Treatment]:
    return {name: treatment for treatment, listed in names.items() for name in listed.split()}  # type: ignore[misc]


KEYWORDS: dict[str, Treatment] = _table(
    enforced="""type enum const anyOf allOf $ref items prefixItems additionalItems minItems maxItems properties patternProperties
        additionalProperties required maxProperties minLength maxLength minimum maximum exclusiveMinimum exclusiveMaximum
        multipleOf""",
    rewritten="oneOf pattern format minProperties propertyNames unevaluatedProperties unevaluatedItems uniqueItems discriminator",
    annotation="""title description default examples deprecated readOnly writeOnly $comment $schema $id $anchor $defs definitions
        $vocabulary $dynamicAnchor nullable contentMediaType contentEncoding contentSchema""",
    refused="""not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies $dynamicRef
        $recursiveRef $recursiveAnchor""",
)
"""What becomes of each keyword. rewritten: enforced where an equal schema has only keywords of the first kind (`discriminator`: its
property is required in each alternative), else refused. Any other keyword is an annotation, of which the log has one line."""
_ASSERTIONS = frozenset(name for name, treatment in KEYWORDS.items() if treatment in ("enforced", "rewritten")) - {"discriminator"}
_IN_PLACE = ("anyOf", "oneOf", "allOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_ONE = ("items", "additionalItems", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("prefixItems", "items", *_IN_PLACE)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_logged_keywords: set[str] = set()


def read_json(text: str, *, what: str) -> Any:
    """Parse JSON of limited size. Raises OptionError naming the limit, or the place of the syntax error."""
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise OptionError(f"the {what} has {len(text)} characters", why=f"the limit is {MAX_BYTES} bytes", next="simplify it")
    try:
        parsed = json.loads(text)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise OptionError(f"the {what} is not valid JSON", why=str(error)) from None
    return parsed


def enforceable(schema: Any, *, what: str = "json_schema") -> Any:
    """Write a schema (parsed JSON; changed in place) as one that llguidance enforces, or refuses by itself.

    Raises OptionError for the first part that would not be enforced.
    """
    if not isinstance(schema, (dict, bool)):
        raise OptionError(f"the {what} is not a JSON object: {json.dumps(schema)[:60]}")
    if isinstance(schema, dict):
        _Preparation(schema, what).run()
    return schema


def subschemas(schema: Any, where: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas within a schema, with their JSON pointers, itself first. Data (enum, const, default) and property names are not
    schemas."""
    if not isinstance(schema, dict):
        return
    yield where, schema
    for keyword in _ONE:
        yield from subschemas(schema.get(keyword), f"{where}/{keyword}")
    for keyword in _LISTS:
        listed = schema.get(keyword)
        for i, child in enumerate(listed if isinstance(listed, list) else ()):
            yield from subschemas(child, f"{where}/{keyword}/{i}")
    for keyword in _MAPS:
        mapped = schema.get(keyword)
        for name, child in mapped.items() if isinstance(mapped, dict) else ():
            yield from subschemas(child, f"{where}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}")


class _Preparation:
    """One schema. root: changed in place. what: its name in errors."""

    def __init__(self, root: dict[str, Any], what: str) -> None:
        self.root, self.what = root, what
        self.where = "#"
        self.combined: set[int] = set()

    def run(self) -> None:
        nodes = list(subschemas(self.root))
        for self.where, node in nodes:
            self.check_keywords(node)
        for self.where, node in nodes:
            self.numbers(node)
            self.strings(node)
            self.arrays(node)
            self.objects(node)
        for self.where, node in reversed(nodes):  # the inner ones first: an outer one copies them
            if isinstance(node.get("oneOf"), list):
                self.one_of(node)
        nodes = list(subschemas(self.root))
        for _, node in nodes:
            if self.combines(node):
                self.mark_combined(node)
        for _, node in nodes:
            self.be_strict(node)

    def refuse(self, part: str, *, why: str = "the grammar cannot enforce it", next: str = "remove it") -> OptionError:
        return OptionError(f"the {self.what} has {part} at {self.where}", why=why, next=next)

    # ---- keywords ------------------------------------------------------------------------------------------------------

    def check_keywords(self, node: dict[str, Any]) -> None:
        for name in list(node):
            treatment = KEYWORDS.get(name)
            if treatment == "refused":
                raise self.refuse(repr(name))
            if treatment is None:
                if name not in _logged_keywords and len(_logged_keywords) < 1_000:
                    _logged_keywords.add(name)
                    logger.info("JSON schemas: the unknown keyword %r, at %s, has no effect", name[:60], self.where[:200])
                del node[name]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            if reference.startswith("#"):
                raise self.refuse(f"the anchor {reference!r} as a reference", next="refer to its place, as in '#/$defs/name'")
            raise self.refuse(f"the schema {reference!r}, which is not part of it")
        if isinstance(reference, str) and self.referred(reference) is None:
            raise self.refuse(f"the reference {reference!r}", why="it leads nowhere", next="correct it")
        if node.get("uniqueItems") and node.get("maxItems") not in (0, 1):
            raise self.refuse("'uniqueItems'")
        for keyword in ("type", *_IN_PLACE, "enum"):
            if node.get(keyword) == []:
                raise self.refuse(f"an empty {keyword!r}", why="no value satisfies it", next="add a choice, or remove it")
        for keyword in ("uniqueItems", "$id", "$anchor", "$dynamicAnchor"):
            node.pop(keyword, None)

    def referred(self, reference: str) -> Any:
        """What a reference leads to; None: nothing."""
        node: Any = self.root
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name)
            elif isinstance(node, list) and name.isascii() and name.isdigit() and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        return node

    # ---- objects ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def combines(node: dict[str, Any]) -> bool:
        """Whether a value must satisfy several schemas at this place: one may describe properties that another does not."""
        applied = sum(len(node[name]) if name == "allOf" and isinstance(node[name], list) else 1 for name in (*_IN_PLACE, "$ref")
                      if name in node)  # fmt: skip
        return applied > 1 or (applied == 1 and bool(node.keys() & _ASSERTIONS - {*_IN_PLACE, "$ref", "type"}))

    def mark_combined(self, node: Any) -> None:
        if not isinstance(node, dict) or id(node) in self.combined:
            return
        self.combined.add(id(node))
        for name in _IN_PLACE:
            for child in node[name] if isinstance(node.get(name), list) else ():
                self.mark_combined(child)
        if isinstance(node.get("$ref"), str):
            self.mark_combined(self.referred(node["$ref"]))

    def objects(self, node: dict[str, Any]) -> None:
        properties, patterns = node.get("properties"), node.get("patternProperties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise self.refuse(f"{len(properties)} properties in one object (the limit is {MAX_PROPERTIES})")
        if isinstance(patterns, dict):
            if len(patterns) > MAX_PATTERN_PROPERTIES:
                raise self.refuse(f"{len(patterns)} patterns of properties in one object (the limit is {MAX_PATTERN_PROPERTIES})")
            node["patternProperties"] = {rust_regex(name, what=f"'patternProperties' at {self.where}"): child
                                         for name, child in patterns.items()}  # fmt: skip
        if "unevaluatedProperties" in node:
            if node.keys() & {*_IN_PLACE, "$ref", "additionalProperties"}:
                raise self.refuse("'unevaluatedProperties' beside another schema of the same object")
            node["additionalProperties"] = node.pop("unevaluatedProperties")
        if "propertyNames" in node:
            self.property_names(node)
        least = node.get("minProperties")
        if isinstance(least, int) and least > max(1, len(self.required(node))) and not self.closed(node):
            raise self.refuse("'minProperties' of an object with any names", why="a name may come twice")

    @staticmethod
    def required(node: dict[str, Any]) -> set[str]:
        listed = node.get("required")
        return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()

    def closed(self, node: dict[str, Any]) -> bool:
        """Whether an object has no names but those that it describes, each of which comes once."""
        described = node.keys() & {"properties", "patternProperties"}
        return "patternProperties" not in node and node.get("additionalProperties", not described) is False

    def be_strict(self, node: dict[str, Any]) -> None:
        """Allow no properties that a schema does not mention."""
        properties, patterns = node.get("properties"), node.get("patternProperties")
        known = self.required(node) <= (properties.keys() if isinstance(properties, dict) else set())
        if known and (properties is not None or patterns) and id(node) not in self.combined:
            node.setdefault("additionalProperties", False)

    def property_names(self, node: dict[str, Any]) -> None:
        """Write `propertyNames` as `patternProperties`."""
        names, values = node.pop("propertyNames"), node.get("additionalProperties", True)
        while isinstance(names, dict) and isinstance(names.get("$ref"), str) and not names.keys() & _ASSERTIONS - {"$ref"}:
            names = self.referred(names["$ref"])
        if names is True or names in ({}, {"type": "string"}):
            return
        if node.keys() & {"properties", "patternProperties"}:
            raise self.refuse("'propertyNames' together with 'properties' or 'patternProperties'")
        pattern = self.pattern_of_names(names) if isinstance(names, dict) else None
        if pattern is None:
            raise self.refuse("'propertyNames' of a kind that cannot be enforced", next="give one 'pattern', 'enum' or length")
        node["patternProperties"], node["additionalProperties"] = {pattern: values}, False

    def pattern_of_names(self, names: dict[str, Any]) -> str | None:
        asserted = {name for name in names if KEYWORDS.get(name) in ("enforced", "rewritten")} - {"type"}
        if asserted & {"enum", "const"} and len(asserted) == 1:
            listed = names["enum"] if "enum" in names else [names["const"]]
            texts = [re.escape(name) for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
            return f"^(?:{'|'.join(texts)})$" if texts else None
        if asserted == {"pattern"} or asserted == {"pattern", "format"}:
            return rust_regex(str(names["pattern"]), what=f"'propertyNames' at {self.where}")
        if asserted == {"format"} and names["format"] in FORMATS:
            return f"^(?:{FORMATS[names['format']]})$"
        if asserted and asserted <= {"minLength", "maxLength"}:
            return f"^(?s:.{{{int(names.get('minLength', 0))},{names.get('maxLength', '')}}})$"
        return None

    # ---- values ----------------------------------------------------------------------------------------------------------

    def numbers(self, node: dict[str, Any]) -> None:
        for keyword in _COUNTS:
            if isinstance(node.get(keyword), float) and node[keyword].is_integer():
                node[keyword] = int(node[keyword])
        for keyword in ("const", "enum"):
            for number in _numbers_in(node.get(keyword)):
                if abs(number) > _EXACT:
                    raise self.refuse(
                        f"the number {number} in {keyword!r}", why="numbers beyond 2^53 are not exact", next="use a string"
                    )
        named = node.get("type")
        types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        integers = "integer" in types and "number" not in types
        for keyword in _BOUNDS:
            if isinstance(node.get(keyword), int | float) and not isinstance(node[keyword], bool):
                node[keyword] = _inward(node[keyword], up="inimum" in keyword, integers=integers)
        if not integers:
            self._exclude_ends(node)
        if "number" in types and not node.keys() & {"const", "enum"}:
            if not node.keys() & {"minimum", "exclusiveMinimum"}:
                node["minimum"] = -NUMBER_LIMIT
            if not node.keys() & {"maximum", "exclusiveMaximum"}:
                node["maximum"] = NUMBER_LIMIT

    def _exclude_ends(self, node: dict[str, Any]) -> None:
        """llguidance lets an integer through that is an exclusive bound, where the other bound is less than 1 away: a millionth of
        what is between them lies behind it."""
        bounds = {
            name: node[name] for name in _BOUNDS if isinstance(node.get(name), int | float) and not isinstance(node[name], bool)
        }
        low = max((bounds[name] for name in ("minimum", "exclusiveMinimum") if name in bounds), default=None)
        high = min((bounds[name] for name in ("maximum", "exclusiveMaximum") if name in bounds), default=None)
        if low is None or high is None or not 0 < high - low < 1:
            return
        step = 10.0 ** math.floor(math.log10(high - low) - 6)
        for exclusive, inclusive, end, inner in (
            ("exclusiveMinimum", "minimum", low, low + step), ("exclusiveMaximum", "maximum", high, high - step)
        ):  # fmt: skip
            if bounds.get(exclusive) == end and float(end).is_integer():
                if inner == end:
                    raise self.refuse(f"{exclusive!r} {end} beside a bound less than 1 away", why="it is too large for that")
                del node[exclusive]
                node[inclusive] = inner

    def strings(self, node: dict[str, Any]) -> None:
        pattern, format_ = node.get("pattern"), node.get("format")
        if not isinstance(format_, str) or format_ not in FORMATS or pattern is not None:
            node.pop("format", None)
        else:
            node["pattern"] = f"^(?:{FORMATS[node.pop('format')]})$"
        if isinstance(pattern, str):
            equal = EQUAL_PATTERNS.get(pattern)
            node["pattern"] = f"^(?:{equal})$" if equal else rust_regex(pattern, what=f"'pattern' at {self.where}")

    def arrays(self, node: dict[str, Any]) -> None:
        if "unevaluatedItems" in node:
            if node.keys() & {*_IN_PLACE, "$ref", "items"}:
                raise self.refuse("'unevaluatedItems' beside another schema of the same array")
            node["items"] = node.pop("unevaluatedItems")

    def one_of(self, node: dict[str, Any]) -> None:
        """Write `oneOf` as `anyOf`, where the library proves that no two alternatives accept the same value. It does not look
        behind references, and takes two numbers for the same value."""
        discriminator = node.pop("discriminator", None)
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        inlined = [self.inlined(child) for child in node.pop("oneOf")]
        for child in inlined:
            if isinstance(tag, str) and isinstance(child, dict) and tag in child.get("properties", {}):
                child["required"] = list(dict.fromkeys([*child.get("required", []), tag]))
        values = [value for child in inlined for value in _listed(child)]
        distinct = all(_listed(child) for child in inlined) and len({json.dumps(value) for value in values}) == len(values)
        definitions = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        if not distinct and problem_of(json_rule({**definitions, "oneOf": inlined})) is not None:
            raise self.refuse(
                "a 'oneOf' whose alternatives may accept the same value", why="the grammar cannot enforce that only one accepts it",
                next="use 'anyOf', or give them different types, or a required property with a different 'const' in each",
            )  # fmt: skip
        if "anyOf" in node:
            node["allOf"] = [*node.get("allOf", []), {"anyOf": node.pop("anyOf")}]
        node["anyOf"] = inlined

    def inlined(self, child: Any) -> Any:
        """A copy of an alternative, with what it refers to in place of a reference."""
        for _ in range(8):
            if not (isinstance(child, dict) and isinstance(child.get("$ref"), str)) or child.keys() & _ASSERTIONS - {"$ref"}:
                break
            child = self.referred(child["$ref"])
        return dict(child) if isinstance(child, dict) else child


def _listed(child: Any) -> list[Any]:
    """The values of an alternative that only lists strings and whole numbers; empty for any other."""
    if not isinstance(child, dict) or child.keys() & _ASSERTIONS - {"const", "enum", "type"}:
        return []
    values = [child["const"]] if "const" in child else child.get("enum", [])
    plain = isinstance(values, list) and all(isinstance(value, (str, int)) and not isinstance(value, bool) for value in values)
    return values if plain else []


def _inward(bound: float, *, up: bool, integers: bool) -> float:
    """The nearest bound that the library takes, and writes without going beyond it, within the allowed range. integers: of these it
    writes all digits; of others the fewest that give the same double, and 2^60 as 1152921504606847000."""
    if abs(bound) <= _EXACT:
        return bound
    if abs(bound) > NUMBER_LIMIT:
        return math.copysign(NUMBER_LIMIT, bound) if up == (bound < 0) else bound
    nearest = float(bound)
    digits = int if integers else lambda value: int(Decimal(repr(value)))
    while digits(nearest) < bound if up else digits(nearest) > bound:
        nearest = math.nextafter(nearest, math.inf if up else -math.inf)
    return nearest


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    for child in _children(value):
        yield from _numbers_in(child)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
