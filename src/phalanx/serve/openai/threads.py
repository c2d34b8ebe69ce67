# SPDX-License-Identifier: Apache-2.0
"""`Threads`: a few threads for work that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from phalanx.errors import Overloaded

T = TypeVar("T")


class Threads:
    """A few threads, and a limit of tasks that wait for them."""

    def __init__(self, name: str, count: int, *, max_tasks: int, refused: Callable[[str], None]) -> None:
        self._name, self._max_tasks, self._tasks, self._refused = name, max_tasks, 0, refused
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, task: Callable[[], T]) -> T:
        """Run a task on a thread. Raises Overloaded if too many tasks wait. One that a thread has begun counts until its end, also
        if nobody waits for it any more; one that is cancelled before leaves nothing of it in memory."""
        if self._tasks >= self._max_tasks:
            self._refused("queue_full")
            raise Overloaded(
                f"the queue of {self._name} threads is full", held=f"{self._tasks} tasks wait", next="try again in 1 s"
            )
        loop, tasks = asyncio.get_running_loop(), [task]
        del task  # the thread takes it out of the list

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._end_one)

        self._tasks += 1
        future = self._pool.submit(lambda: tasks.pop()())
        future.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            tasks.clear()
            raise

    def _end_one(self) -> None:
        self._tasks -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
