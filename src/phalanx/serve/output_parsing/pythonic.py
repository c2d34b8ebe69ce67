# SPDX-License-Identifier: Apache-2.0
"""Tool calls as a list of Python calls (Llama 3.2 and 4): the whole answer is `[weather(city="Oslo"), noon()]`, maybe between
`<|python_start|>` and `<|python_end|>`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from phalanx.serve.output_parsing.events import BLANK, Events, Functions
from phalanx.serve.output_parsing.json_call import CallParser
from phalanx.serve.output_parsing.markers import Markers

MARKERS = ("<|python_start|>", "<|python_end|>")
_CALL = re.compile(r"\s*,?\s*([A-Za-z_][\w.-]*)\s*(?P<open>\()\s*(?:[A-Za-z_]\w*\s*=|\))")
"""A call up to the "=" of its first keyword, or up to the parenthesis that ends a call without arguments."""
_CALL_BEGUN = re.compile(r"\s*,?\s*([A-Za-z_][\w.-]*\s*(\(\s*([A-Za-z_]\w*\s*=?)?)?)?")
"""Every beginning of such a call."""
_KEYWORD = re.compile(r"\s*,?\s*([A-Za-z_]\w*)\s*=")
_MAX_HEAD = 160
"""Characters of a call up to the "=" of its first keyword."""


class PythonicParser(CallParser):
    """The parser of these calls. After any other text, the rest is content. Arguments become JSON, one value at a time."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        super().__init__(functions)
        self._start, self._end = map(markers.encode, MARKERS)
        self._state = self._before_list
        self._has_arguments = False
        self._value = ValueScanner()

    def _step(self, *, final: bool) -> Events:
        progress = yield from self._state(final=final)
        return progress if progress or not final else (yield from self._last_blank())

    def _before_list(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK)
        if rest.startswith(self._start):
            rest = rest[len(self._start) :].lstrip(BLANK)
        elif rest and not final and self._start.startswith(rest):
            return False
        if not rest and not final:
            return False
        if not rest.startswith("["):
            self._state = self._only_content
            return True
        call = _CALL.match(rest, 1)
        if call is not None and call[1] in self._functions and call.end() <= _MAX_HEAD:
            self._text = rest[1:]
            self._state = self._between_calls
        elif call is not None or final or not self._may_be_call(rest[1:]):
            self._state = self._only_content
        else:
            return False
        yield from ()
        return True

    def _between_calls(self, *, final: bool) -> Events:
        call = _CALL.match(self._text)
        if call is not None and call[1] in self._functions and call.end() <= _MAX_HEAD:
            self._text, self._has_arguments = self._text[call.end("open") :], False
            self._state = self._before_keyword
            yield self._begin(call[1])
            return True
        rest = self._text.lstrip(BLANK)
        if rest.startswith("]"):
            rest = rest[1:].lstrip(BLANK)
            if not final and self._end.startswith(rest):
                return False
            self._text = rest.removeprefix(self._end)
            self._state = self._only_content
            return True
        if call is None and not final and self._may_be_call(self._text):
            return False
        self._state = self._only_content
        return True

    @staticmethod
    def _may_be_call(text: str) -> bool:
        """Whether more text could make this a call."""
        return len(text) <= _MAX_HEAD and _CALL_BEGUN.fullmatch(text) is not None

    def _before_keyword(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK + ",")
        if rest.startswith(")"):
            yield self._arguments("}" if self._has_arguments else "{}")
            self._text, self._state = rest[1:], self._between_calls
            return True
        keyword = _KEYWORD.match(self._text)
        if keyword is not None:
            self._text, self._state, self._value = self._text[keyword.end() :], self._in_value, ValueScanner()
            yield self._arguments((", " if self._has_arguments else "{") + json.dumps(keyword[1]) + ": ")
            self._has_arguments = True
            return True
        if final or re.fullmatch(r"\s*,?\s*([A-Za-z_]\w*\s*)?", self._text):
            return False
        self._state = self._only_content  # no keyword: the call stays as it is
        return True

    def _in_value(self, *, final: bool) -> Events:
        self._text = self._text[self._value.push(self._text) :]
        if not self._value.done:
            return False
        yield self._arguments(json.dumps(self._value.value(), ensure_ascii=False))
        self._state = self._before_keyword
        return True

    def _only_content(self, *, final: bool) -> Events:
        yield from self._content(self._text)
        self._text = ""
        return False


class ValueScanner:
    """Finds the end of a Python literal among arguments: a comma or a closing parenthesis outside of brackets and strings."""

    def __init__(self) -> None:
        self.done = False
        self._characters: list[str] = []
        self._quote = ""
        self._escaped = False
        self._depth = 0

    def push(self, text: str) -> int:
        """Consume characters up to the comma or parenthesis, which is not consumed; return their number."""
        for count, character in enumerate(text):
            if self._quote:
                if self._escaped or character == "\\":
                    self._escaped = not self._escaped
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif self._depth == 0 and character in ",)":
                self.done = True
                return count
            else:
                self._depth += (character in "[{(") - (character in "]})")
            self._characters.append(character)
        return len(text)

    def value(self) -> Any:
        """The value as JSON data. What is no literal is a string as it is written."""
        text = "".join(self._characters).strip()
        for parse in (json.loads, ast.literal_eval):
            try:
                value = parse(text)
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # refuses infinity and half of a character
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            return value
        return text
