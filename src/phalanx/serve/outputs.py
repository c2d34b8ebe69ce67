# SPDX-License-Identifier: Apache-2.0
"""What a user gets back: `RequestOutput`, with one `CompletionOutput` per completion."""

from __future__ import annotations

from dataclasses import dataclass, field

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
