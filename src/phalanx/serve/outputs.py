# SPDX-License-Identifier: Apache-2.0
"""What a request returns (`RequestOutput`, `CompletionOutput`), and the `CompletionDelta`s that it is built of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.engine.messages import TokenLogprobs


@dataclass
class CompletionOutput:
    """One completion, as far as it has come.

    token_ids: every new token, the one that ended it included. text: their text, without the stop string or stop token that ended
    it (unless include_stop_str_in_output) and, with skip_special_tokens, without special tokens; "" where there is no tokenizer.
    logprobs: one entry per token where asked for, with .token, .logprob, .rank (1: the likeliest) and .top [(token, logprob)].
    cumulative_logprob: their sum, else None. finish_reason: None while it runs, then "stop" (a stop string, a stop token or eos),
    "length" or "abort". stop_reason: the stop string or the stop token's id; None for eos.
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
        """Append what the completion gained."""
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

    prompt: the text that was tokenized (a chat's rendered template); None for a prompt of token ids. prompt_logprobs: one entry per
    prompt token where asked for; the first is None, since nothing stands before it. num_cached_tokens: prompt tokens that the
    prefix cache held, for the first completion. finished: all completions are.
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
        """Append what one completion gained."""
        self.outputs[delta.index].add(delta)
        if delta.index == 0:
            self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
            self.num_cached_tokens = max(self.num_cached_tokens, delta.cached_tokens)
        self.finished = all(completion.finished for completion in self.outputs)


class CompletionDelta(msgspec.Struct):
    """What one completion grew by. The last one of each completion has a finish_reason.

    text may be "" while characters or possible stop strings are held back, and may belong to tokens of earlier pieces. logprobs:
    one per token, where asked for. prompt_logprobs: once, in the first piece of completion 0. cached_tokens: of the prompt.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
