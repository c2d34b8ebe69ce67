# SPDX-License-Identifier: Apache-2.0
"""An `EngineClient` and its event loop on a thread of its own, for plain calls from any thread: `BackgroundEngineClient`."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from phalanx.config import EngineOptions
from phalanx.errors import EngineClosed
from phalanx.serve.client import EngineClient, MakeVocabulary
from phalanx.serve.replicas import start_engine

Result = TypeVar("Result")
_CLEANUP_SECONDS = 15.0
"""Time that cancelled work may take to release what it holds."""


class BackgroundEngineClient:
    """An `EngineClient` and its event loop on a thread. Has no reference to the LLM, so that the LLM can be garbage-collected."""

    def __init__(self, options: EngineOptions, vocabulary: MakeVocabulary | None = None) -> None:
        self._options, self._vocabulary = options, vocabulary
        self._client: EngineClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="phalanx LLM", daemon=True)
        self._lock = threading.Lock()
        self._stopped = False
        self._ended_by_own_thread = False
        self._pid = os.getpid()
        self._thread.start()

    @property
    def client(self) -> EngineClient:
        if os.getpid() != self._pid:
            raise EngineClosed(
                f"this LLM belongs to process {self._pid}", why="a forked process cannot use it", next="create another LLM here"
            )
        if self._client is None or self._stopped:
            raise EngineClosed("this LLM was shut down", next="create another LLM")
        return self._client

    def start(self) -> EngineClient:
        try:
            self._client = self.run(start_engine(self._options, self._vocabulary))
        except BaseException:
            self.stop()
            raise
        return self._client

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work on the engine's loop and return its result. An interrupt of this thread cancels the work before it raises."""
        done = threading.Event()
        tasks: list[asyncio.Task[Result]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: done.set())

        self._loop.call_soon_threadsafe(begin)
        try:
            done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            done.wait(_CLEANUP_SECONDS)
            raise
        return tasks[0].result()

    def begin(self, work: Coroutine[Any, Any, None]) -> Callable[[], None]:
        """Start work on the engine's loop. Returns a function that cancels it; cancelling finished work does nothing."""
        tasks: list[asyncio.Task[None]] = []
        self._loop.call_soon_threadsafe(lambda: tasks.append(self._loop.create_task(work)))

        def cancel() -> None:
            if not self._stopped:
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        return cancel

    def _run_loop(self) -> None:
        self._loop.run_forever()
        if self._ended_by_own_thread:  # nobody else will release the sockets and the loop
            try:
                if self._client is not None:
                    self._loop.run_until_complete(self._client.close(timeout=0))
            finally:
                self._loop.close()

    def stop(self) -> None:
        """Close the client and end the thread. Safe from any thread, and while the interpreter exits."""
        if os.getpid() != self._pid:
            return  # a forked process does not have the thread, and does not own the engine
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        if threading.current_thread() is self._thread:  # the garbage collector ran on this thread
            if self._client is not None:
                self._client.kill()
            self._ended_by_own_thread = True
            self._loop.stop()
            return
        try:
            if self._client is not None:
                self.run(self._client.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLEANUP_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
