# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call between tags as Lark: `<parameter=KEY>`, a value without quotes, `</parameter>` (Qwen3-Coder), and the
like of other families; what their parser (`output_parsing.tagged`) reads back.

A string is its text; another value is JSON, and so is a choice whose text is the JSON of another value that the schema allows: of
`{"enum": ["null", null]}` the first is `"null"`, but where a tag says what is a string. Text cannot hold the tag that ends a value.
Parameters come in the order of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.errors import OptionError
from phalanx.serve.structured_output.schema_values import value_of
from phalanx.serve.structured_output.schema_writer import ANNOTATIONS, STRING, SchemaWriter

QWEN_PARAMETER = "<parameter=KEY>\nVALUE\n</parameter>\n"
"""How Qwen3-Coder writes a parameter."""
_ONE_LINE = r" & /[^\n]*/"


@dataclass(frozen=True)
class ParameterParts:
    """How one argument is written between tags: `of` takes an example with "KEY" and "VALUE".

    `<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n` is open_key, KEY, end_key, gap, open_value, wrap, VALUE, wrap,
    end_value, separator. open_value is "" where no tag is before the value. Where end_key has "KIND", it says whether the value is
    a string: "true" or "false". Raises OptionError for another example."""

    open_key: str
    end_key: str
    gap: str
    open_value: str
    wrap: str
    end_value: str
    separator: str

    _FORM = re.compile(
        r"(?P<open_key>.+)KEY(?P<end_key>[^\n<]*>|</[^<>]+>)(?P<gap>\s*?)(?P<open_value>(?:<[^<>]+>)?)(?P<wrap>\n?)VALUE(?P=wrap)"
        r"(?P<end_value></[^<>]+>)(?P<separator>\s*)"
    )

    @classmethod
    def of(cls, parameter: str) -> ParameterParts:
        match = cls._FORM.fullmatch(parameter)
        if match is None:
            raise OptionError(
                f"{parameter[:60]!r} is no parameter between tags", next="write it as '<parameter=KEY>VALUE</parameter>'"
            )
        return cls(**match.groupdict())

    @property
    def tells_strings(self) -> bool:
        """Whether end_key says what is a string."""
        return "KIND" in self.end_key

    @property
    def end_keys(self) -> dict[str, bool | None]:
        """How end_key may be written -> whether it says that the value is a string; None: it does not say. Models forget it."""
        before, kind, after = self.end_key.partition("KIND")
        if not kind:
            return {self.end_key: None}
        return {f"{before}true{after}": True, f"{before}false{after}": False, before.split()[0] + after.lstrip(before[-1]): None}

    def middle(self, *, string: bool) -> str:
        """All between KEY and VALUE, a string or not."""
        end_key = self.end_key.replace("KIND", "true" if string else "false")
        return end_key + self.gap + self.open_value + self.wrap


