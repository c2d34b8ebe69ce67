# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Mistral. Text may stand before the first `[TOOL_CALLS]`.

Older tokenizers: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`. Newer ones: `[TOOL_CALLS]name[ARGS]{...}` for each call,
maybe with `[CALL_ID]id` after the name.
"""

from __future__ import annotations

import re

from phalanx.serve.output_parsing.events import BLANK, Events, Functions
from phalanx.serve.output_parsing.json_call import NO_ARGUMENTS, ArgumentsObject, CallObject, JsonCallParser
from phalanx.serve.output_parsing.markers import Markers

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MAX_HEAD = 160
"""Characters of a call before its arguments: the name and the id."""


class MistralParser(JsonCallParser):
    """The parser of these calls."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        super().__init__(functions)
        self._tag, arguments, call_id = map(markers.encode, MARKERS)
        self._head = re.compile(
            rf"([\w.-]+)[ \t]*(?:{re.escape(call_id)}[ \t]*\w*[ \t]*)?(?:{re.escape(arguments)}[ \t]*(?=\{{|null)|[ \t]*(?=\{{))"
        )
        self._state = self._before_tag
        self._named: ArgumentsObject | None = None

    def _between(self, *, final: bool) -> Events:
        if self._named is not None:
            return (yield from self._in_named(self._named))
        return (yield from self._state(final=final))

    def _before_tag(self, *, final: bool) -> Events:
        if (yield from self._content_until(self._tag, final=final)) is None:
            return False
        self._text = self._text[len(self._tag) :]
        self._state = self._after_tag
        return True

    def _after_tag(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK)
        blank = self._text[: len(self._text) - len(rest)]
        if rest.startswith(("[", "{")):
            bracket = "[" if rest.startswith("[") else ""
            self._prefix, self._text = self._tag + blank + bracket, rest[len(bracket) :]
            self._state = self._in_array
            return True
        head = self._head.match(rest)
        if head is not None and head[1] in self._functions and head.end() <= MAX_HEAD:
            self._text = rest[head.end() :]
            self._named, self._state = ArgumentsObject(), self._before_tag
            yield self._begin(head[1])
            if self._text.startswith(NO_ARGUMENTS):
                self._text, self._named = self._text[len(NO_ARGUMENTS) :], None
                yield self._arguments("{}")
            return True
        if head is None and not final and len(rest) <= MAX_HEAD and not any(end in rest for end in (self._tag, "{", "\n")):
            return False  # the head may go on
        self._state = self._before_tag
        yield from self._content(self._tag)
        return True

    def _in_array(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK + ",")
        if not rest and not final:
            return False
        if self._prefix:  # no call has begun in this array
            self._prefix += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if rest.startswith("{"):
            self._object = CallObject(self._functions)
            return True
        self._state = self._before_tag
        if rest.startswith("]") and not self._prefix:
            self._text = rest[1:]
        yield from self._content(self._prefix)
        return bool(rest)

    def _in_named(self, arguments: ArgumentsObject) -> Events:
        count = arguments.push(self._text)
        yield self._arguments(self._text[:count])
        self._text = self._text[count:]
        if arguments.done:
            self._named = None
        return arguments.done

    def _rejected(self) -> None:
        self._state = self._before_tag
