# SPDX-License-Identifier: Apache-2.0
"""Generated schemas: what a random walk under the mask writes is valid by an independent validator, or the schema is refused.

A failure prints the seed of its schema.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs

from phalanx.errors import OptionError, RequestError
from phalanx.serve.structured_output.formats import FORMATS
from tests.support.fuzz import fuzz_seeds
from tests.support.grammars import opened, write

NAMES = ("a", "b", "name", "x>y", "é", 'q"', "a/b~c", "")
PATTERNS = (
    "^[^é]{1,4}$", r"^\S+$", "a|b", "^a|b$", r"^\w{2,3}$", r"\d", "^(ab){1,2}$", r"^[\s\S]$", "^.$", r"^[+--]$", "x{2,}",
    "^$", "^a?$", r"\.", '^"', r"\\", "😀", "(?i)^a$",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    0,
    1,
    -7,
    1.5,
    0.1,
    2**53,
    True,
    False,
    None,
    "",
    "a",
    "1",
    'say "a"\n',
    "é😀",
    [],
    [1, "a"],
    {},
    {"a": 1},
)


class Schemas:
    """Random schemas. chance: of one seed."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.definitions = {name: {} for name in ("d0", "d1")[: chance.randrange(3)]}

    def root(self) -> dict[str, Any]:
        schema = self.schema(3)
        for name in self.definitions:
            self.definitions[name] = self.schema(2)
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def some(self, **keywords: Any) -> dict[str, Any]:
        """Some of the keywords, in any order. A value is a function that makes one."""
        names = [name for name in keywords if self.chance.random() < 0.4]
        self.chance.shuffle(names)
        return {name: keywords[name]() for name in names}

    def schema(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        kinds = [
            "string",
            "integer",
            "number",
            "boolean",
            "null",
            "listed",
            *(("object", "array", "choice", "any") * 2 if depth else ()),
        ]
        kind = chance.choice(kinds)
        if self.definitions and depth and chance.random() < 0.15:
            return {"$ref": f"#/$defs/{chance.choice(list(self.definitions))}", **(self.number() if chance.random() < 0.2 else {})}
        keywords = getattr(self, kind if kind in ("string", "object", "array", "choice", "listed") else "plain")(depth)
        if kind in ("integer", "number"):
            keywords = self.number()
        typed = {"type": kind} if kind in ("string", "integer", "number", "boolean", "null", "object", "array") else {}
        if typed and chance.random() < 0.15:
            typed = {"type": [kind, chance.choice([other for other in ("null", "boolean", "string") if other != kind])]}
        if typed and kind in ("string", "object", "array") and chance.random() < 0.15:
            typed = {}
        return {**typed, **keywords} if chance.random() < 0.5 else {**keywords, **typed}

    def plain(self, _: int) -> dict[str, Any]:
        return self.some(title=lambda: "T", default=lambda: 3, nullable=lambda: True)

    def number(self) -> dict[str, Any]:
        number = lambda: self.chance.choice((0, 1, -3, 0.5, 2.0, 100, 1e6, 2**60, -(2**63)))  # noqa: E731
        multiple = lambda: self.chance.choice((1, 2, 7, 15, 0.5, 0.1, 1024))  # noqa: E731
        return self.some(minimum=number, maximum=number, exclusiveMinimum=number, exclusiveMaximum=number, multipleOf=multiple)

    def string(self, _: int) -> dict[str, Any]:
        length = lambda: self.chance.choice((0, 1, 2.0, 3, 9))  # noqa: E731
        pattern, format_ = lambda: self.chance.choice(PATTERNS), lambda: self.chance.choice([*FORMATS, "custom"])
        return (
            self.some(minLength=length, maxLength=length, pattern=pattern)
            if self.chance.random() < 0.7
            else self.some(format=format_, maxLength=lambda: 60)
        )

    def listed(self, _: int) -> dict[str, Any]:
        if self.chance.random() < 0.5:
            return {"const": self.chance.choice(VALUES)}
        return {"enum": self.chance.sample(VALUES, self.chance.randrange(1, 5))}

    def array(self, depth: int) -> dict[str, Any]:
        count = lambda: self.chance.choice((0, 1, 2, 3.0))  # noqa: E731
        item = lambda: self.chance.choice((True, False)) if self.chance.random() < 0.1 else self.schema(depth - 1)  # noqa: E731
        prefix = lambda: [self.schema(depth - 1) for _ in range(self.chance.randrange(1, 3))]  # noqa: E731
        return self.some(items=item, prefixItems=prefix, minItems=count, maxItems=count, unevaluatedItems=lambda: False)

    def object(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        inner = lambda: self.schema(depth - 1)  # noqa: E731
        names = lambda: chance.sample(NAMES, chance.randrange(1, 4))  # noqa: E731
        return self.some(
            properties=lambda: {name: inner() for name in names()}, required=names,
            additionalProperties=lambda: chance.choice((True, False)) if chance.random() < 0.5 else inner(),
            patternProperties=lambda: {chance.choice(("^a", "^b", "c$", ".")): inner()}, minProperties=lambda: chance.randrange(3),
            maxProperties=lambda: chance.randrange(4), 
            propertyNames=lambda: chance.choice(({"type": "string"}, {"pattern": "^[a-c]$"}, {"enum": ["a", "q"]})),
        )  # fmt: skip

    def choice(self, depth: int) -> dict[str, Any]:
        several = lambda: [self.schema(depth - 1) for _ in range(self.chance.randrange(1, 4))]  # noqa: E731
        keyword = self.chance.choice(("anyOf", "oneOf", "allOf"))
        beside = self.some(minimum=lambda: 1, maxLength=lambda: 4, required=lambda: ["a"]) if self.chance.random() < 0.3 else {}
        return {keyword: several(), **beside}


def for_the_validator(schema: Any) -> Any:
    """In ECMA-262, which JSON Schema names, "." is no end of a line; to the validator it is any character but a line feed."""
    if isinstance(schema, dict):
        name = {".": r"[^\n\r\u2028\u2029]"}
        return {name.get(key, key): for_the_validator(value) for key, value in schema.items()}
    return [for_the_validator(each) for each in schema] if isinstance(schema, list) else schema


def check(seed: int) -> str:
    schema = Schemas(random.Random(seed)).root()
    try:
        matcher = opened("json_schema", json.dumps(schema))
    except OptionError:
        return "refused"
    validator = jsonschema_rs.Draft202012Validator(for_the_validator(schema))
    ends = "endless"
    for walk in range(4):
        try:
            text = write(matcher, 7 * seed + walk, after=25, most=400)
        except RequestError as error:
            if "dead end" not in str(error) and "too long" not in str(error):
                raise
            ends = "dead end"
            continue
        if text is not None:
            value = json.loads(text)
            if "Infinity" not in json.dumps(value):
                assert validator.is_valid(value), f"{json.dumps(schema)} gives {text}"
            ends = "valid"
    return ends


def test_answers_are_valid():
    counts = dict.fromkeys(("refused", "valid", "endless", "dead end"), 0)
    with fuzz_seeds(300) as seeds:
        for seed in seeds:
            counts[check(seed)] += 1
    print(f"{seeds.count} schemas: {counts}")
    assert counts["valid"] > counts["endless"] + counts["dead end"]
