# SPDX-License-Identifier: Apache-2.0
"""Tool calls as JSON objects behind a marker: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>` for each (Hermes,
Qwen 2 to 3), or one list of them, as `<|tool_call|>[{...}, {...}]` (Granite 3). `CallSyntax` has the texts around the objects.

Text may stand before the first call, between calls and behind them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.serve.output_parsing.events import BLANK, Events, Functions
from phalanx.serve.output_parsing.json_call import CallObject, JsonCallParser
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.output_parsing.syntax import CallSyntax

_TEXTS = re.compile(r"[][]|[^][\s]+")


class JsonBlocksParser(JsonCallParser):
    """The parser of these calls. What follows the objects may be missing. openings: other markers that introduce a call."""

    def __init__(self, functions: Functions, markers: Markers, syntax: CallSyntax, openings: Sequence[str] = ()) -> None:
        super().__init__(functions)
        head, tail = (syntax.before + syntax.begin).partition("{")[0], syntax.end.partition("}")[2] + syntax.after
        self._openings = [markers.encode(text) for text in (syntax.trigger, *openings)]
        self._heads = [*_TEXTS.findall(head.removeprefix(syntax.trigger)), "["]
        self._tails = [markers.encode(text) for text in _TEXTS.findall(tail)]
        self._closing = [text for text in self._tails if text.startswith("<") or markers.remove(text) == ""]
        self._name_key = "tool_name" if '"tool_name"' in syntax.begin else "name"
        self._state = self._outside
        self._in_list = False
        self._closes = False  # a call has begun, and its closing tag has not come yet

    def _between(self, *, final: bool) -> Events:
        return (yield from self._state(final=final))

    def _outside(self, *, final: bool) -> Events:
        tags = (*self._openings, *(self._closing if self._closes else ()))
        tag = yield from self._content_until(*tags, final=final)
        if tag is None:
            return False
        self._text = self._text[len(tag) :]
        if tag in self._closing:
            self._closes, self._blank = False, ""
        else:
            self._prefix, self._state, self._in_list = tag, self._before_object, tag.endswith("[")
        return True

    def _before_object(self, *, final: bool) -> Events:
        """Between a marker, the texts that belong to it, and the object."""
        rest = self._text.lstrip(BLANK)
        head = next((head for head in self._heads if rest.startswith(head)), None)
        if head is None and not rest.startswith("{"):
            if not final and any(head.startswith(rest) for head in self._heads):
                return False
            self._state = self._outside
            yield from self._content(self._prefix)
            return True
        self._prefix += self._text[: len(self._text) - len(rest)] + (head or "")
        self._text = rest[len(head or "") :]
        self._in_list = self._in_list or head == "["
        if head is None:
            self._begin_object()
        return True

    def _after_object(self, *, final: bool) -> Events:
        """Behind an object: a further one of the list, or the texts that end it."""
        rest = self._text.lstrip(BLANK + ("," if self._in_list else ""))
        if rest.startswith("{") and self._in_list:
            self._text = rest
            self._begin_object()
            return True
        tails = [*self._tails, *(["]"] if self._in_list else [])]
        tail = next((tail for tail in tails if rest.startswith(tail)), None)
        if tail is not None:
            self._text, self._in_list = rest[len(tail) :], self._in_list and tail != "]"
            self._closes = self._closes and tail != self._tails[-1]
            self._state = self._after_object if self._closes else self._outside
            return True
        if not final and any(tail.startswith(rest) for tail in tails):
            return False
        self._state = self._outside
        yield from ()
        return True

    def _begin_object(self) -> None:
        self._object, self._state = CallObject(self._functions, self._name_key), self._after_object
        self._closes = True

    def _rejected(self) -> None:
        self._state, self._in_list = self._outside, False
        if self._prefix:  # the closing tag of a call that is content is content, too
            self._prefix, self._closes = "", False
