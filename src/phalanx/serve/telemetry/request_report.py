# SPDX-License-Identifier: Apache-2.0
"""What is told of a request once it has been answered: `RequestReport`, and its line in the log. Never anything of its content."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from phalanx import log
from phalanx.config.sampling_params import SamplingParams

current_report: ContextVar[RequestReport | None] = ContextVar("current_report", default=None)
"""The report of the request that this task answers; None where nobody reads one."""

Headers = Iterable[tuple[bytes, bytes]]
EndOfRequest = Callable[["RequestReport", Headers], None]
"""Told of a request that has been answered, with its headers."""

_logger = log.get_logger(__name__)


class Completion(Protocol):
    """One completion that has ended, with times of time.monotonic(). scheduled, first: None where it came to no step or token."""

    scheduled: float | None
    first: float | None
    tokens: int
    cached: int
    reason: str


class RequestReport:
    """One HTTP request. Times are of time.monotonic(); those that it did not come to are None.

    accepted: its head has arrived. scheduled: the engine made its first step. first: its first token arrived. ended: its answer has
    been sent, or the client has left. status: None where the client left before an answer began. params, prompt_tokens and what
    follows: of requests that generate. reasons: why completions ended, each once.
    """

    def __init__(self, request_id: str, method: str, path: str) -> None:
        self.request_id, self.method, self.path = request_id, method, path
        self.accepted = time.monotonic()
        self.scheduled: float | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.status: int | None = None
        self.model = ""
        self.params: SamplingParams | None = None
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.reasons: list[str] = []

    def generated(
        self, model: str, params: SamplingParams, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> None:
        """All completions of these prompts have ended; it may have others."""
        self.model, self.params = model, params
        self.prompt_tokens += sum(map(len, prompts))
        self.completion_tokens += sum(completion.tokens for completion in completions)
        self.cached_tokens += sum(completion.cached for completion in completions[:: params.n])
        self.scheduled = _earliest(self.scheduled, *(one.scheduled for one in completions))
        self.first = _earliest(self.first, *(one.first for one in completions))
        self.reasons = list(dict.fromkeys([*self.reasons, *(completion.reason for completion in completions)]))

    def seconds_to(self, when: float | None) -> float | None:
        """From its arrival to one of its times."""
        return None if when is None else when - self.accepted


def _earliest(*times: float | None) -> float | None:
    return min((one for one in times if one is not None), default=None)


def log_request(report: RequestReport, _: Headers = ()) -> None:
    """The line of `--log_requests`."""
    fields: dict[str, Any] = {"method": report.method, "path": report.path, "status": report.status}
    if report.params is not None:
        fields |= {
            "model": report.model, "prompt_tokens": report.prompt_tokens, "cached_tokens": report.cached_tokens,
            "completion_tokens": report.completion_tokens, "queue_seconds": _rounded(report.seconds_to(report.scheduled)),
            "first_token_seconds": _rounded(report.seconds_to(report.first)), "finish_reason": ",".join(report.reasons),
        }  # fmt: skip
    _logger.info("request", extra=log.with_fields(**fields, total_seconds=_rounded(report.seconds_to(report.ended))))


def always_log_requests() -> None:
    """Write these lines at any `--log_level`."""
    _logger.setLevel(logging.INFO)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
