# SPDX-License-Identifier: Apache-2.0
"""The harmony format of gpt-oss: reasoning, answer and tool calls are messages on channels.

A message: `<|start|>assistant`, a header, `<|message|>`, its text and `<|end|>` (`<|call|>` ends a call, `<|return|>` the answer).
The prompt ends with `<|start|>assistant`. The header has the channel, and for a call the recipient: `<|channel|>analysis`,
`<|channel|>final`, `<|channel|>commentary to=functions.NAME <|constrain|>json`, ` to=functions.NAME<|channel|>commentary json`.

Channel `analysis` is the reasoning, `final` the answer, and `commentary` a call, or an announcement to the user.
Source: OpenAI's description of the format, https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from phalanx.serve.output_parsing.events import ContentText, Event, Events, Functions, ReasoningText, first_of, overlap
from phalanx.serve.output_parsing.json_call import CallParser
from phalanx.serve.output_parsing.markers import Markers

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
MAX_HEADER = 256
"""Characters of a header. A longer one is content."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_ROLE = re.compile(r"\s*(?:assistant)?\s*(?:to=[^\s<]+)?\s*")
"""What may stand before the channel of a header."""


class HarmonyParser(CallParser):
    """The parser of reasoning and calls together. reasoning: if false, the channel `analysis` is content, too.

    An output that does not begin with a header is content.
    """

    def __init__(self, functions: Functions, markers: Markers, *, reasoning: bool = True) -> None:
        super().__init__(functions)
        self._start, self._channel, self._message, self._constrain, *self._ends = map(markers.encode, MARKERS)
        self._loose = False  # text that belongs to no message went out since the last marker: what follows is no role
        self._shows_reasoning = reasoning
        self._state = self._beginning
        self._kind: type[ReasoningText] | type[ContentText] = ContentText
        self._kinds: set[type[Event]] = set()  # those that have had a message
        self._separator = ""  # between two messages of one kind
        self._in_call = self._has_arguments = False
        self._perhaps_null = ""  # arguments so far, which may be null

    def _step(self, *, final: bool) -> Events:
        return (yield from self._state(final=final))

    def _beginning(self, *, final: bool) -> Events:
        """The output follows `<|start|>assistant`."""
        headers = (self._channel, self._message, " to=", self._start)
        if not final and any(header.startswith(self._text) for header in headers):
            return False
        if self._text.startswith(self._start):
            self._state = self._between
        elif any(self._text.startswith(header) for header in headers):
            self._state = self._in_header
        else:
            self._state = self._in_message
        yield from ()
        return True

    def _between(self, *, final: bool) -> Events:
        """After a message: the next one, or text that belongs to none. Models leave out `<|start|>`, or the role after it."""
        markers = (self._start, self._channel, self._message, *self._ends)
        match = first_of(self._text, *markers)
        if match is None:
            ready = len(self._text) - (0 if final else overlap(self._text, *markers))
            if not final and not self._loose and _may_be_role(self._text[:ready]):
                return False
            self._loose = self._loose or ready > 0
            yield ContentText(self._text[:ready])
            self._text = self._text[ready:]
            return False
        at, marker = match
        if marker in (self._start, *self._ends):
            yield ContentText(self._text[:at])
            self._text, self._loose = self._text[at + len(marker) :], False
            if marker != self._start:
                return True
        elif self._loose or not _ROLE.fullmatch(self._text[:at]):
            yield ContentText(self._text[:at])
            self._text = self._text[at:]
        self._state = self._in_header
        return True

    def _in_header(self, *, final: bool) -> Events:
        markers = (self._message, *self._ends, self._start)
        match = first_of(self._text, *markers)
        if match is None or match[0] > MAX_HEADER:
            if len(self._text) <= MAX_HEADER + max(map(len, markers)):
                return False  # a header that is cut off is no text
            self._state, self._in_call, self._kind = self._in_message, False, ContentText
            literal = self._text.find(self._channel) + len(self._channel) if self._channel in self._text else 0
            yield ContentText(self._text[:literal])
            self._text = self._text[literal:]
            return True
        at, marker = match
        header, self._text, self._loose = self._text[:at], self._text[at + len(marker) :], False
        if marker == self._start:
            return True
        self._state = self._between
        if marker == self._message:
            yield from self._open(header)
        return True

    def _open(self, header: str) -> Events:
        self._state = self._in_message
        channel = header.partition(self._channel)[2].partition(self._constrain)[0].split()
        recipient = _RECIPIENT.search(header.replace(self._channel, " ").replace(self._constrain, " "))
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient is not None else ""
        self._in_call = name in self._functions
        analysis = channel[:1] == ["analysis"] and self._shows_reasoning
        self._kind = ReasoningText if analysis else ContentText
        self._separator = "\n\n" if self._kind in self._kinds else ""
        if self._in_call:
            self._has_arguments = False
            yield self._begin(name)
        return True

    def _in_message(self, *, final: bool) -> Events:
        nexts = (self._start, self._channel)  # a message whose end is left out
        ends = (*self._ends, *nexts)
        match = first_of(self._text, *ends)
        ready = match[0] if match is not None else len(self._text) - (0 if final else overlap(self._text, *ends))
        text, self._text = self._text[:ready], self._text[ready:]
        if self._in_call:
            yield from self._argument_text(text, ended=final or match is not None)
        elif text:
            yield self._kind(self._separator + text)
            self._kinds.add(self._kind)
            self._separator = ""
        if match is None:
            return False
        if match[1] not in nexts:
            self._text = self._text[len(match[1]) :]
        self._state = self._between
        return True

    def _argument_text(self, text: str, *, ended: bool) -> Events:
        if not self._has_arguments:
            text, self._perhaps_null = (self._perhaps_null + text).lstrip(), ""
            if ended and text.rstrip() in ("", "null"):
                text = "{}"
            elif not ended and "null".startswith(text.rstrip()):
                self._perhaps_null, text = text, ""
            self._has_arguments = bool(text)
        yield self._arguments(text)
        return False


def _may_be_role(text: str) -> bool:
    """Whether text after a message may be the beginning of what stands before a channel."""
    rest = text.lstrip()
    if "assistant".startswith(rest):
        return True
    rest = rest.removeprefix("assistant").lstrip()
    return len(text) <= MAX_HEADER and ("to=".startswith(rest) or _ROLE.fullmatch(rest) is not None)


class HarmonyTokenCounter:
    """Counts the tokens in the channel `analysis`, without the markers.

    special: ids of the markers by their texts. decode: the text of ordinary tokens.
    """

    def __init__(self, special: Mapping[str, int], decode: Callable[[list[int]], str]) -> None:
        self.count = 0
        self._marker_of = {token_id: text for text, token_id in special.items()}
        self._decode = decode
        self._header: list[int] | None = []  # the channel's tokens; None outside of a header
        self._in_analysis = False

    def push(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens."""
        for token_id in token_ids:
            marker = self._marker_of.get(token_id)
            if marker == MESSAGE and self._header is not None:
                self._in_analysis = self._decode(self._header).split()[:1] == ["analysis"]
                self._header = None
            elif marker in (START, CHANNEL):
                self._header, self._in_analysis = [], False
            elif marker in ENDS:
                self._header, self._in_analysis = None, False
            elif self._header is not None:
                self._header.append(token_id)
            elif marker is None:
                self.count += self._in_analysis