class ParameterWriter(SchemaWriter):
    """parts: how a parameter is written. rule: adds a rule (its body, attributes, and whether it is a terminal) and gives its name.
    json_rule: the expression of a schema. regex: of a regular expression. text: of a literal text. ending: of any text up to a text
    and that. what: the schema's name in errors."""

    def __init__(
        self, parts: ParameterParts, *, rule: Callable[..., str], json_rule: Callable[[Any], str], regex: Callable[[str], str],
        text: Callable[[str], str], ending: Callable[[str], str], what: str,
    ) -> None:  # fmt: skip
        super().__init__(regex=regex, what=what)
        self.parts, self.rule, self.json_rule, self.text, self.ending = parts, rule, json_rule, text, ending

    def write(self, schema: Any) -> str:
        """The expression of all parameters of an object, prepared by `enforceable`. Raises OptionError for what cannot be written
        so."""
        self.root = schema if isinstance(schema, dict) else {}
        node = self.resolved(self.root)
        properties = node.get("properties") or {}
        if node.keys() & {"anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties", "enum", "const"}:
            raise self.refused("a schema that is more than 'properties'")
        parts = self.parts
        if not properties and node.get("additionalProperties", True) is not False:
            key = f"/[^{parts.end_key[0]}<>\\n]{{1,128}}/"
            return f"({self.text(parts.open_key)} {key} {self.value('', {})})*"
        required = set(node.get("required", ()))
        if not required <= properties.keys():
            raise self.refused("a required property that it does not describe")
        rest = '""'
        for name, child in reversed(properties.items()):
            one = f"{self.value(parts.open_key + name, child)} {rest}"
            rest = self.rule(one if name in required else f"{one} | {rest}")
        return rest

    def value(self, before: str, schema: Any) -> str:
        """The expression of a text, of what is between it and a value, and of the value and the end of its parameter."""
        alternatives, parts = self.alternatives(schema), self.parts
        middles = {string: self.text(before + parts.middle(string=string)) for string in (True, False)}
        if any(self.is_free_text(each) for each in alternatives):
            separator = f" {self.text(parts.separator)}" if parts.separator else ""
            all_strings = all(isinstance(each, dict) and each.get("type") == "string" for each in alternatives)
            middle = " | ".join(sorted({middles[string] for string in (True, all_strings)}))
            return f"({middle}) {self.ending(parts.end_value)}{separator}"
        if not parts.tells_strings:
            return f"{middles[False]} {self.any_of(alternatives, schema)}"
        of_kind = {string: [one for each in alternatives for one in self.of_kind(each, string=string)] for string in (True, False)}
        return f"({' | '.join(f'{middles[string]} {self.any_of(each, schema)}' for string, each in of_kind.items() if each)})"

    def of_kind(self, node: Any, *, string: bool) -> list[Any]:
        """An alternative without its values of the other kind; nothing where it has no others."""
        choices = self.choices(node)
        if choices is not None:
            some = [each for each in choices if isinstance(each, str) == string]
            return [{name: value for name, value in node.items() if name != "const"} | {"enum": some}] if some else []
        return [node] if (isinstance(node, dict) and node.get("type") == "string") == string else []

    def any_of(self, alternatives: list[Any], schema: Any) -> str:
        """The expression of a value of one of these alternatives of the schema, and of the end of its parameter."""
        parts = self.parts
        end, beside = self.text(parts.wrap + parts.end_value + parts.separator), any(map(self.is_json, alternatives))
        literal = re.match(r'"(?:[^"\\]|\\.)*"', end)
        begun = literal[0] if literal else ""
        values = [value for each in alternatives for value in self.values(each, begun, beside, schema)]
        return f"({' | '.join(values)}){end[len(begun) :]}"

    def alternatives(self, schema: Any) -> list[Any]:
        node = self.resolved(schema)
        if isinstance(node, dict):
            for name in ("anyOf", "oneOf"):
                if isinstance(node.get(name), list) and not node.keys() - ANNOTATIONS - {name}:
                    return [each for child in node[name] for each in self.alternatives(child)]
            if isinstance(node.get("type"), list):
                return [{**node, "type": one} for one in node["type"]]
        return [node]

    def is_free_text(self, node: Any) -> bool:
        """Whether it allows any text."""
        if not isinstance(node, dict) or not node.keys() - ANNOTATIONS:
            return node is not False
        return node.get("type") == "string" and not node.keys() & {*STRING, "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}

    def is_json(self, node: Any) -> bool:
        """Whether the library writes its JSON: it has lexemes of its own."""
        return self.choices(node) is None and not (isinstance(node, dict) and node.get("type") == "string")

    def values(self, node: Any, end: str, beside: bool, schema: Any) -> list[str]:
        """The expressions of an alternative of a schema. end: the literal text behind it, or "". beside: others are in JSON.

        The lexer takes the longest lexeme. So the end belongs to the lexeme of a text, which would swallow it; and beside JSON a
        text has no end of line, with which it would live on where a number ends.
        """
        choices = self.choices(node)
        if choices is not None:
            if node.keys() - ANNOTATIONS - {"enum", "const", "type"}:
                raise self.refused("'enum' beside other keywords")
            texts = [
                each if isinstance(each, str) and (self.parts.tells_strings or isinstance(value_of(each, schema, self.root), str))
                else json.dumps(each, ensure_ascii=False)
                for each in choices
            ]  # fmt: skip
            return [self.rule(f"{self.literal(each)} {end}", terminal=True) if each + end else '""' for each in texts]
        if self.is_json(node):
            if isinstance(node, dict) and not isinstance(node.get("type"), str):
                raise self.refused("a parameter without a 'type'")
            definitions = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
            return [f"{self.json_rule({**definitions, **node} if isinstance(node, dict) else node)} {end}"]
        body = self.text_body(node, self.parts.end_value) + (_ONE_LINE if beside else "")
        return [self.rule(f"{self.rule(body, terminal=True)} {end}", terminal=True)]

    def literal(self, text: str) -> str:
        if self.parts.end_value in text:
            raise self.refused(f"the value {text[:60]!r}, which holds {self.parts.end_value}")
        return json.dumps(text, ensure_ascii=False)
