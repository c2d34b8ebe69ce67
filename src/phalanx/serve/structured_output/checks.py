# SPDX-License-Identifier: Apache-2.0
"""Check a format before it is compiled: its size, and whether the grammar would enforce all of it.

The process that compiles the format runs these checks, within its limits of time and memory: they may take seconds for a large
schema, and would hold the interpreter lock of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from phalanx.errors import OptionError
from phalanx.serve.structured_output.json_schema import MAX_BYTES, enforceable, read_json
from phalanx.serve.structured_output.regex import expand_unicode_classes, unsupported_construct

_MAX_WHITESPACE = 2  # white-space characters in a row


def checked(kind: str, text: str) -> str:
    """The text for the compiler. Raises OptionError if it is too large, or the grammar would not enforce all of it."""
    if kind == "json_schema":
        return json.dumps(enforceable(read_json(text, what=kind)))
    if kind == "structural_tag":
        tag = read_json(text, what=kind)
        for content in _contents_of_tag(tag):
            if "json_schema" in content:
                content["json_schema"] = enforceable(content["json_schema"], what="json_schema of the structural_tag")
                content["max_whitespace_cnt"] = _whitespace(content.get("max_whitespace_cnt"))
            if content.get("type") == "regex" and isinstance(content.get("pattern"), str):
                content["pattern"] = _checked_regex(content["pattern"], what="regex of the structural_tag")
        return json.dumps(tag)
    if len(text) > MAX_BYTES // 4:
        raise OptionError(f"the {kind} has {len(text)} characters", why=f"the limit is {MAX_BYTES // 4}", next="simplify it")
    return _checked_regex(text, what=kind) if kind == "regex" else text


def _checked_regex(pattern: str, *, what: str) -> str:
    part = unsupported_construct(pattern)
    if part is not None:
        raise OptionError(f"the {what} has {part}", why="the grammar cannot enforce it", next="rewrite it without")
    return expand_unicode_classes(pattern)


def _whitespace(limit: Any) -> Any:
    """The limit of white space between the parts of a tag's JSON: at most 2 characters. The compiler rejects what is no number."""
    if limit is None:
        return _MAX_WHITESPACE
    return min(limit, _MAX_WHITESPACE) if isinstance(limit, int) else limit


def _contents_of_tag(tag: Any) -> Iterator[dict[str, Any]]:
    """All objects of a structural tag, except those of its schemas."""
    if isinstance(tag, dict):
        yield tag
        for name, value in tag.items():
            if name != "json_schema":
                yield from _contents_of_tag(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from _contents_of_tag(value)
