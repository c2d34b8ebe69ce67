# SPDX-License-Identifier: Apache-2.0
"""All completions of one request as interleaved deltas, each when its tokens arrive, observed for the metrics.

Closing the iterator, also by a cancellation because the client has disconnected, aborts what still runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from secrets import token_hex
from typing import Any

from phalanx.config.sampling_params import SamplingParams
from phalanx.errors import EngineClosed, EngineError, LogitsNotFinite
from phalanx.log import request_id
from phalanx.metrics import Metrics
from phalanx.serve.admission import Ticket
from phalanx.serve.completions import merged, stream_completions
from phalanx.serve.openai.service import ServingEngine
from phalanx.serve.output_parsing.reasoning import TokenCounter
from phalanx.serve.outputs import CompletionDelta
from phalanx.serve.telemetry.request_report import current_report

Deltas = AsyncGenerator[CompletionDelta, None]


async def generate(
    engine: ServingEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    ticket: Ticket,
    metrics: Metrics,
    *,
    accepted: float,
    shown: Mapping[int, str] | None = None,
) -> Deltas:
    """n completions of each prompt; those of prompt p have the indices p * n .. p * n + n - 1.

    accepted: the time at which the request arrived (time.monotonic). Raises the error of the first completion that fails.
    shown: special tokens that add these texts.
    """
    observers = [LatencyObserver(metrics, ticket, index, accepted) for index in range(len(prompts) * params.n)]
    report = current_report.get()
    try:
        running = _every(engine, prompts, params, shown) if len(prompts) > 1 else _one(engine, prompts[0], params, 0, shown)
        async with aclosing(running) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "abort":
                    raise EngineClosed("the server stopped the completion")
                observers[delta.index].observe(delta)
                yield delta
    except (EngineError, LogitsNotFinite):
        for observer in observers:
            observer.stop("error")
        raise
    finally:
        for observer in observers:
            observer.stop("abort")
        if report is not None:
            report.generated(metrics.model_name, params, prompts, observers)


def _one(engine: ServingEngine, tokens: list[int], params: SamplingParams, prompt: int, shown: Mapping[int, str] | None) -> Deltas:
    deltas = stream_completions(engine.client, engine.tokenizer, _engine_id(), tokens, params, shown=shown)
    return deltas if prompt == 0 else _renumbered(deltas, prompt * params.n)


def _engine_id() -> str:
    """An id that no other request of the engine has; it begins with that of the HTTP request, which several prompts share, and
    which a client may send twice."""
    return f"{request_id.get()}-{token_hex(4)}"


async def _renumbered(deltas: Deltas, first: int) -> Deltas:
    async with aclosing(deltas):
        async for delta in deltas:
            delta.index += first
            yield delta


def _every(engine: ServingEngine, prompts: Sequence[list[int]], params: SamplingParams, shown: Mapping[int, str] | None) -> Deltas:
    return merged(partial(_one, engine, tokens, params, i, shown) for i, tokens in enumerate(prompts))


class LatencyObserver:
    """Observes the latencies of one completion, and tells admission control when it has its first token. Its fields are those of
    `request_report.Completion`."""

    def __init__(self, metrics: Metrics, ticket: Ticket, index: int, accepted: float) -> None:
        self._metrics, self._ticket, self._index, self._accepted = metrics, ticket, index, accepted
        self._latest: float | None = None
        self.scheduled: float | None = None
        self.first: float | None = None
        self.tokens = self.cached = 0
        self.reason = ""

    def observe(self, delta: CompletionDelta) -> None:
        """A delta arrived."""
        now = time.monotonic()
        if delta.token_ids:
            count = len(delta.token_ids)
            if self._latest is None:
                self._ticket.started(self._index)
                self._metrics.first_token(now - self._accepted)
                self.first, self.cached = now, delta.cached_tokens
                self.scheduled = delta.scheduled / 1e6 or None
            else:
                self._metrics.next_tokens(now - self._latest, count)
            self._latest = now
            self.tokens += count
        if delta.finish_reason is not None:
            self.stop(delta.finish_reason)

    def stop(self, reason: str) -> None:
        """The completion has ended. The first reason counts."""
        if not self.reason:
            self.reason = reason
            self._metrics.finished(reason, time.monotonic() - self._accepted)


class UsageCounter:
    """Counts the tokens of a request. A prompt counts once, however many completions it has.

    reasoning: the counters of the tokens of the reasoning, one per completion; none for a model without. predicted: drafts are
    counted also where there are none.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], n: int, *, reasoning: Sequence[TokenCounter] = (), predicted: bool = False
    ) -> None:
        self._reasoning, self._predicted = reasoning, predicted
        self._prompt = sum(len(tokens) for tokens in prompts)
        self._n, self._generated, self._accepted, self._rejected = n, 0, 0, 0
        self._cached: dict[int, int] = {}

    def add(self, delta: CompletionDelta) -> None:
        self._generated += len(delta.token_ids)
        self._accepted += delta.accepted
        self._rejected += delta.rejected
        if self._reasoning:
            self._reasoning[delta.index].push(delta.token_ids)
        # Only what was cached before the request: later completions of a prompt find the blocks of the first one.
        self._cached.setdefault(delta.index // self._n, delta.cached_tokens)

    def body(self, *, completion_tokens: int | None = None) -> dict[str, Any]:
        """The `usage` of a response. completion_tokens: those of the response, if they are not all generated tokens."""
        count = self._generated if completion_tokens is None else completion_tokens
        body = {
            "prompt_tokens": self._prompt,
            "completion_tokens": count,
            "total_tokens": self._prompt + count,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        details = {}
        if self._reasoning:
            details["reasoning_tokens"] = sum(counter.count for counter in self._reasoning)
        if self._predicted or self._accepted or self._rejected:
            details["accepted_prediction_tokens"] = self._accepted
            details["rejected_prediction_tokens"] = self._rejected
        if details:
            body["completion_tokens_details"] = details
        return body
