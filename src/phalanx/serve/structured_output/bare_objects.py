# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call as an object with bare keys, as Lark (Gemma 4): what `output_parsing.gemma` reads back.

`{city:<|"|>Oslo<|"|>,days:[1,2],at:{north:true}}`: a string is its text between two quotes, without escapes, so it cannot hold a
quote; numbers and words are JSON, and null may be None. There is no white space. Keys come sorted without regard to case, as the
template writes them. A key that could not be read has quotes, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from phalanx.serve.structured_output.schema_writer import ANNOTATIONS, STRING, SchemaWriter

_BARE_KEY = re.compile(r"[^\s:{}\[\],<](?:[^:{}\[\],<]*[^\s:{}\[\],<])?")
_COMMA = ' "," '
_ANY_KEY = r"/[\w$.\-]{1,128}/"
_NUMBER = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_KEYWORDS = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": STRING,
    "integer": _NUMBER,
    "number": _NUMBER,
}
"""Keywords that are enforced, of each type."""
_ANY: dict[str, Any] = {"type": ["string", "number", "boolean", "null", "object", "array"]}


class BareObjectWriter(SchemaWriter):
    """quote: the text around strings. token: the expression of the special token that it is; None: it is letters. rules: those of
    the grammar, to which this adds. json_rule: the expression of a schema. regex: of a regular expression. ending: of any text up
    to a text and that. what: the schema's name in errors."""

    def __init__(
        self, quote: str, token: str | None, *, rules: list[str], json_rule: Callable[[Any], str], regex: Callable[[str], str],
        ending: Callable[[str], str], what: str,
    ) -> None:  # fmt: skip
        super().__init__(regex=regex, what=what)
        self._quote, self._token, self._rules, self._json_rule, self._ending = quote, token, rules, json_rule, ending
        self._written: dict[int, str] = {}  # id of a part of the schema -> its rule, which may refer to itself

    def write(self, schema: Any) -> str:
        """The expression of an object, prepared by `enforceable`. Raises OptionError for what cannot be written so."""
        self.root = schema if isinstance(schema, dict) else {}
        if "$ref" not in self.root:
            self.root = {"type": "object", **self.root}
        self._written.clear()
        if self.resolved(self.root).get("type") != "object":
            raise self.refused("values that are no objects")
        return self._value(self.root)

    def _value(self, schema: Any) -> str:
        node = self.resolved(schema)
        if node is True or (isinstance(node, dict) and not node.keys() - ANNOTATIONS):
            node = _ANY
        if not isinstance(node, dict):
            raise self.refused("a value that nothing satisfies")
        if (name := self._written.get(id(node))) is None:
            at = len(self._rules)
            self._written[id(node)] = name = f"r{at}"
            self._rules.append("")
            self._rules[at] = f"{name}: {' | '.join(self._alternatives(node))}"
        return name

    def _alternatives(self, node: dict[str, Any]) -> list[str]:
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                self._require(node, {keyword}, f"{keyword!r} beside other keywords")
                return [self._value(child) for child in node[keyword]]
        if node.keys() & {"enum", "const"}:
            self._require(node, {"enum", "const", "type"}, "'enum' beside other keywords")
            return [self._constant(each) for each in self.choices(node) or ()]
        kinds = node.get("type")
        if kinds is None:
            raise self.refused("a value without a 'type'")
        return [self._of_type(node, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]

    def _of_type(self, node: dict[str, Any], kind: str) -> str:
        """The expression of a node's values of one type, of which the keywords of other types say nothing."""
        own = _KEYWORDS.get(kind, frozenset())
        others = frozenset().union(*_KEYWORDS.values()) - own
        node = {**{name: value for name, value in node.items() if name not in others}, "type": kind}
        if kind in ("object", "array", "string"):
            self._require(node, own | {"type"}, f"a {kind} with more than {', '.join(sorted(own))}")
            return {"object": self._object, "array": self._array, "string": self._string}[kind](node)
        if kind in ("integer", "number"):
            return self._json_rule(node)
        self._require(node, {"type"}, f"a {kind} beside other keywords")
        return f"({' | '.join(self._constant(value) for value in self.choices(node) or ())})"

    def _object(self, node: dict[str, Any]) -> str:
        properties, required = node.get("properties") or {}, set(node.get("required", ()))
        if not required <= properties.keys():
            raise self.refused("a required property that it does not describe")
        others = node.get("additionalProperties", True)
        if not properties and others is not False:
            one = f'{_ANY_KEY} ":" {self._value(others)}'
            return f'"{{" ({one} ("," {one})*)? "}}"'
        after = first = '""'  # the properties from here on, behind another and behind none
        for name in sorted(properties, key=str.lower, reverse=True):
            one = f'{self._key(name)} ":" {self._value(properties[name])} {after}'
            optional = name not in required
            after, first = (
                self._rule(f"{comma}{one}{f' | {rest}' if optional else ''}") for comma, rest in (('"," ', after), ("", first))
            )
        return f'"{{" {first} "}}"'

    def _array(self, node: dict[str, Any]) -> str:
        least, most = node.get("minItems", 0), node.get("maxItems")
        if most == 0:
            return '"[" "]"'
        one = self._value(node.get("items", True))
        more = f'("," {one}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {one} {more} "]"' if least else f'"[" ({one} {more})? "]"'

    def _string(self, node: dict[str, Any]) -> str:
        opening = self._token or _literal(self._quote)
        if not node.keys() & STRING:
            return f"{opening} {self._ending(self._quote)}"
        body = self._rule(self.text_body(node, self._quote), terminal=True)
        return f"{opening} {body} {self._token}" if self._token else f"{opening} {self._rule(f'{body} {opening}', terminal=True)}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, dict):
            members = [f'{self._key(name)} ":" {self._constant(value[name])}' for name in sorted(value, key=str.lower)]
            return f'"{{" {_COMMA.join(members)} "}}"'
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._constant, value))} "]"'
        return '("null" | "None")' if value is None else _literal(json.dumps(value))

    def _key(self, name: str) -> str:
        return _literal(name) if _BARE_KEY.fullmatch(name) else self._quoted(name)

    def _quoted(self, text: str) -> str:
        if self._quote in text:
            raise self.refused(f"the text {text[:60]!r}, which holds {self._quote}")
        quote = self._token or _literal(self._quote)
        return f"{quote} {_literal(text)} {quote}" if text else f"{quote} {quote}"

    def _rule(self, body: str, *, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _require(self, node: dict[str, Any], keywords: frozenset[str] | set[str], problem: str) -> None:
        if node.keys() - ANNOTATIONS - keywords:
            raise self.refused(problem)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
