# SPDX-License-Identifier: Apache-2.0
"""`Gate`: how many large bodies are in memory at once. The others stay in their senders' sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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
        self._arriving: dict[asyncio.Timeout, float] = {}  # when each began

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and have it inside. Raises Overloaded if too many wait."""
        if self._free.locked() and self._waiting >= MAX_WAITING:
            self._refused("queue_full")
            raise Overloaded("the queue for large bodies is full", held=f"{self._waiting} requests wait", next="try again in 1 s")
        self._waiting += 1
        try:
            self._limit_arrivals()
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Inside, a body arrives at its place. Raises ApiError 408 where it takes long and others wait."""
        try:
            async with asyncio.timeout(None) as timeout:
                self._arriving[timeout] = asyncio.get_running_loop().time()
                try:
                    if self._waiting:
                        self._limit_arrivals()
                    yield
                finally:
                    del self._arriving[timeout]
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._arrival_seconds:g} s while others waited to send theirs",
                code="request_timeout", headers={"Connection": "close", "Retry-After": "1"},
            ) from None  # fmt: skip

    def _limit_arrivals(self) -> None:
        """Others wait: what arrives has a limited time."""
        for timeout, began in self._arriving.items():
            if timeout.when() is None:
                timeout.reschedule(max(began + self._arrival_seconds, asyncio.get_running_loop().time()))
