# SPDX-License-Identifier: Apache-2.0
"""The door: which requests come in, and when the house is empty. Pure; knows no HTTP and no engine.

A sequence (one completion of one prompt) is queued from `enter` until its first token. So many may be queued as the batch has free
places, plus `max_reqs`; their prompts may hold `max_tokens` tokens beyond the first waiting request. `enter` asks for places before
a prompt is even tokenized; `Ticket.prompt` then brings the token counts. Each refusal costs nothing and says when to come again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType

from phalanx.errors import EngineClosed, Overloaded, PhalanxError, RequestError

QUEUED_BATCHES = 8
"""Without a cap given, so many batches may wait."""
_RECENT = 64
"""Sequences that the rate of leaving is estimated from."""


class Phase(Enum):
    """What the server is doing, as `/ready` says it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class AdmissionControl:
    """Counts what is inside. One per server; used from the event loop only.

    phase: Phase. open: sequences inside. queued: those without a token. queued_tokens: their prompt tokens. why: of FAILED.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """refused: told the reason of each refusal: "queue_full", "draining" or "not_ready"."""
        self.phase = Phase.STARTING
        self.failure: PhalanxError | None = None
        self.open = self.queued = self.queued_tokens = 0
        self.batch = self.max_reqs = 0
        self.max_tokens = max_tokens
        self._clock, self._refused = clock, refused
        self._left: deque[float] = deque(maxlen=_RECENT)
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self, *, batch: int, max_reqs: int | None) -> None:
        """The engine is ready and runs `batch` sequences at once. `max_reqs` None: QUEUED_BATCHES batches."""
        self.batch = batch
        self.max_reqs = QUEUED_BATCHES * batch if max_reqs is None else max_reqs
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """Nobody comes in any more; who is inside may finish."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    def fail(self, error: PhalanxError) -> None:
        """The engine is gone."""
        self.phase, self.failure = Phase.FAILED, error

    async def emptied(self) -> None:
        """Returns once nobody is inside."""
        await self._empty.wait()

    def enter(self, sequences: int) -> Ticket:
        """Places for so many sequences. Raises Overloaded when they would wait beyond the cap, RequestError when they never could
        be held, EngineClosed when the server is not ready, draining, or failed."""
        if self.phase is not Phase.READY:
            self._refused("draining" if self.phase is Phase.DRAINING else "not_ready")
        if self.phase is Phase.FAILED and self.failure is not None:
            raise EngineClosed("a completion was asked for", held="the engine has failed", why=str(self.failure))
        if self.phase is not Phase.READY:
            said = "the server is still starting" if self.phase is Phase.STARTING else "the server is shutting down"
            raise EngineClosed(said, next="try another server, or later")
        if sequences > self.max_reqs + self.batch:
            raise RequestError(
                f"{sequences} completions were asked for at once", held=f"this server holds {self.max_reqs + self.batch} at most",
                next="ask for fewer, in several requests",
            )  # fmt: skip
        self._require_capacity(sequences)
        return Ticket(self, sequences)

    def require_capacity_for_one(self) -> None:
        """Before a body is even read: raises Overloaded when not one sequence more may wait, so that a refusal costs little."""
        if self.phase is Phase.READY:
            self._require_capacity(1)

    def _require_capacity(self, sequences: int) -> None:
        free = max(0, self.batch - (self.open - self.queued))
        if self.queued + sequences > self.max_reqs + free:
            self._refused("queue_full")
            held = f"{self.queued} completions wait, and {self.max_reqs + free} may: {self.max_reqs} (max_num_queued_reqs)"
            raise Overloaded(
                f"the server is at its limit: {sequences} more {'was' if sequences == 1 else 'were'} asked for",
                held=f"{held} and {free} for which the batch has places", next=f"try again in {self.retry_after()} s",
            )  # fmt: skip

    def retry_after(self) -> int:
        """Seconds until a place is likely to be free: what waits, over the rate at which sequences left of late; 1 to 60."""
        if len(self._left) < 2:
            return 1
        rate = len(self._left) / max(self._clock() - self._left[0], 1e-3)
        return min(60, max(1, math.ceil(self.queued / rate)))

    def _count(self, *, open: int = 0, queued: int = 0, tokens: int = 0) -> None:
        self.open += open
        self.queued += queued
        self.queued_tokens += tokens
        if open < 0:
            self._left.extend([self._clock()] * min(-open, _RECENT))
        if self.open:
            self._empty.clear()
        else:
            self._empty.set()


class Ticket:
    """The places of one request. A context: leaving it gives back whatever it still holds."""

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
        """The prompts' lengths, one per sequence. Raises Overloaded when they do not fit beside those that wait."""
        held, asked = self._admission, sum(tokens)
        if held.max_tokens is not None and held.queued_tokens and held.queued_tokens + asked > held.max_tokens:
            held._refused("queue_full")
            raise Overloaded(
                f"a prompt of {asked} tokens was asked for",
                held=f"{held.queued_tokens} tokens are waiting, and {held.max_tokens} may wait (max_num_queued_tokens)",
                next=f"try again in {held.retry_after()} s",
            )
        for sequence, count in enumerate(tokens):
            self._waiting[sequence] = count
        held._count(tokens=asked)

    def started(self, sequence: int) -> None:
        """The sequence has its first token (or has ended without one). May be called again."""
        if sequence in self._waiting:
            self._admission._count(queued=-1, tokens=-self._waiting.pop(sequence))
