# SPDX-License-Identifier: Apache-2.0
"""Tool calls as a list of Python calls (Llama 3.2 and 4): the whole answer is `[weather(city="Oslo"), noon()]`, maybe between
`<|python_start|>` and `<|python_end|>`. `OlmoParser` reads calls on lines between tags."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from phalanx.serve.output_parsing.events import BLANK, Events, Functions
from phalanx.serve.output_parsing.json_call import CallParser
from phalanx.serve.output_parsing.markers import Markers

MARKERS = ("<|python_start|>", "<|python_end|>")
OLMO_MARKERS = ("<function_calls>", "</function_calls>")
_CALL = re.compile(r"\s*,?\s*([A-Za-z_][\w.-]*)\s*(?P<open>\()\s*(?:[A-Za-z_]\w*\s*=|\))")
"""A call up to the "=" of its first keyword, or up to the parenthesis that ends a call without arguments."""
_CALL_BEGUN = re.compile(r"\s*,?\s*([A-Za-z_][\w.-]*\s*(\(\s*([A-Za-z_]\w*\s*=?)?)?)?")
"""Every beginning of such a call."""
_KEYWORD = re.compile(r"\s*,?\s*([A-Za-z_]\w*)\s*=")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
_WORDS = {"true": True, "false": False, "null": None}
_MAX_HEAD = 160
"""Characters of a call up to the "=" of its first keyword."""


class PythonicParser(CallParser):
    """The parser of these calls. After any other text, the rest is content. Arguments become JSON, one value at a time."""

    def __init__(self, functions: Functions, markers: Markers, tags: tuple[str, str] = MARKERS) -> None:
        super().__init__(functions)
        self._start, self._end = map(markers.encode, tags)
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
        ended = self._end_of_list(final=final)
        if ended is not False:
            return bool(ended)
        if call is None and not final and self._may_be_call(self._text):
            return False
        self._state = self._only_content
        return True

    def _end_of_list(self, *, final: bool) -> bool | None:
        """Take the end of the calls, and say whether it is here; None: more text will tell."""
        rest = self._text.lstrip(BLANK)
        if not rest.startswith("]"):
            return False
        rest = rest[1:].lstrip(BLANK)
        if not final and self._end.startswith(rest):
            return None
        self._text, self._state = rest.removeprefix(self._end), self._only_content
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


class OlmoParser(PythonicParser):
    """The parser of the calls of OLMo 3: each on its line, between `<function_calls>` and `</function_calls>`. Text may stand
    before and behind them."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        super().__init__(functions, markers, OLMO_MARKERS)

    def _before_list(self, *, final: bool) -> Events:
        if (yield from self._content_until(self._start, final=final)) is None:
            return False
        first = self._text[len(self._start) :]
        call = _CALL.match(first)
        if call is None and not final and self._may_be_call(first):
            return False
        if call is not None and call[1] in self._functions and call.end() <= _MAX_HEAD:
            self._text, self._state = first, self._between_calls
        else:
            yield from self._content(self._start)
            self._text = first
        return True

    def _end_of_list(self, *, final: bool) -> bool | None:
        rest = self._text.lstrip(BLANK)
        if rest.startswith(self._end):
            self._text, self._state = rest[len(self._end) :], self._before_list
            return True
        return None if not final and self._end.startswith(rest) else False


class ValueScanner:
    """Finds the end of a Python literal among arguments: a comma or a closing parenthesis outside of brackets and strings.

    A string in single or double quotes may have ends of lines within, which Python does not allow and models write.
    """

    def __init__(self) -> None:
        self.done = False
        self._characters: list[str] = []
        self._opening = ""  # one or two quotes: the beginning of a string, of three quotes, or an empty string
        self._quote = ""  # what ends the current string: one quote, or three
        self._closing = 0  # quotes in a row
        self._escaped = False
        self._depth = 0

    def push(self, text: str) -> int:
        """Consume characters up to the comma or parenthesis, which is not consumed; return their number."""
        for count, character in enumerate(text):
            if self._opening and self._opens(character):
                self._characters.append(character)
            elif self._quote:
                self._in_string(character)
            elif character in "\"'":
                self._opening = character
                self._characters.append(character)
            elif self._depth == 0 and character in ",)":
                self.done = True
                return count
            else:
                self._depth += (character in "[{(") - (character in "]})")
                self._characters.append(character)
        return len(text)

    def _opens(self, character: str) -> bool:
        """Whether a character is one more of the quotes that open a string."""
        if character == self._opening[0]:
            self._opening += character
            if len(self._opening) == 3:
                self._quote, self._opening = self._opening, ""
            return True
        self._quote = self._opening if len(self._opening) == 1 else ""
        self._opening = ""
        return False

    def _in_string(self, character: str) -> None:
        if self._escaped or character == "\\":
            self._escaped, self._closing = not self._escaped, 0
        else:
            self._closing = self._closing + 1 if character == self._quote[0] else 0
            character = _ESCAPES.get(character, character)
        self._characters.append(character)
        if self._closing == len(self._quote):
            self._quote, self._closing = "", 0

    def value(self) -> Any:
        """The value as JSON data. What is no literal is a string as it is written, without quotes around it."""
        text = "".join(self._characters).strip()
        for parse in (json.loads, _python):
            try:
                value = parse(text)
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # refuses infinity and half of a character
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            return value
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


class _JsonWords(ast.NodeTransformer):
    """`true`, `false` and `null` among Python's literals."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _python(text: str) -> Any:
    return ast.literal_eval(_JsonWords().visit(ast.parse(text, mode="eval")))
