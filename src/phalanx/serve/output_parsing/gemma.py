# SPDX-License-Identifier: Apache-2.0
"""Calls of Gemma 4: `<|tool_call>call:NAME{city:<|"|>Oslo<|"|>,days:[1,2],at:{north:true}}<tool_call|>`, one behind another.

The arguments are an object whose keys have no quotation marks; `structured_output.bare_objects` says how it is written. A model may
forget the first tag at the beginning of its answer, behind its reasoning.
"""

from __future__ import annotations

import json
import re

from phalanx.serve.output_parsing.events import BLANK, Events, Functions, first_of, overlap
from phalanx.serve.output_parsing.json_call import CallParser
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.output_parsing.syntax import CallSyntax

QUOTE = '<|"|>'
"""What stands around a string."""
_HEAD = re.compile(r"\s*call:\s*([^\s{]+)\s*(?=\{)")
_HEAD_BEGUN = re.compile(r"\s*(?:c(?:a(?:l(?:l(?::\s*[^\s{]*\s*)?)?)?)?)?")
_MAX_HEAD = 160
"""Characters between the tag and the arguments."""
_KEY_CHARACTER = r"[^:{}\[\],<\ufdd0-\ufdef]"
_BARE_KEY = re.compile(rf"({_KEY_CHARACTER}*?)\s*(?::|=(?=\s*['\"]))")
_QUOTED_KEY = re.compile(r"""\A(['"])(.*)\1\Z""", re.DOTALL)
_KEY_BEGUN = re.compile(rf"{_KEY_CHARACTER}*")
_ESCAPE = r"\\(?P<escaped>u[0-9a-fA-F]{4}|.)"
_ESCAPE_BEGUN = r"\\(?:u[0-9a-fA-F]{0,3})?"
_WORDS = {"none": "null", "nil": "null", "null": "null", "true": "true", "false": "false"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class GemmaParser(CallParser):
    """The parser of these calls. Arguments become JSON: a string in parts while it is written, another value at its end.

    A key may have quotes. A value without quotes that is neither a number nor a word is a string. A string may have the quotes of
    JSON or Python and their escapes; it ends at a quote before what may follow a value. Arguments that break the format stay
    incomplete, and what follows is content.
    """

    def __init__(self, functions: Functions, markers: Markers, syntax: CallSyntax) -> None:
        super().__init__(functions)
        self._opening, self._closing, self._quote = map(markers.encode, (syntax.trigger, syntax.end, syntax.quote))
        # A special token is no text, so the end of the call also ends a string whose quote the model forgot.
        self._end_of_word = re.compile(rf"[,}}\]]|{re.escape(self._closing)}|{re.escape(self._quote)}")
        self._ends_of_string = (self._quote, self._closing) if len(self._closing) == 1 else (self._quote,)
        ends = {quote: rf"(?P<quote>{quote})(?=\s*[,}}\]])|(?P<end>{re.escape(self._closing)})" for quote in "'\""}
        self._steps_of_literal = {quote: re.compile(f"{_ESCAPE}|{end}", re.DOTALL) for quote, end in ends.items()}
        self._literal = ""  # the quote of JSON or Python around the string that is read
        self._state = self._at_the_beginning
        self._open: list[str] = []  # what closes the objects and arrays that are open
        self._comma = False  # the innermost of them has a value

    def _step(self, *, final: bool) -> Events:
        progress = yield from self._state(final=final)
        return progress if progress or not final else (yield from self._last_blank())

    def _at_the_beginning(self, *, final: bool) -> Events:
        head, begun = _HEAD.match(self._text), _HEAD_BEGUN.fullmatch(self._text)
        if head is None and not final and len(self._text) <= _MAX_HEAD and begun:
            return False
        self._state = self._outside
        if head is not None and head[1] in self._functions:
            self._text, self._state = self._text[head.end() :], self._before_value
            yield self._begin(head[1])
        return True

    def _outside(self, *, final: bool) -> Events:
        if (yield from self._content_until(self._opening, final=final)) is None:
            return False
        rest = self._text[len(self._opening) :]
        head = _HEAD.match(rest)
        if head is None and not final and len(rest) <= _MAX_HEAD and _HEAD_BEGUN.fullmatch(rest):
            return False
        if head is None or head[1] not in self._functions:
            yield from self._content(self._opening)
            self._text = rest
            return True
        self._text, self._state = rest[head.end() :], self._before_value
        yield self._begin(head[1])
        return True

    def _before_value(self, *, final: bool) -> Events:
        self._text = self._text.lstrip(BLANK)
        if not self._text or (not final and self._text != self._quote and self._quote.startswith(self._text)):
            return False
        first, in_array = self._text[0], self._open[-1:] == ["]"]
        if first == "]" and in_array:  # an empty array, or a comma at the end
            self._state = self._after_value
            return True
        comma = ", " if in_array and self._comma else ""
        if first in "{[":
            self._open.append("}" if first == "{" else "]")
            self._text, value = self._text[1:], first
            self._state = self._before_key if first == "{" else self._before_value
        elif self._text.startswith(self._quote):
            self._text, value, self._state = self._text[len(self._quote) :], '"', self._in_string
        elif first in self._steps_of_literal:
            self._literal, self._text, value, self._state = first, self._text[1:], '"', self._in_literal
        else:
            end = self._end_of_word.search(self._text)
            if end is None:
                return False
            word, is_string = self._text[: end.start()], end[0] == self._quote  # a string whose first quote the model forgot
            value = json.dumps(word, ensure_ascii=False) if is_string else _json_of(word.rstrip(BLANK))
            self._text, self._state = self._text[end.end() if is_string else end.start() :], self._after_value
        self._comma = first not in "{["
        yield self._arguments(comma + value)
        return True

    def _in_string(self, *, final: bool) -> Events:
        end = first_of(self._text, *self._ends_of_string)
        at = end[0] if end is not None else len(self._text) - overlap(self._text, *self._ends_of_string)
        yield self._arguments(_in_json(self._text[:at]))
        self._text = self._text[at:]
        if end is None:
            return False
        if end[1] == self._quote:
            self._text, self._state = self._text[len(self._quote) :], self._after_value
            yield self._arguments('"')
        else:
            self._broken()
        return True

    def _in_literal(self, *, final: bool) -> Events:
        step = self._steps_of_literal[self._literal].search(self._text)
        if step is not None and step["escaped"] and re.fullmatch(_ESCAPE_BEGUN, self._text[step.start() :]):
            step = None
        if step is None:
            begun = re.search(rf"(?:{_ESCAPE_BEGUN}|{self._literal}\s*)\Z", self._text)
            at = len(self._text) - overlap(self._text, self._closing) if begun is None else begun.start()
            yield self._arguments(_in_json(self._text[:at]))
            self._text = self._text[at:]
            return False
        value, escaped = _in_json(self._text[: step.start()]), step["escaped"]
        self._text = self._text[step.start() if step["end"] else step.end() :]
        if escaped:
            value += _json_of_escape(escaped)
        elif step["quote"]:
            value, self._state = value + '"', self._after_value
        else:
            self._broken()
        yield self._arguments(value)
        return True

    def _after_value(self, *, final: bool) -> Events:
        self._text = self._text.lstrip(BLANK)
        if not self._text:
            return False
        first, self._text = self._text[0], self._text[1:]
        if first == self._open[-1]:
            self._open.pop()
            self._comma = True
            self._state = self._after_value if self._open else self._after_call
            yield self._arguments(first)
        elif first == ",":
            self._state = self._before_key if self._open[-1] == "}" else self._before_value
        else:
            self._text = first + self._text
            self._broken()
        return True

    def _before_key(self, *, final: bool) -> Events:
        self._text = self._text.lstrip(BLANK)
        if self._text.startswith("}"):  # an empty object, or a comma at the end
            self._state = self._after_value
            return True
        quoted = self._text.startswith(self._quote)
        if not self._text or (not quoted and not final and self._quote.startswith(self._text)):
            return False
        if quoted:
            end = self._text.find(self._quote, len(self._quote))
            after = self._text[end + len(self._quote) :].lstrip(BLANK) if end >= 0 else ""
            if not after:
                return False
            name, rest = self._text[len(self._quote) : end], after[1:] if after[0] == ":" else None
        else:
            bare = _BARE_KEY.match(self._text)
            if bare is None and _KEY_BEGUN.fullmatch(self._text):
                return False
            name, rest = ("", None) if bare is None else (_QUOTED_KEY.sub(r"\2", bare[1]), self._text[bare.end() :])
        if rest is None:
            self._broken()
            return True
        self._text, self._state = rest, self._before_value
        yield self._arguments((", " if self._comma else "") + json.dumps(name, ensure_ascii=False) + ": ")
        return True

    def _after_call(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK)
        if not final and len(rest) < len(self._closing) and self._closing.startswith(rest):
            return False
        self._text = rest.removeprefix(self._closing) if rest.startswith(self._closing) else self._text
        self._comma, self._state = False, self._outside
        yield from ()
        return True

    def _broken(self) -> None:
        self._open.clear()
        self._comma, self._state = False, self._after_call


def _in_json(text: str) -> str:
    """The text as it stands within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of_escape(escaped: str) -> str:
    """What stands behind a backslash, within a string of JSON. Before any other character a backslash is text."""
    known = len(escaped) > 1 or escaped in '"\\/bfnrt'
    return f"\\{escaped}" if known else _in_json(escaped if escaped == "'" else f"\\{escaped}")


def _json_of(word: str) -> str:
    """The JSON of a value without quotes."""
    return _WORDS.get(word.lower()) or (word if _NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False))
