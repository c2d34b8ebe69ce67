# SPDX-License-Identifier: Apache-2.0
"""Calls into grammars beside the engine's loop: `GrammarThreads`.

A call takes one token and computes the mask after it: some 10 us, milliseconds at a hard place, and a few tenths of a second with
the worst grammars, within the limits of `engine.grammar`. llguidance releases the GIL meanwhile. The loop and a few threads share
the calls of owners that were quick so far, and a step is held back for them. Other calls have a thread of their own, and nobody
waits for them. An owner whose calls take too long in all gets an error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from phalanx.errors import PhalanxError, RequestError

REQUEST_SECONDS = 2.0
"""Time of all calls of one owner, beyond TOKEN_SECONDS for each."""
TOKEN_SECONDS = 0.01
SLOW_SECONDS = 0.01
"""An owner whose last call took longer is slow, and its next one is not waited for."""
PATIENCE_SECONDS = 0.005
"""How long a step is held back, once the loop has no quick call left to run, for those that run on threads."""
THREADS = 4
SHARED_CALLS = 8
"""From so many calls on, threads help the loop."""


@dataclass(eq=False)
class GrammarCall:
    """One call, for `owner`. Once collected, it has `value` or `error`. spent: seconds of the owner's calls before."""

    owner: Any
    work: Callable[[], Any]
    spent: float = 0.0
    value: Any = None
    error: PhalanxError | None = None
    seconds: float = 0.0

    def run(self) -> None:
        began = time.thread_time()
        try:
            self.value = self.work()
        except PhalanxError as error:
            self.error = error
        except Exception as error:
            self.error = RequestError("the grammar failed", why=repr(error), next="report this as a bug")
        self.seconds = time.thread_time() - began
        if self.spent + self.seconds > REQUEST_SECONDS and self.error is None:
            self.error = RequestError(
                "structured output takes too long to follow", held=f"the budget is {TOKEN_SECONDS:g} s of CPU time a token",
                why="the grammar is ambiguous: the same text has many derivations", next="simplify it",
            )  # fmt: skip


class InlineGrammarCalls:
    """Runs each call at once: for schedules that are simulated."""

    def __init__(self) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._ended: list[GrammarCall] = []

    @property
    def busy(self) -> bool:
        """Calls have not been collected."""
        return bool(self._ended)

    def begin(self, owner: Any, work: Callable[[], Any], *, spent: float = 0.0, quick: bool = True) -> GrammarCall:
        call = GrammarCall(owner, work, spent)
        call.run()
        self._ended.append(call)
        return call

    def collect(self) -> list[GrammarCall]:
        calls, self._ended = self._ended, []
        return calls

    def wait(self) -> None: ...


class GrammarThreads:
    """`begin` calls, `wait` for the quick ones, and `collect` those that have ended. All for one thread; `notify` is called on
    another one when a call has ended for which nobody waited. Quick calls start at the next `wait`."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.notify = notify
        self._queued: deque[GrammarCall] = deque()
        self._ended: deque[GrammarCall] = deque()
        self._open = 0  # calls that have not been collected
        self._helpers = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="slow grammar")
        self._all_ended = threading.Condition()
        self._running = 0  # quick calls on helpers

    @property
    def busy(self) -> bool:
        """Calls run or wait."""
        return self._open > 0

    def begin(self, owner: Any, work: Callable[[], Any], *, spent: float = 0.0, quick: bool = True) -> GrammarCall:
        """Run `work`. spent: CPU seconds of the owner's calls, less TOKEN_SECONDS for each. quick: the last one was."""
        call = GrammarCall(owner, work, spent)
        self._open += 1
        if quick:
            self._queued.append(call)
        else:
            self._slow.submit(self._run_slow, call)
        return call

    def wait(self) -> None:
        """Run the quick calls; those that threads have taken are waited for, PATIENCE_SECONDS at most."""
        for _ in range(min(THREADS, len(self._queued) // SHARED_CALLS)):
            with self._all_ended:
                self._running += 1
            self._helpers.submit(self._help)
        self._run_queued()
        with self._all_ended:
            self._all_ended.wait_for(lambda: not self._running, timeout=PATIENCE_SECONDS)

    def collect(self) -> list[GrammarCall]:
        """The calls that have ended."""
        calls = [self._ended.popleft() for _ in range(len(self._ended))]
        self._open -= len(calls)
        return calls

    def _run_queued(self) -> None:
        while True:
            try:
                call = self._queued.popleft()
            except IndexError:
                return
            call.run()
            self._ended.append(call)

    def _help(self) -> None:
        self._run_queued()
        with self._all_ended:
            self._running -= 1
            self._all_ended.notify()
        self.notify()

    def _run_slow(self, call: GrammarCall) -> None:
        call.run()
        self._ended.append(call)
        self.notify()
