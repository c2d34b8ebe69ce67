# SPDX-License-Identifier: Apache-2.0
"""`Gate`: how many large bodies are in memory at once. The others stay in their senders' sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from phalanx.errors import Overloaded
from phalanx.serve.openai.api_errors import ApiError

PLACES = 4
"""Large bodies that are received, read or waited for at once, each of up to 8 MiB."""
MAX_WAITING = 64
"""Requests that wait for a place. Each has sent the head of its body at most."""
ARRIVAL_SECONDS = 5.0
"""Time in which a body must arrive while others wait for its place."""


class Gate:
    """The places of one server. refused: counts a refusal."""

    def __init__(self, *, refused: Callable[[str], None], places: int = PLACES, arrival_seconds: float = ARRIVAL_SECONDS) -> None:
        self._refused, self._arrival_seconds = refused, arrival_seconds
        self._free = asyncio.Semaphore(places)
        self._waiting = 0
        self._arriving: set[_Arrival] = set()

    def request(self) -> Place:
        """A context with a place for the body of a request. It is not taken yet."""
        return Place(self)

    async def _take(self) -> None:
        if self._free.locked() and self._waiting >= MAX_WAITING:
            self._refused("queue_full")
            raise Overloaded("the queue for large bodies is full", held=f"{self._waiting} requests wait", next="try again in 1 s")
        self._waiting += 1
        try:
            self._hurry()
            await self._free.acquire()
        finally:
            self._waiting -= 1

    def _hurry(self) -> None:
        """Others wait: what arrives has a limited time."""
        for arrival in self._arriving:
            arrival.limit(self._arrival_seconds)


class Place:
    """That of one request, until its context ends. taken: whether its body is counted."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self.taken = gate, False

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.taken:
            self._gate._free.release()

    async def take(self) -> None:
        """Wait until there is a place. Raises Overloaded if too many wait."""
        if not self.taken:
            await self._gate._take()
            self.taken = True

    def arriving(self) -> _Arrival:
        """A context in which the body arrives at a place that is taken. Raises ApiError 408 where it takes long and others wait."""
        return _Arrival(self._gate)


class _Arrival:
    def __init__(self, gate: Gate) -> None:
        self._gate, self._began = gate, asyncio.get_running_loop().time()
        self._timeout = asyncio.timeout(None)

    def limit(self, seconds: float) -> None:
        if self._timeout.when() is None:
            self._timeout.reschedule(max(self._began + seconds, asyncio.get_running_loop().time()))

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._gate._arriving.add(self)
        if self._gate._waiting:
            self.limit(self._gate._arrival_seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._gate._arriving.discard(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._gate._arrival_seconds:g} s while others waited to send theirs",
                code="request_timeout", headers={"Connection": "close", "Retry-After": "1"},
            ) from None  # fmt: skip
