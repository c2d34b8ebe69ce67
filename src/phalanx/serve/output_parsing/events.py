# SPDX-License-Identifier: Apache-2.0
"""The events of a parsed output, and `BufferedParser`, the loop of the parsers.

A parser takes text in parts of any size. How the text is cut never changes the joined events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

BLANK = " \t\r\n"


@dataclass(frozen=True)
class ReasoningText:
    """A part of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """A part of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call begins. index: 0 for the first call of the completion. id: the one that the model wrote, if it writes any."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """A part of the arguments (JSON) of call `index`. The model wrote them: a call that max_tokens ends has incomplete JSON."""

    index: int
    text: str


Event = ReasoningText | ContentText | CallBegin | CallArguments
Events = Generator[Event, None, bool]
"""The events of one step of a parser; it returns whether another step may make progress."""


Functions = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: name -> the JSON schema of the arguments."""


class OutputParser(Protocol):
    """The parser of one completion."""

    def push(self, text: str) -> list[Event]:
        """The events that this part of the text completes."""

    def finish(self) -> list[Event]:
        """The last events, when no more text follows. Call it once."""


class BufferedParser(ABC):
    """Keeps the text that is not parsed yet, and runs steps until one cannot make progress."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[Event]:
        self._text += text
        return _merged(self._run(final=False))

    def finish(self) -> list[Event]:
        return _merged(self._run(final=True))

    def _run(self, *, final: bool) -> Generator[Event, None, None]:
        while (yield from self._step(final=final)):
            pass

    @abstractmethod
    def _step(self, *, final: bool) -> Events:
        """Consume some of `self._text`. final: no more text follows."""


class ContentParser:
    """Takes all text as content."""

    def push(self, text: str) -> list[Event]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class CallsOrContentParser:
    """Takes an output that does not begin with a call as content, whatever it has within: an answer in a format.

    calls: the parser of an output that begins with `opening`, as the parsers see it.
    """

    def __init__(self, calls: OutputParser, opening: str) -> None:
        self._calls, self._opening = calls, opening
        self._parser: OutputParser | None = None
        self._text = ""  # may be the beginning of `opening`

    def push(self, text: str) -> list[Event]:
        if self._parser is None:
            self._text += text
            rest = self._text.lstrip(BLANK)
            if len(rest) < len(self._opening) and self._opening.startswith(rest):
                return []
            self._parser = self._calls if rest.startswith(self._opening) else ContentParser()
            text = self._text
        return self._parser.push(text)

    def finish(self) -> list[Event]:
        if self._parser is None:
            return ContentParser().push(self._text)
        return self._parser.finish()


def overlap(text: str, *markers: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of one of the markers."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest


def first_of(text: str, *markers: str) -> tuple[int, str] | None:
    """The first marker in `text`: its position and itself. Of two at one position, the longer one."""
    matches = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not matches:
        return None
    at, _, marker = min(matches)
    return at, marker


def _merged(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring events of the same kind, and drop empty texts."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, CallBegin):
            merged.append(event)
        elif not event.text:
            continue
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            merged[-1] = CallArguments(last.index, last.text + event.text)
        elif isinstance(event, ContentText) and isinstance(last, ContentText):
            merged[-1] = ContentText(last.text + event.text)
        elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
            merged[-1] = ReasoningText(last.text + event.text)
        else:
            merged.append(event)
    return merged
