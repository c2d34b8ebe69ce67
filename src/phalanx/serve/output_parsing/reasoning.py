# SPDX-License-Identifier: Apache-2.0
"""Reasoning between two tags before the answer: `<think>`, `</think>` (Qwen3, DeepSeek-R1), or `[THINK]`, `[/THINK]` (Mistral)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Protocol

from phalanx.serve.output_parsing.events import (
    BLANK,
    BufferedParser,
    CallArguments,
    CallBegin,
    ContentParser,
    ContentText,
    Event,
    Events,
    OutputParser,
    ReasoningText,
    first_of,
    overlap,
)


class Begin(Enum):
    """Where an output begins, which the end of the prompt tells: the template may have written a tag."""

    INSIDE = "inside the reasoning"
    OPEN = "the reasoning may begin with its tag"
    AFTER = "after the reasoning"


class ReasoningParser(BufferedParser):
    """Parses the reasoning, and gives what follows to the parser of the answer.

    White space around the reasoning and before the answer is dropped. An opening tag counts only at the beginning. Without a
    closing tag, everything is reasoning but the calls of a model that forgot the tag: a special token that begins calls ends the
    reasoning (Kimi-K2). Where letters begin them (MiniMax-M2), the reasoning may just speak of calls: those are calls that are
    complete and that nothing follows, neither text nor the closing tag.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        answer: OutputParser,
        begin: Begin,
        calls: tuple[str, Callable[[], OutputParser]] | None = None,
    ) -> None:
        """calls: what begins calls, and a maker of their parser; None: there are none."""
        super().__init__()
        self._opening, self._closing, self._answer = opening, closing, answer
        self._calls, self._make_calls = calls or ("", ContentParser)
        self._ends = (closing, self._calls) if len(self._calls) == 1 else (closing,)
        self._trial: OutputParser | None = None  # parses the text from `calls` on
        self._tried, self._events = 0, list[Event]()  # characters of the text that it has, and what it read
        self._begin = begin
        self._step_of_state = self._before if begin is not Begin.AFTER else self._after
        self._started = False  # a part of the reasoning that is not blank has been emitted
        self._strip_answer = begin is not Begin.OPEN

    def _step(self, *, final: bool) -> Events:
        return (yield from self._step_of_state(final=final))

    def _before(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK)
        if rest.startswith(self._opening):
            self._text = rest[len(self._opening) :]
            self._step_of_state = self._inside
        elif not final and self._opening.startswith(rest):
            return False
        else:
            self._step_of_state = self._inside if self._begin is Begin.INSIDE else self._after
        yield from ()
        return True

    def _inside(self, *, final: bool) -> Events:
        if not self._started:
            self._text = self._text.lstrip(BLANK)
        end = first_of(self._text, *self._ends)
        if end is not None:
            at, tag = end
            yield ReasoningText(self._text[:at].rstrip(BLANK))
            self._text = self._text[at + len(tag) if tag == self._closing else at :]
            self._step_of_state, self._strip_answer = self._after, True
            return True
        if self._trial is None:
            at = self._text.find(self._calls) if self._calls else -1
            ready = self._text[:at] if at >= 0 else self._text
            if at < 0 and not final:
                ready = ready[: len(ready) - overlap(ready, *filter(None, (self._closing, self._calls)))]
            ready = ready if final and at < 0 else ready.rstrip(BLANK)
            self._text = self._text[len(ready) :]
            self._started = self._started or bool(ready)
            yield ReasoningText(ready)
            if at < 0:
                return False
            self._trial, self._tried, self._events = self._make_calls(), at - len(ready), []
        return (yield from self._in_trial(self._trial, final=final))

    def _in_trial(self, trial: OutputParser, *, final: bool) -> Events:
        """The text begins with `calls`, behind white space."""
        text, self._tried = self._text[self._tried :], len(self._text)
        events = trial.push(text) + (trial.finish() if final else [])
        self._events += events
        is_text = any(isinstance(event, ContentText) and event.text.strip(BLANK) for event in events)
        if not is_text and not final:
            return False
        self._trial = None
        if not is_text and _are_complete(self._events):
            self._text = ""
            yield from self._events
            return False
        end = self._text.find(self._calls) + len(self._calls)
        yield ReasoningText(self._text[:end])
        self._text, self._started = self._text[end:], True
        return True

    def _after(self, *, final: bool) -> Events:
        text, self._text = self._text, ""
        if self._strip_answer:
            text = text.lstrip(BLANK)
            self._strip_answer = not text
        if text:
            yield from self._answer.push(text)
        if final:
            yield from self._answer.finish()
        return False


def _are_complete(events: list[Event]) -> bool:
    """Whether there are calls, and all their arguments are JSON."""
    arguments: dict[int, str] = {event.index: "" for event in events if isinstance(event, CallBegin)}
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    try:
        return bool([json.loads(text) for text in arguments.values()])
    except ValueError:
        return False


class AnswerParser(BufferedParser):
    """Takes the tags around an answer away, such as `<response>` and `</response>`, with the white space at them, and gives all
    text to the parser of the answer. An opening tag counts only at the beginning, and behind a closing one."""

    def __init__(self, opening: str, closing: str, answer: OutputParser) -> None:
        super().__init__()
        self._opening, self._closing, self._answer = opening, closing, answer
        self._inside = self._plain = self._started = self._ended = False

    def _step(self, *, final: bool) -> Events:
        if not (self._inside or self._plain):
            rest = self._text.lstrip(BLANK)
            self._text = rest if self._ended else self._text
            if not final and len(rest) < len(self._opening) and self._opening.startswith(rest):
                return False
            self._inside = rest.startswith(self._opening)
            self._plain, self._started = not self._inside, False
            self._text = rest[len(self._opening) :] if self._inside else self._text
        if self._inside and not self._started:
            self._text = self._text.lstrip(BLANK)
        at = self._text.find(self._closing) if self._inside else -1
        ready = self._text[:at].rstrip(BLANK) if at >= 0 else self._text
        if self._inside and at < 0:
            begun = 0 if final else overlap(ready, self._closing)
            ready = ready[: len(ready) - begun].rstrip(BLANK)
        self._started = self._started or bool(ready)
        if ready:
            yield from self._answer.push(ready)
        self._text = self._text[at + len(self._closing) if at >= 0 else len(ready) :]
        if at >= 0:
            self._inside, self._ended = False, True
            return True
        if final:
            yield from self._answer.finish()
        return False


class TokenCounter(Protocol):
    """Counts the tokens of the reasoning in one completion."""

    count: int

    def push(self, token_ids: Sequence[int]) -> None: ...


class TagTokenCounter:
    """Counts the tokens between the tags. opening: the id of the tag. ends: the ids of those that end it. text_of: the text of a
    token."""

    def __init__(self, opening: int | None, ends: Collection[int], text_of: Callable[[int], str], begin: Begin) -> None:
        self.count = 0
        self._opening, self._ends, self._text_of = opening, ends, text_of
        self._state = begin

    def push(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens."""
        for token_id in token_ids:
            if self._state is Begin.AFTER:
                return
            if token_id == self._opening and not self.count:
                self._state = Begin.INSIDE
            elif self._state is Begin.INSIDE:
                if token_id in self._ends:
                    self._state = Begin.AFTER
                else:
                    self.count += 1
            elif self._text_of(token_id).strip():
                self._state = Begin.AFTER
