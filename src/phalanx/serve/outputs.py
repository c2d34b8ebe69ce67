# SPDX-License-Identifier: Apache-2.0
"""What a request returns (`RequestOutput`, `CompletionOutput`), and the `CompletionDelta`s that it is built of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.engine.messages import TokenLogprobs


@dataclass
class CompletionOutput:
    """One completion so far.

    token_ids: all new tokens, including the one that ended it. text: their text, without the stop string or stop token that ended
    it (unless include_stop_str_in_output) and, with skip_special_tokens, without special tokens; "" without a tokenizer. logprobs:
    if requested, one entry per token with .token, .logprob, .rank (1: the most likely) and .top [(token, logprob)], else None.
    cumulative_logprob: their sum, or None. finish_reason: None while it runs, then "stop" (a stop string, a stop token or eos),
    "length" or "abort". stop_reason: the stop string or the id of the stop token; None for eos.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: CompletionDelta) -> None:
        """Append a delta of this completion."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(entry.logprob for entry in delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class RequestOutput:
    """One prompt and its completions.

    prompt: the text that was tokenized (the rendered template of a chat); None for a prompt of token ids. prompt_logprobs: if
    requested, one entry per prompt token; the first is None, because no token precedes it. num_cached_tokens: prompt tokens from
    the prefix cache, for the first completion. finished: all completions have finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def empty(cls, request_id: str, prompt: str | None, token_ids: Sequence[int], n: int) -> RequestOutput:
        """The output of a request with n completions before its first token."""
        return cls(request_id, prompt, list(token_ids), [CompletionOutput(index) for index in range(n)])

    def add(self, delta: CompletionDelta) -> None:
        """Append a delta of one of the completions."""
        self.outputs[delta.index].add(delta)
        if delta.index == 0:
            self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
            self.num_cached_tokens = max(self.num_cached_tokens, delta.cached_tokens)
        self.finished = all(completion.finished for completion in self.outputs)


class CompletionDelta(msgspec.Struct):
    """What one completion gained. The last delta of each completion has a finish_reason.

    text: may be "" while characters or possible stop strings are held back, and may belong to tokens of earlier deltas. logprobs:
    one per token, if requested. prompt_logprobs: only in the first delta of completion 0. cached_tokens: cached prompt tokens.
    accepted: tokens that were drafts of speculative decoding. rejected, scheduled, pooled: as of `RequestUpdate`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    scheduled: int = 0
    pooled: bytes = b""
