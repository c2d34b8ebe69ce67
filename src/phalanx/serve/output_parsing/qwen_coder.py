# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Qwen3-Coder: `<tool_call>`, `<function=NAME>`, for each argument `<parameter=KEY>`, its value and
`</parameter>`, then `</function>` and `</tool_call>`.

Values are texts without quotes; the schema of the function tells which are strings.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from phalanx.serve.output_parsing.events import BLANK, Events, Functions, first_of, overlap
from phalanx.serve.output_parsing.json_call import CallParser
from phalanx.serve.output_parsing.markers import Markers

MARKERS = ("<tool_call>", "</tool_call>")
MAX_HEAD = 160
"""Characters of `<function=NAME>`."""
_FUNCTION = re.compile(r"<function=([\w.-]+)>")
_FUNCTION_BEGUN = re.compile(r"<function=[\w.-]*")
_KEY = re.compile(r"<parameter=([^>\n]{1,128})>")
_KEY_BEGUN = re.compile(r"<parameter=[^>\n]{0,128}")
_OPEN_FUNCTION, _PARAMETER, _END_VALUE, _END_FUNCTION = "<function=", "<parameter=", "</parameter>", "</function>"


class QwenCoderParser(CallParser):
    """The parser of these calls. `<tool_call>` may be missing before `<function=`. An argument is emitted once its value ends."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        super().__init__(functions)
        self._opening, self._closing = map(markers.encode, MARKERS)
        self._state = self._before_call
        self._prefix = ""  # what introduced the function; it is content if no call follows
        self._properties: Mapping[str, Any] = {}
        self._key = ""
        self._scanned = 0  # characters of a value in which it does not end
        self._has_arguments = self._closes = False

    def _step(self, *, final: bool) -> Events:
        progress = yield from self._state(final=final)
        return progress if progress or not final else (yield from self._last_blank())

    def _before_call(self, *, final: bool) -> Events:
        tags = (self._opening, _OPEN_FUNCTION, *((self._closing,) if self._closes else ()))
        match = first_of(self._text, *tags)
        if match is None:
            ready = len(self._text) - (0 if final else overlap(self._text, *tags))
            yield from self._content(self._text[:ready])
            self._text = self._text[ready:]
            return False
        at, tag = match
        yield from self._content(self._text[:at])
        if tag == self._closing:
            self._text, self._closes, self._blank = self._text[at + len(tag) :], False, ""
            return True
        self._prefix = tag if tag == self._opening else ""
        self._text, self._state = self._text[at + len(self._prefix) :], self._in_head
        return True

    def _in_head(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK)
        head = _FUNCTION.match(rest)
        if head is not None and head[1] in self._functions and head.end() <= MAX_HEAD:
            properties = self._functions[head[1]].get("properties")
            self._properties = properties if isinstance(properties, Mapping) else {}
            self._text, self._state = rest[head.end() :], self._before_parameter
            self._has_arguments, self._closes = False, True
            yield self._begin(head[1])
            return True
        begun = _OPEN_FUNCTION.startswith(rest) or _FUNCTION_BEGUN.fullmatch(rest) is not None
        if head is None and not final and begun and len(rest) < MAX_HEAD:
            return False
        skip = len(self._text) - len(rest) + len(_OPEN_FUNCTION) if rest.startswith(_OPEN_FUNCTION) else 0
        yield from self._content(self._prefix + self._text[:skip])
        self._text, self._state = self._text[skip:], self._before_call
        return True

    def _before_parameter(self, *, final: bool) -> Events:
        tags = (_PARAMETER, _END_FUNCTION, self._closing)
        match = first_of(self._text, *tags)
        if match is None:
            self._text = self._text[len(self._text) - overlap(self._text, *tags) :]  # other text has no place here
            return False
        at, tag = match
        if tag == _PARAMETER:
            key = _KEY.match(self._text, at)
            if key is None:
                if not final and _KEY_BEGUN.fullmatch(self._text, at):
                    return False
                self._text = self._text[at + len(tag) :]
            else:
                self._key, self._text = key[1], self._text[key.end() :]
                self._scanned, self._state = 0, self._in_value
            return True
        self._text, self._state = self._text[at + (len(tag) if tag == _END_FUNCTION else 0) :], self._before_call
        yield self._arguments("}" if self._has_arguments else "{}")
        return True

    def _in_value(self, *, final: bool) -> Events:
        end = self._text.find(_END_VALUE, self._scanned)
        if end < 0:
            self._scanned = max(0, len(self._text) - len(_END_VALUE))
            return False
        text = self._text[:end].removeprefix("\n").removesuffix("\n")
        self._text, self._state = self._text[end + len(_END_VALUE) :], self._before_parameter
        value = json.dumps(value_of(text, self._properties.get(self._key)), ensure_ascii=False)
        yield self._arguments((", " if self._has_arguments else "{") + json.dumps(self._key, ensure_ascii=False) + ": " + value)
        self._has_arguments = True
        return True


def value_of(text: str, schema: Any) -> Any:
    """The value that a text stands for, by the schema of its argument: JSON, or a Python literal, where it is no string."""
    if not isinstance(schema, Mapping) or schema.get("type") == "string" or not schema.keys() & {"type", "anyOf", "oneOf", "$ref"}:
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text.strip())
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return text
