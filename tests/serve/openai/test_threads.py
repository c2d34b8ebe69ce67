# SPDX-License-Identifier: Apache-2.0
"""The limit of `Threads` holds for what threads do, whoever still waits for it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from phalanx.errors import Overloaded
from phalanx.serve.openai.threads import Threads


class Body:
    """Stands for megabytes."""

    def read(self) -> None: ...


def test_clients_that_leave_do_not_raise_the_limit() -> None:
    """One task runs, one waits; both of their clients leave. What runs still counts, and what waited is forgotten."""

    async def run() -> None:
        refused: list[str] = []
        threads, go, began = Threads("tests", 1, max_tasks=2, refused=refused.append), threading.Event(), threading.Event()
        running = asyncio.create_task(threads.run(lambda: (began.set(), go.wait(30))[1]))
        assert await asyncio.to_thread(began.wait, 10)
        body = Body()
        left, waiting = weakref.ref(body), asyncio.create_task(threads.run(body.read))
        del body
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 tasks wait"):
            await threads.run(lambda: None)
        assert refused == ["queue_full"]
        for client in (running, waiting):
            client.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client
        del waiting, client
        await asyncio.sleep(0.05)
        gc.collect()
        assert left() is None
        third = asyncio.create_task(threads.run(lambda: "read"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 tasks wait"):  # the one that runs, and the third
            await threads.run(lambda: None)
        go.set()
        assert await third == "read"
        threads.close()

    asyncio.run(asyncio.wait_for(run(), 60))
