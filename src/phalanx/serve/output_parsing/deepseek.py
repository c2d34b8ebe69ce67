# SPDX-License-Identifier: Apache-2.0
"""Tool calls of DeepSeek and Kimi-K2, in a section of their own. Text may stand before the first.

V3 and R1: `<｜tool▁calls▁begin｜>`, then for each call `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, the arguments as a
fenced block of JSON and `<｜tool▁call▁end｜>`, then `<｜tool▁calls▁end｜>`.
V3.1: each call is `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
Kimi-K2: `<|tool_calls_section_begin|>`, then for each call `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>`,
the arguments and `<|tool_call_end|>`, then `<|tool_calls_section_end|>`. What stands before the arguments is the call's id, which
the template writes back. Clients that write it back with other separators make the model do so, too (`functions_NAME_INDEX`). A
model may write singular tags of the section (`<|tool_call_section_begin|>`), which are no tokens of the vocabulary.
"""

from __future__ import annotations

import re

from phalanx.serve.output_parsing.events import Events, Functions, first_of
from phalanx.serve.output_parsing.json_call import NO_ARGUMENTS, ArgumentsObject, CallParser
from phalanx.serve.output_parsing.markers import Markers

CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
KIMI_MARKERS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
MAX_HEAD = 160
"""Characters of a call before its arguments: the type, the name and the beginning of the fence."""

MAX_TAIL = 64
"""Characters between the arguments and the end of a call: the end of the fence."""


class SectionParser(CallParser):
    """The parser of these calls.

    tags: of all calls, of one, and the separator before the arguments. head: a pattern for what stands before the arguments of a
    call, with SEPARATOR; of its groups "name" and "bare" one is the function; "index" is in the call's id. other_tags: pairs that
    stand around all calls, too.
    """

    def __init__(
        self, functions: Functions, markers: Markers, tags: tuple[str, ...], head: str, *other_tags: tuple[str, str]
    ) -> None:
        super().__init__(functions)
        begin_all, end_all, self._begin_one, self._end_one, separator = map(markers.encode, tags)
        self._begin_all = (begin_all, *(begin for begin, _ in other_tags))
        self._end_all = (end_all, *(end for _, end in other_tags))
        self._head = re.compile(rf"\s*(?:{head.replace('SEPARATOR', re.escape(separator))})(?=\{{|null)")
        self._state = self._content_before
        self._object = ArgumentsObject()
        self._ids = set[str]()
        self._skipped = ""  # markers that are content if no call follows

    def _step(self, *, final: bool) -> Events:
        progress = yield from self._state(final=final)
        return progress if progress or not final else (yield from self._last_blank())

    def _content_before(self, *, final: bool) -> Events:
        marker = yield from self._content_until(*self._begin_all, self._begin_one, final=final)
        if marker is None:
            return False
        self._text = self._text[len(marker) :]
        self._skipped, self._state = marker, self._in_head if marker == self._begin_one else self._between_calls
        return True

    def _between_calls(self, *, final: bool) -> Events:
        rest = self._text.lstrip()
        blank = self._text[: len(self._text) - len(rest)]
        for marker in (self._begin_one, *self._end_all):
            if rest.startswith(marker):
                self._text = rest[len(marker) :]
                self._state = self._in_head if marker == self._begin_one else self._content_before
                self._skipped += blank + marker if self._skipped else ""
                if marker != self._begin_one:
                    yield from self._content(self._skipped)
                return True
        if not final and any(marker.startswith(rest) for marker in (self._begin_one, *self._end_all)):
            return False
        self._state = self._content_before
        yield from self._content(self._skipped)
        return True

    def _in_head(self, *, final: bool) -> Events:
        head = self._head.match(self._text)
        groups = {} if head is None else head.groupdict()
        name = groups.get("name") or groups.get("bare")
        if head is not None and name in self._functions and head.end() <= MAX_HEAD:
            self._text = self._text[head.end() :]
            self._object, self._skipped, self._state = ArgumentsObject(), "", self._in_arguments
            yield self._begin(str(name), self._id(str(name), int(groups["index"])) if "index" in groups else None)
            if self._text.startswith(NO_ARGUMENTS):
                self._text, self._state = self._text[len(NO_ARGUMENTS) :], self._after_arguments
                yield self._arguments("{}")
            return True
        if head is None and not final and len(self._text) <= MAX_HEAD and "{" not in self._text and self._end_one not in self._text:
            return False
        self._state = self._content_before
        yield from self._content(self._skipped or self._begin_one)
        return True

    def _id(self, name: str, index: int) -> str:
        """The id of a call, with the next index that no call of this completion has: results name calls by ids."""
        while (id_ := f"functions.{name}:{index}") in self._ids:
            index += 1
        self._ids.add(id_)
        return id_

    def _in_arguments(self, *, final: bool) -> Events:
        count = self._object.push(self._text)
        yield self._arguments(self._text[:count])
        self._text = self._text[count:]
        if self._object.done:
            self._state = self._after_arguments
        return self._object.done

    def _after_arguments(self, *, final: bool) -> Events:
        """Drop the end of the fence and of the call. Longer text without a marker is content."""
        markers = (self._end_one, self._begin_one, *self._end_all)
        match = first_of(self._text, *markers)
        if match is not None and match[0] <= MAX_TAIL:
            at, marker = match
            self._text = self._text[at + len(marker) if marker == self._end_one else at :]
            self._state = self._between_calls
            return True
        if not final and len(self._text) <= MAX_TAIL + max(map(len, markers)):
            return False
        self._text, self._state = self._text.lstrip(" \t\r\n`"), self._content_before
        yield from ()
        return True


class DeepSeekParser(SectionParser):
    """The parser of both forms of DeepSeek."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        fenced, bare = r"functionSEPARATOR\s*(?P<name>[\w.-]+)\s*(?:```(?:json)?\s*)?", r"(?P<bare>[\w.-]+)\s*SEPARATOR\s*"
        super().__init__(functions, markers, MARKERS, f"{fenced}|{bare}")


class KimiParser(SectionParser):
    """The parser of Kimi-K2."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        super().__init__(
            functions, markers, KIMI_MARKERS, r"(?:functions[._]?)?(?P<name>[\w.-]+?)[:_]?(?P<index>\d+)\s*SEPARATOR\s*",
            ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
        )  # fmt: skip
