# SPDX-License-Identifier: Apache-2.0
"""`--escape_special_tokens`: the text of a special token in a message, a tool or a variable of the template stays text.

A tokenizer turns the text of a special token into the token wherever it stands. So a user who types `<|im_end|>` ends the message.
Here each such text of the request gets a break after its first character before the template renders it: a noncharacter of
Unicode that the request does not have. The prompt is divided at the breaks, and each part is tokenized by itself, so that the
tokens of the template's own text are found, and those of the request are not. The tokens decode to the same text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.tokenizer import Tokenizer

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters: Unicode keeps them for internal use, so texts have none."""


class Breaks:
    """The marks in one conversation. messages, tools, variables: what the template gets, JSON; the attributes of these names have
    the breaks. tokenizer: whose tokens are broken; None: break nothing.

    end: a mark for other use, which the conversation does not have.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tokenizer: Tokenizer | None,
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages, self.tools, self.variables = messages, tools, dict(variables or {})
        texts = [text for text in _texts([messages, tools, self.variables]) if not text.isascii()]
        free = [mark for mark in _MARKS if not any(mark in text for text in texts)]
        if len(free) < 2:
            raise bad_request("the request has too many different noncharacters of Unicode", param="messages")
        self._mark, self.end = free[:2]
        self._breaks = tokenizer is not None
        if tokenizer is not None:
            pattern = _pattern(tokenizer)
            # The server's own words, roles and names of variables, stay whole: templates compare them.
            self.messages = [
                {name: value if name == "role" else self._broken(value, pattern) for name, value in message.items()}
                for message in messages
            ]
            self.tools = self._broken(tools, pattern)
            self.variables = {name: self._broken(value, pattern) for name, value in self.variables.items()}

    def parts(self, text: str) -> list[str]:
        """The parts of a rendered prompt that are tokenized each by itself."""
        return text.split(self._mark) if self._breaks else [text]

    def _broken(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: match[0] + self._mark, value)
        if isinstance(value, dict):
            return {self._broken(name, pattern): self._broken(item, pattern) for name, item in value.items()}
        return [self._broken(item, pattern) for item in value] if isinstance(value, list) else value


@cache
def _pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the first character of each special token, also of one that begins within another."""
    by_first: dict[str, list[str]] = {}
    for text in tokenizer.added_tokens:
        if len(text) > 1:
            by_first.setdefault(text[0], []).append(re.escape(text[1:]))
    texts = [f"{re.escape(first)}(?={'|'.join(rests)})" for first, rests in by_first.items()]
    return re.compile("|".join(texts) or r"(?!)")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
