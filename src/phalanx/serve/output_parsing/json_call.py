# SPDX-License-Identifier: Apache-2.0
"""Calls as JSON: `CallObject` reads `{"name": ..., "arguments": {...}}`, `ArgumentsObject` reads an object of arguments alone, and
`JsonCallParser` is what the parsers of formats with such objects share."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Generator

from phalanx.serve.output_parsing.events import (
    BLANK,
    BufferedParser,
    CallArguments,
    CallBegin,
    ContentText,
    Event,
    Events,
    Functions,
    first_of,
    overlap,
)


class CallObject:
    """Parses the JSON object of one call character by character, and returns its arguments before it ends.

    The arguments are the first of `arguments` and `parameters` that is an object with members, as such or as JSON in a string.
    null, an empty string and an empty object are no arguments: the call has "{}".

    name: set once it is read. accepted: the name is one of `functions`. done: the object is closed. failed: it is no call (broken
    JSON, or another name). text: all consumed text. begun: set by the reader when it has emitted CallBegin.
    """

    def __init__(self, functions: Functions, name_key: str = "name") -> None:
        self.name: str | None = None
        self._name_key = name_key
        self.accepted = self.done = self.failed = self.begun = False
        self._functions = functions
        self._all: list[str] = []
        self._step = self._start
        self._key = ""
        self._value: list[str] = []  # the current key or value
        self._depth = 0
        self._in_string = self._escaped = False
        self._is_arguments = self._has_arguments = False
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
        elif character not in BLANK:
            self.failed = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._value, self._step = [character], self._in_key
        elif character == "}":
            self._end()
        elif character not in BLANK:
            self.failed = True

    def _in_key(self, character: str) -> None:
        self._value.append(character)
        if self._ends_string(character):
            self._key = str(self._decoded())
            self._step = self._before_colon

    def _before_colon(self, character: str) -> None:
        if character == ":":
            self._step = self._before_value
        elif character not in BLANK:
            self.failed = True

    def _before_value(self, character: str) -> None:
        if character in BLANK:
            return
        if character in ",}":
            self.failed = True
            return
        self._value, self._depth, self._step = [], 0, self._in_value
        self._is_arguments = self._key in ("arguments", "parameters") and not self._has_arguments
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._in_string:
            ended = self._ends_string(character) and self._depth == 0
        elif not self._depth and self._value and (character in ",}" or character in BLANK):
            self._value_ended()  # a number or a word ends before the next character
            self._after_value(character)
            return
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            ended = character in "}]" and self._depth == 0
        self._value.append(character)
        if self._is_arguments and (self._has_arguments or self._begins_arguments(character)):
            self._pending.append(character if self._has_arguments else "".join(self._value))
            self._has_arguments = True
        if ended:
            self._value_ended()

    def _begins_arguments(self, character: str) -> bool:
        """Whether the value has become more than null, white space or an empty object. A string is read as a whole."""
        first = self._value[0]
        return first not in '"n' and (first != "{" or (len(self._value) > 1 and character not in BLANK + "}"))

    def _value_ended(self) -> None:
        self._step = self._after_value
        if self._key == self._name_key and self.name is None:
            self.name = str(self._decoded())
            self.accepted = self.name in self._functions
            self.failed = not self.accepted
        elif self._is_arguments and self._value[0] == '"':  # arguments as a string that contains JSON
            text = str(self._decoded())
            self._has_arguments = not is_empty(text)
            self._pending += [text] if self._has_arguments else []

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._step = self._before_key
        elif character == "}":
            self._end()
        elif character not in BLANK:
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
            value: object = json.loads("".join(self._value))
            str(value).encode()  # half of a character cannot be sent
            return value
        except ValueError:
            self.failed = True
            return ""


NO_ARGUMENTS = "null"
"""What some models write as the arguments of a call without any."""


def is_empty(text: str) -> bool:
    """Whether the JSON of some arguments says that there are none."""
    return "".join(text.split()) in ("", "{}", NO_ARGUMENTS)


class ArgumentsObject:
    """Finds the end of a JSON object, whose text is the arguments. Its first character must be "{"."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> int:
        """Consume characters; return their number, which is below that of the text if the object ends within it."""
        for count, character in enumerate(text):
            if self.done:
                return count
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            else:
                self._in_string = character == '"'
                self._depth += (character in "{[") - (character in "}]")
                self.done = self._depth == 0
        return len(text)


def ends_arguments(text: str) -> bool:
    """Whether the arguments (JSON) of a call are closed in `text`, which is all that was written of them."""
    arguments = ArgumentsObject()
    arguments.push(text)
    return arguments.done


class CallParser(BufferedParser):
    """What all parsers of tool calls share: content around the calls, and their numbers.

    White space before a call and at the end is dropped. A call of a function that is not one of `functions` is content.
    """

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self._functions = functions
        self._calls = 0
        self._blank = ""  # white space that is content only if content follows

    def _content(self, text: str) -> Events:
        text = self._blank + text
        content = text.rstrip(BLANK)
        self._blank = text[len(content) :]
        yield ContentText(content)
        return False

    def _content_until(self, *tags: str, final: bool) -> Generator[Event, None, str | None]:
        """Consume the content before the first of these tags, and return that tag, which is left; None where no tag is whole."""
        match = first_of(self._text, *tags)
        at, tag = (len(self._text) - (0 if final else overlap(self._text, *tags)), None) if match is None else match
        yield from self._content(self._text[:at])
        self._text = self._text[at:]
        return tag

    def _begin(self, name: str, call_id: str | None = None) -> CallBegin:
        self._calls += 1
        self._blank = ""
        return CallBegin(self._calls - 1, name, call_id)

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self._calls - 1, text)

    def _last_blank(self) -> Events:
        """The white space at the end of an output without calls."""
        if not self._calls:
            yield ContentText(self._blank)
        self._blank = ""
        return False


class JsonCallParser(CallParser):
    """Parses the calls of a format in which each is an object with its name and its arguments."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._object: CallObject | None = None
        self._prefix = ""  # what introduced the object; it is content if the object is no call

    def _step(self, *, final: bool) -> Events:
        if self._object is not None:
            progress = yield from self._in_object(self._object)
        else:
            progress = yield from self._between(final=final)
        if progress or not final:
            return progress
        if self._object is not None and not self._object.begun:
            return (yield from self._reject(self._object))
        return (yield from self._last_blank())

    @abstractmethod
    def _between(self, *, final: bool) -> Events:
        """Consume text up to the next object, and set `_object` and `_prefix`."""

    def _rejected(self) -> None:
        """The object was no call, and its text is content."""

    def _in_object(self, call: CallObject) -> Events:
        self._text = self._text[call.push(self._text) :]
        if call.accepted and not call.begun:
            call.begun, self._prefix = True, ""
            yield self._begin(call.name or "")
        if call.begun and (arguments := call.take()):
            yield self._arguments(arguments)
        if call.failed or (call.done and not call.begun):
            return (yield from self._reject(call))
        if call.done:
            self._object = None
        return call.done

    def _reject(self, call: CallObject) -> Events:
        """The text is no call, so it is content as written. A call that has begun stays as it is."""
        self._object = None
        if not call.begun:
            yield from self._content(self._prefix + call.text)
        self._rejected()
        return True
