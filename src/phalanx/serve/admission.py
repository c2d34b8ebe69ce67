# SPDX-License-Identifier: Apache-2.0
"""Admission control: which requests are accepted, and when the server is idle. Pure; independent of HTTP and of the engine.

A sequence (one completion of one prompt) is queued from `enter` until its first token. The queue holds as many sequences as the
batch has free places, plus `max_reqs`; their prompts may have `max_tokens` tokens beyond the first waiting request. `enter` takes
places before the prompt is tokenized; `Ticket.prompt` then adds the token counts. A rejection is cheap and says when to try again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType

from phalanx.config.serving import QUEUED_BATCHES
from phalanx.errors import EngineAsleep, EngineClosed, Overloaded, PhalanxError, RequestError

_RECENT = 64
"""Number of finished sequences from which the completion rate is estimated."""


class Phase(Enum):
    """The state of the server, as `/ready` reports it."""

    STARTING = "starting"
    READY = "ready"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    FAILED = "failed"


class AdmissionControl:
    """Counts the sequences in the server. One per server; used from the event loop only.

    phase: the state of the server. failure: the error behind Phase.FAILED. open: accepted sequences that have not ended. queued:
    those without a token yet. queued_tokens: their prompt tokens.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """refused: called with the reason of each rejection: "queue_full", "draining" or "not_ready" (asleep, too)."""
        self.phase = Phase.STARTING
        self.failure: PhalanxError | None = None
        self.open = self.queued = self.queued_tokens = 0
        self.batch = self.max_reqs = 0
        self.max_tokens = max_tokens
        self._clock, self._refused = clock, refused
        self._left: deque[float] = deque(maxlen=_RECENT)  # when sequences ended, in seconds of `_busy`
        self._busy_before, self._busy_since = 0.0, 0.0
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self, *, batch: int, max_reqs: int | None) -> None:
        """The engine is ready and runs up to `batch` sequences at once. max_reqs: None for QUEUED_BATCHES batches."""
        self.batch = batch
        self.max_reqs = QUEUED_BATCHES * batch if max_reqs is None else max_reqs
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def sleep(self) -> None:
        """Accept no requests until `wake`; accepted ones may finish."""
        if self.phase is Phase.READY:
            self.phase = Phase.SLEEPING

    def wake(self, *, asleep: bool) -> None:
        """A change of the model has ended; the engine is asleep or awake."""
        if self.phase in (Phase.READY, Phase.SLEEPING):
            self.phase = Phase.SLEEPING if asleep else Phase.READY

    def drain(self) -> None:
        """Accept no further requests; accepted ones may finish."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    def fail(self, error: PhalanxError) -> None:
        """The engine has failed."""
        self.phase, self.failure = Phase.FAILED, error

    async def emptied(self) -> None:
        """Return when no sequence is open."""
        await self._empty.wait()

    def enter(self, sequences: int) -> Ticket:
        """Take places for this number of sequences. Raises Overloaded if they exceed the queue, RequestError if they exceed even an
        empty one, EngineClosed if the server is starting, asleep, draining, or has failed."""
        if self.phase is not Phase.READY:
            self._refused("draining" if self.phase is Phase.DRAINING else "not_ready")
        if self.phase is Phase.FAILED and self.failure is not None:
            raise EngineClosed("the engine has failed", why=str(self.failure))
        if self.phase is Phase.SLEEPING:
            raise EngineAsleep("the engine sleeps", next="POST /wake_up, or try another server")
        if self.phase is not Phase.READY:
            state = "the server is still starting" if self.phase is Phase.STARTING else "the server is shutting down"
            raise EngineClosed(state, next="try another server, or try again later")
        if sequences > self.max_reqs + self.batch:
            raise RequestError(
                f"{sequences} completions exceed the limit of one request, {self.max_reqs + self.batch}",
                next="ask for fewer completions per request",
            )  # fmt: skip
        self._require_capacity(sequences)
        return Ticket(self, sequences)

    def require_capacity_for_one(self) -> None:
        """Raise Overloaded if not even one more sequence may wait. Called before the body is read, so that a rejection is cheap."""
        if self.phase is Phase.READY:
            self._require_capacity(1)

    def _require_capacity(self, sequences: int) -> None:
        free = max(0, self.batch - (self.open - self.queued))
        if self.queued + sequences > self.max_reqs + free:
            self._refused("queue_full")
            limit = f"{self.queued} completions wait, and {self.max_reqs + free} may: {self.max_reqs} (max_num_queued_reqs)"
            raise self._overloaded(
                f"{sequences} more {'completion does' if sequences == 1 else 'completions do'} not fit",
                f"{limit} and {free} for free places in the batch",
                must_end=self.queued + sequences - (self.max_reqs + free),
            )

    def retry_after(self, must_end: int = 1) -> int:
        """Estimated seconds until there is a place, 1 to 60: the number of sequences that must end for it, over the recent
        completion rate."""
        if len(self._left) < 2:
            return 1
        rate = len(self._left) / max(self._busy() - self._left[0], 1e-3)
        return min(60, max(1, math.ceil(must_end / rate)))

    def _overloaded(self, failure: str, limits: str, *, must_end: int) -> Overloaded:
        seconds = self.retry_after(must_end)
        error = Overloaded(f"the queue is full: {failure}", held=limits, next=f"try again in {seconds} s")
        error.retry_after = seconds
        return error

    def _busy(self) -> float:
        """Seconds in which a sequence was open. Time without requests says nothing about the rate, and the rate before it still
        does."""
        return self._busy_before + (self._clock() - self._busy_since if self.open else 0.0)

    def _count(self, *, open: int = 0, queued: int = 0, tokens: int = 0) -> None:
        if open < 0:
            self._left.extend([self._busy()] * min(-open, _RECENT))
            if self.open + open == 0:
                self._busy_before = self._left[-1]
        elif open and not self.open:
            self._busy_since = self._clock()
        self.open += open
        self.queued += queued
        self.queued_tokens += tokens
        if self.open:
            self._empty.clear()
        else:
            self._empty.set()


class Ticket:
    """The places of one request. A context manager: on exit it returns the places that it still has."""

    def __init__(self, admission: AdmissionControl, sequences: int) -> None:
        self._admission = admission
        self._waiting: dict[int, int] = dict.fromkeys(range(sequences), 0)
        self._open = sequences
        admission._count(open=sequences, queued=sequences)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for sequence in list(self._waiting):
            self.started(sequence)
        self._admission._count(open=-self._open)
        self._open = 0

    def prompt(self, tokens: list[int]) -> None:
        """Add the lengths of the prompts, one per sequence. Raises Overloaded if they do not fit beside those that wait."""
        admission, total = self._admission, sum(tokens)
        if admission.max_tokens is not None and admission.queued_tokens and admission.queued_tokens + total > admission.max_tokens:
            admission._refused("queue_full")
            each = admission.queued_tokens / max(1, admission.queued - len(tokens))  # one of the others begins when one ends
            raise admission._overloaded(
                f"a prompt of {total} tokens does not fit",
                f"{admission.queued_tokens} tokens wait, and {admission.max_tokens} may (max_num_queued_tokens)",
                must_end=math.ceil(min(admission.queued_tokens, admission.queued_tokens + total - admission.max_tokens) / each),
            )
        for sequence, count in enumerate(tokens):
            self._waiting[sequence] = count
        admission._count(tokens=total)

    def started(self, sequence: int) -> None:
        """The sequence has its first token, or has ended without one. Further calls do nothing."""
        if sequence in self._waiting:
            self._admission._count(queued=-1, tokens=-self._waiting.pop(sequence))
