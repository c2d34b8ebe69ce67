# SPDX-License-Identifier: Apache-2.0
"""Large bodies come to memory a few at a time, and one that does not arrive lets the others in."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from phalanx.errors import Overloaded
from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.large_bodies import gate as gates
from phalanx.serve.openai.large_bodies.gate import Gate
from tests.support.serve_http_app import MODEL, Scripted, live


def test_places() -> None:
    async def run() -> None:
        gate = Gate(refused=lambda _: None, places=2)
        inside = most = 0

        async def one() -> None:
            nonlocal inside, most
            async with gate.place():
                inside += 1
                most = max(most, inside)
                async with gate.arriving():
                    await asyncio.sleep(0.01)
                inside -= 1

        await asyncio.gather(*(one() for _ in range(7)))
        assert most == 2

    asyncio.run(asyncio.wait_for(run(), 30))


def test_one_that_does_not_arrive_lets_the_next_in() -> None:
    """Only where another waits: a slow sender alone has the time of `body_timeout`."""

    async def run() -> None:
        gate = Gate(refused=lambda _: None, places=1, arrival_seconds=0.2)

        async def slow() -> None:
            async with gate.place(), gate.arriving():
                await asyncio.sleep(3600)

        first = asyncio.create_task(slow())
        await asyncio.sleep(0.5)
        assert not first.done()
        second = asyncio.create_task(slow())
        with pytest.raises(ApiError, match="while others waited") as error:
            await first
        assert error.value.status == 408
        await asyncio.sleep(0.3)
        assert not second.done()
        second.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(gates, "MAX_WAITING", 1)
        refusals: list[str] = []
        gate = Gate(refused=refusals.append, places=1)
        async with gate.place():
            waiting = asyncio.create_task(gate.place().__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                async with gate.place():
                    pass
            waiting.cancel()
        assert refusals == ["queue_full"]
        async with asyncio.timeout(5), gate.place():
            pass

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_time_of_a_body_does_not_run_while_it_waits_for_a_place() -> None:
    body = json.dumps({"model": MODEL, "prompt": [2_000_000], "user": "x" * 10_000_000}).encode()[: 1 << 20]
    with live(Scripted("x"), body_timeout=0.5) as server, server.client() as http:
        server.service.gate = Gate(refused=lambda _: None, places=0)
        server.loop.call_soon_threadsafe(server.loop.call_later, 1.5, server.service.gate._free.release)
        begin = time.monotonic()
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert time.monotonic() - begin >= 1.5
        assert answer.status_code == 400, answer.text
