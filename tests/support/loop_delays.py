# SPDX-License-Identifier: Apache-2.0
"""How long the event loop of a server, and the loop of an engine, hold up every stream for a reason of their own.

On a machine that others load, a loop is late because it waits for a core, whatever the server does. The kernel counts that time for
each thread (`/proc/thread-self/schedstat`), so it is taken off. What is left is the server's: its own work, and waiting for another
of its threads that holds the interpreter lock. Both append lines "moment delay", seconds by the monotonic clock, to a file.
"""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

from phalanx.engine.fake import FakeExecutor

PERIOD_SECONDS = 0.005
RECORDED_SECONDS = 0.02
SCHEDSTAT = Path("/proc/thread-self/schedstat")


def waited() -> float:
    """Seconds for which this thread has waited for a core."""
    return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9


async def watch_loop(path: Path) -> None:
    """Record the delays of the running event loop, and in the file `collections` beside them the full collections of the garbage
    collector. Never returns."""
    began = 0.0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if info["generation"] == 2 and phase == "start":
            began = time.monotonic()
        elif info["generation"] == 2:
            with (path.parent / "collections").open("a", encoding="ascii") as file:
                file.write(f"{time.monotonic()} {time.monotonic() - began}\n")

    gc.callbacks.append(on_collection)
    while True:
        begin, before = time.monotonic(), waited()
        await asyncio.sleep(PERIOD_SECONDS)
        end = time.monotonic()
        _record(path, end, end - begin - PERIOD_SECONDS - (waited() - before))


def delays_between(path: Path, begin: float, end: float) -> list[float]:
    """The delays that were recorded between two moments."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()] if path.exists() else []
    return [float(delay) for moment, delay in lines if begin <= float(moment) <= end]


def _record(path: Path, moment: float, delay: float) -> None:
    if delay > RECORDED_SECONDS:
        with path.open("a", encoding="ascii") as file:
            file.write(f"{moment} {delay}\n")


class TimedFakeExecutor(FakeExecutor):
    """The fake executor that records the turns of the engine's loop, by the processor time of its thread: it waits in each turn.

    settings: those of `FakeExecutor`, and "turns", the path of the file.
    """

    _turns: Path
    _begin: float | None = None

    @classmethod
    def from_options(cls, options: Any, shape: Any, settings: dict[str, Any]) -> FakeExecutor:
        executor = super().from_options(options, shape, settings)
        assert isinstance(executor, cls)
        executor._turns = Path(settings["turns"])
        return executor

    def waitables(self) -> list[Any]:
        """Called once in each turn."""
        now = time.thread_time()
        if self._begin is not None:
            _record(self._turns, time.monotonic(), now - self._begin)
        self._begin = now
        return super().waitables()
