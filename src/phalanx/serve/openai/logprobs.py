# SPDX-License-Identifier: Apache-2.0
"""Logprobs in the two forms of the API: lists per field for completions, objects per token for chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.engine.messages import TokenLogprobs
from phalanx.serve.detokenize import TextStream
from phalanx.serve.openai.long_answers import JsonParts, encode_small
from phalanx.serve.tokenizer import Tokenizer

_PART = 64
"""Tokens whose alternatives are encoded at once: a millisecond."""
LOWEST = -9999.0
"""Replaces minus infinity, which JSON has no number for (the same value as OpenAI's)."""


def chat_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. The bytes of tokens that are parts of a character can be joined to it."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        bytes_ = None if data is None else list(data)
        return {"token": tokenizer.token_text(token), "logprob": max(logprob, LOWEST), "bytes": bytes_}

    content = [{**entry(one.token, one.logprob), "top_logprobs": [entry(*top) for top in one.top]} for one in logprobs]
    return {"content": content, "refusal": None}


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None], text_of: Callable[[int], str]) -> JsonParts:
    """`prompt_logprobs` in vLLM's form, as JSON: per token of the prompt a map of token ids, the token's own and the most likely
    ones, to logprob, rank (from 1) and text. The first token has none. text_of: token id -> its text.

    It is encoded part by part: half a million objects at once would have the garbage collector stop every stream.
    """

    def entries(one: TokenLogprobs) -> dict[str, dict[str, Any]]:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)}
        ranked.setdefault(one.token, (one.logprob, one.rank))
        return {
            str(token): {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text_of(token)}
            for token, (logprob, rank) in ranked.items()
        }

    parts: list[bytes | memoryview] = [b"["]
    for start in range(0, len(logprobs), _PART):
        part = [None if one is None else entries(one) for one in logprobs[start : start + _PART]]
        parts.append((b"," if start else b"") + encode_small(part)[1:-1])
    return JsonParts([*parts, b"]"], len(logprobs))


@dataclass(frozen=True)
class EchoedText:
    """The text of an echoed prompt, and which of its tokens write it. begin, end: of their positions; the tokenizer has put the
    others around a text. skip_special_tokens: special tokens among them write nothing."""

    text: str
    begin: int
    end: int
    skip_special_tokens: bool


class CompletionLogprobsWriter:
    """`choices[].logprobs` of a completion, part by part: it tracks the offset of the next token in the text.

    The offset of a token is the length of what the tokens before it write; a character counts once it is complete, so that tokens
    of one character have the same. skip_special_tokens: those of the completion write nothing. top: whether alternatives were
    requested.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, top: bool) -> None:
        self._tokenizer, self._text_of, self._top = tokenizer, tokenizer.token_text, top
        self._text = TextStream(tokenizer, skip_special_tokens=skip_special_tokens, shown={})
        self._offset = 0

    def echo(self, logprobs: Sequence[TokenLogprobs | None], tokens: Sequence[int], echoed: EchoedText) -> dict[str, Any]:
        """The tokens of the prompt. The first one has no logprobs (None)."""
        text = TextStream(self._tokenizer, skip_special_tokens=echoed.skip_special_tokens, shown={})
        offsets, offset, length = [], 0, len(echoed.text)
        for position, token in enumerate(tokens):
            offsets.append(min(offset, length))  # a normalizer may have made a text longer
            if echoed.begin <= position < echoed.end:
                offset += len(text.push(token))
        self._offset = length
        return self._entries(logprobs, tokens, offsets)

    def push(self, logprobs: Sequence[TokenLogprobs], tokens: Sequence[int]) -> dict[str, Any]:
        """The next tokens of the completion."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.push(token))
        return self._entries(logprobs, tokens, offsets)

    def _entries(self, logprobs: Sequence[TokenLogprobs | None], tokens: Sequence[int], offsets: list[int]) -> dict[str, Any]:
        return {
            "tokens": [self._text_of(token) for token in tokens],
            "token_logprobs": [None if one is None else max(one.logprob, LOWEST) for one in logprobs],
            "top_logprobs": [self._alternatives(one) for one in logprobs] if self._top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        if logprobs is None:
            return None
        # The sampled token is always among them. Of two tokens with the same text, the more likely one counts.
        entries = [(logprobs.token, logprobs.logprob), *logprobs.top]
        logprob_of: dict[str, float] = {}
        for token, logprob in entries:
            text = self._text_of(token)
            logprob_of[text] = max(logprob_of.get(text, LOWEST), logprob)
        return logprob_of
