# SPDX-License-Identifier: Apache-2.0
"""What the writers of arguments that are not JSON share: how they read a JSON schema, prepared by `json_schema.enforceable`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from phalanx.errors import OptionError
from phalanx.serve.structured_output.json_schema import KEYWORDS

STRING = frozenset(("minLength", "maxLength", "pattern"))
"""Keywords of strings that `SchemaWriter.text_body` enforces."""
ANNOTATIONS = frozenset(name for name, treatment in KEYWORDS.items() if treatment == "annotation")


class SchemaWriter:
    """regex: the expression of a regular expression. what: the schema's name in errors. root: the schema that references begin
    at."""

    def __init__(self, *, regex: Callable[[str], str], what: str) -> None:
        self.regex, self.what = regex, what
        self.root: dict[str, Any] = {}

    @staticmethod
    def choices(node: Any) -> list[Any] | None:
        """The values of a node that allows few. None of any other."""
        if not isinstance(node, dict):
            return None
        if node.keys() & {"enum", "const"}:
            return [node["const"]] if "const" in node else list(node["enum"])
        few: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
        return few.get(str(node.get("type")))

    def text_body(self, node: dict[str, Any], end: str) -> str:
        """The body of a terminal: the texts of a schema of strings, without `end` in them."""
        if node.keys() - ANNOTATIONS - STRING - {"type"}:
            raise self.refused("a string beside other keywords")
        shortest, longest = node.get("minLength", 0), node.get("maxLength", "")
        body = f"/(?s:.{{{shortest},{longest}}})/ & ~/(?s:.*){lark_escaped(end)}(?s:.*)/"
        if "pattern" in node:
            pattern = node["pattern"]
            if "|" in pattern and not pattern.startswith("^(?:") and re.search(r"[\^$]", pattern):
                raise self.refused(f"the pattern {pattern!r}, whose anchors are within alternatives")
            before = "" if pattern.startswith("^") else "(?s:.*)"
            after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
            inner = pattern.removeprefix("^")
            inner = inner if after else inner[:-1]
            body += f" & {self.regex(f'{before}(?:{inner}){after}')}"
        return body

    def resolved(self, node: Any) -> Any:
        for _ in range(8):
            if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)) or node.keys() - ANNOTATIONS - {"$ref"}:
                break
            target: Any = self.root
            for part in node["$ref"].removeprefix("#").split("/")[1:]:
                target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
            node = target
        return node if node is not None else {}

    def refused(self, part: str) -> OptionError:
        return OptionError(f"the {self.what} have {part}", why="this model's format of calls cannot express it", next="rewrite it")


def lark_escaped(text: str) -> str:
    """A text within `/.../`."""
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(c, c) for c in text)
