# SPDX-License-Identifier: Apache-2.0
"""Parses tool calls in the text of a model while it arrives, in parts of any size.

`CallReader` takes text and returns events: `ContentText` (content of the message), `CallBegin` (a call begins: number and name) and
`CallArguments` (a part of its arguments, verbatim). A call of a function that is not among the tools is content.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass

from phalanx.serve.openai.tools.formats import HERMES, ToolFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class ContentText:
    text: str


@dataclass(frozen=True)
class CallBegin:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str


Event = ContentText | CallBegin | CallArguments


class CallReader:
    """One per completion. names: functions that may be called. calls: number of begun calls. complete: number of ended calls."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        self.calls = self.complete = 0
        self._format, self._names = tool_format, names
        self._text = ""  # arrived, but not parsed yet
        self._object: CallObject | None = None
        self._only_calls = tool_format is not HERMES  # only calls so far: a "{" may begin another one
        self._blank = ""  # white space that is content only if content follows

    def push(self, text: str) -> list[Event]:
        """The events of this part of the text."""
        self._text += text
        return _merged(self._read(final=False))

    def finish(self) -> list[Event]:
        """The last events, when no more text follows."""
        return _merged(self._read(final=True))

    def _read(self, *, final: bool) -> Generator[Event, None, None]:
        progress = True
        while progress:
            if self._object is not None:
                progress = yield from self._in_call(final=final)
            elif self._format is HERMES:
                progress = yield from self._before_tag(final=final)
            else:
                progress = yield from self._before_brace(final=final)
        if final and not self.calls and self._blank:
            yield ContentText(self._blank)

    def _before_tag(self, *, final: bool) -> Generator[Event, None, bool]:
        at = self._text.find(_OPEN)
        if at >= 0:
            yield from self._content(self._text[:at])
            self._text = self._text[at + len(_OPEN) :]
            self._object = CallObject(self._names)
            return True
        keep = 0 if final else _overlap(self._text, _OPEN)
        yield from self._content(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _before_brace(self, *, final: bool) -> Generator[Event, None, bool]:
        if not self._only_calls:
            yield from self._content(self._text)
            self._text = ""
            return False
        rest = self._text.lstrip(_BLANK + (";" if self.calls else ""))
        before = self._text[: len(self._text) - len(rest)]
        if rest.startswith(_PYTHON_TAG):
            rest = rest[len(_PYTHON_TAG) :].lstrip(_BLANK)
        if rest.startswith("{"):
            self._text, self._blank = rest, before
            self._object = CallObject(self._names)
            return True
        if (rest and (final or not _PYTHON_TAG.startswith(rest))) or (final and before and not self.calls):
            self._only_calls = False
            return True
        return False

    def _in_call(self, *, final: bool) -> Generator[Event, None, bool]:
        """The JSON of one call, then (Hermes) its closing tag."""
        reading = self._object
        assert reading is not None
        used = reading.push(self._text)
        self._text = self._text[used:]
        if reading.accepted and not reading.begun:
            reading.begun = True
            yield CallBegin(self.calls, reading.name or "")
            self.calls += 1
        if reading.begun and (arguments := reading.take()):
            yield CallArguments(self.calls - 1, arguments)
        if reading.failed or (reading.done and not reading.begun) or (final and not reading.begun):
            return (yield from self._not_a_call(reading))
        if not reading.done:
            return False
        return self._close(final=final)

    def _close(self, *, final: bool) -> bool:
        if self._format is HERMES:
            rest = self._text.lstrip(_BLANK)
            if not rest.startswith(_CLOSE):
                if not final and (not rest or _CLOSE.startswith(rest)):
                    return False  # the tag may still arrive
            else:
                self._text = rest[len(_CLOSE) :]
        self._object, self._blank = None, ""
        self.complete += 1
        return True

    def _not_a_call(self, reading: CallObject) -> Generator[Event, None, bool]:
        """The text is no call, so it is content as written. A call that has begun stays as it is."""
        self._object, self._only_calls = None, False
        if not reading.begun:
            yield from self._content((_OPEN if self._format is HERMES else "") + reading.text)
        return True

    def _content(self, text: str) -> Generator[Event, None, None]:
        """Emit content. White space before and after a call is dropped."""
        text = self._blank + text
        content = text.rstrip(_BLANK)
        self._blank = text[len(content) :]
        if content:
            yield ContentText(content)


class CallObject:
    """Parses the JSON object of one call character by character, and returns its arguments before it ends.

    name: set once it is read. accepted: the name is one of `names`. done: the object is closed. failed: it is no call (broken JSON,
    or another name). text: all consumed text. begun: set by the reader when it has emitted CallBegin.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.accepted = self.done = self.failed = self.begun = False
        self._names = names
        self._all: list[str] = []
        self._step = self._start
        self._key = ""
        self._value: list[str] = []  # the current key or value
        self._depth = 0
        self._in_string = self._escaped = False
        self._has_arguments = False
        self._pending: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._all)

    def push(self, text: str) -> int:
        """Consume characters; return their number, which is below that of the text if the object ends or fails within it."""
        for count, character in enumerate(text):
            if self.done or self.failed:
                return count
            self._all.append(character)
            self._step(character)
        return len(text)

    def take(self) -> str:
        """The part of the arguments since the previous call of this method; "{}" at the end of a call without arguments."""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        arguments = "".join(self._pending)
        self._pending.clear()
        return arguments

    def _start(self, character: str) -> None:
        if character == "{":
            self._step = self._before_key
        elif character not in _BLANK:
            self.failed = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._value, self._step = [character], self._in_key
        elif character == "}":
            self._end()
        elif character not in _BLANK:
            self.failed = True

    def _in_key(self, character: str) -> None:
        self._value.append(character)
        if self._ends_string(character):
            self._key = str(self._decoded())
            self._step = self._before_colon

    def _before_colon(self, character: str) -> None:
        if character == ":":
            self._step = self._before_value
        elif character not in _BLANK:
            self.failed = True

    def _before_value(self, character: str) -> None:
        if character in _BLANK:
            return
        if character in ",}":
            self.failed = True
            return
        self._value, self._depth, self._step = [], 0, self._in_value
        self._has_arguments = self._has_arguments or self._is_arguments
        self._in_value(character)

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _in_value(self, character: str) -> None:
        if self._in_string:
            ended = self._ends_string(character) and self._depth == 0
        elif not self._depth and self._value and (character in ",}" or character in _BLANK):
            self._value_ended()  # a number or a word ends before the next character
            self._after_value(character)
            return
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            ended = character in "}]" and self._depth == 0
        self._value.append(character)
        if self._is_arguments and self._value[0] != '"':
            self._pending.append(character)
        if ended:
            self._value_ended()

    def _value_ended(self) -> None:
        self._step = self._after_value
        if self._key == "name" and self.name is None:
            self.name = str(self._decoded())
            self.accepted = self.name in self._names
            self.failed = not self.accepted
        elif self._is_arguments and self._value[0] == '"':  # arguments as a string that contains JSON
            self._pending.append(str(self._decoded()))

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._step = self._before_key
        elif character == "}":
            self._end()
        elif character not in _BLANK:
            self.failed = True

    def _end(self) -> None:
        self.done = True
        self.failed = not self.accepted

    def _ends_string(self, character: str) -> bool:
        """Whether an unescaped quotation mark ends the current string."""
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False

    def _decoded(self) -> object:
        try:
            return json.loads("".join(self._value))
        except ValueError:
            self.failed = True
            return ""


def _overlap(text: str, tag: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def _merged(events: Iterable[Event]) -> list[Event]:
    """Merge neighbouring events of the same kind."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            merged[-1] = ContentText(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            merged[-1] = CallArguments(last.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
