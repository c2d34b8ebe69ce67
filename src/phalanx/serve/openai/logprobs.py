# SPDX-License-Identifier: Apache-2.0
"""Logprobs in the two shapes of the API: lists per field for completions, objects per token for chats."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from phalanx.engine.messages import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for (OpenAI's own stand-in)."""


def chat_logprobs(found: Sequence[TokenLogprobs], text_of: Callable[[int], str]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. text_of: token id -> its text."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token)
        # A token that is a piece of a character has no text of its own, and so no bytes that add up to the answer's.
        bytes_ = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": bytes_}

    content = [{**entry(one.token, one.logprob), "top_logprobs": [entry(*top) for top in one.top]} for one in found]
    return {"content": content, "refusal": None}


class CompletionLogprobsWriter:
    """`choices[].logprobs` of a completion, piece by piece: it knows how far into the text the next token begins.

    text_of: token id -> its text. hidden: ids whose text is not shown. top: whether alternatives were asked for.
    """

    def __init__(self, text_of: Callable[[int], str], *, hidden: Container[int] = (), top: bool) -> None:
        self._text_of, self._hidden, self._top = text_of, hidden, top
        self._offset = 0

    def push(self, found: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> dict[str, Any]:
        """The next tokens. A first token of a prompt has no logprobs (None)."""
        texts = [self._text_of(token) for token in tokens]
        offsets = []
        for text, token in zip(texts, tokens, strict=True):
            offsets.append(self._offset)
            self._offset += 0 if token in self._hidden else len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else max(one.logprob, LOWEST) for one in found],
            "top_logprobs": [self._alternatives(one) for one in found] if self._top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, found: TokenLogprobs | None) -> dict[str, float] | None:
        if found is None:
            return None
        # The chosen token is always among them. Of two tokens that read the same, the likelier stands.
        entries = [(found.token, found.logprob), *found.top]
        shown: dict[str, float] = {}
        for token, logprob in entries:
            text = self._text_of(token)
            shown[text] = max(shown.get(text, LOWEST), logprob)
        return shown
