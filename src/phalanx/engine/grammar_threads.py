# SPDX-License-Identifier: Apache-2.0
"""Calls into grammars, off the engine's loop: `GrammarThreads`.

A mask or an accept is C++ that cannot be interrupted, and its cost depends on the grammar and the text: with an ambiguous grammar
it may double with each token. xgrammar releases the GIL meanwhile. A call that takes long keeps its thread, and another thread
takes its place, so nobody waits behind it. A call beyond its budget of CPU time is abandoned: its request gets an error, and the
rest of the call runs at the lowest priority until it returns, with the memory of its grammar. So both are limited: while
MAX_SLOW_CALLS are slow or abandoned, a request whose last call was slow waits, and while so many are abandoned, it and new
constrained requests are refused. Requests that were quick so far go on until there are QUICK_FACTOR times as many.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import Overloaded, PhalanxError, RequestError

CALL_SECONDS = 0.25
"""CPU time of one call: one token's accept and the mask after it. An ordinary one takes less than a millisecond."""
OPEN_SECONDS = 10.0
"""CPU time to read a compiled grammar, which may have 32 MiB, and to make its first mask."""
REQUEST_SECONDS = 2.0
"""CPU time of all calls of one request, beyond TOKEN_SECONDS for each token."""
TOKEN_SECONDS = 0.01
SLOW_SECONDS = 0.01
"""Beyond this another thread takes the place of the one that is busy, and the next call of this request is not waited for."""
SLOW_NICE = 4
"""Steps of priority that a call loses when it has taken SLOW_SECONDS of CPU time. One that waits for another's reading of the same
grammar keeps its own. A call that returns takes the GIL, for which the loop then waits until that thread has got a core: with 10
steps, 0.1 s on full cores."""
PATIENCE_SECONDS = 0.005
"""How long a step is held back for the calls of requests that were quick so far."""
THREADS = 2
MAX_SLOW_CALLS = 8
"""Calls that are slow or abandoned, beyond which no more begin for requests that are likely to be slow."""
QUICK_FACTOR = 4
"""For requests that were quick so far the limit is so many times as high: they are hardly the cause."""
_IDLE, _BUSY = "grammar", "grammar call"


@dataclass(eq=False)
class GrammarCall:
    """One call, for `owner`. Once collected, it has `value` or `error`."""

    owner: Any
    work: Callable[[], Any]
    budget: float  # seconds of CPU time
    quick: bool  # the owner's call before was
    value: Any = None
    error: PhalanxError | None = None
    seconds: float = 0.0  # CPU time
    thread: threading.Thread | None = None
    clock: int = -1  # of the CPU time of its thread
    began: float = 0.0  # on that clock
    began_at: float = 0.0  # time.monotonic()
    slow: bool = False
    lowered: bool = False  # the priority of its thread
    ended: bool = False


class InlineGrammarCalls:
    """Runs each call at once, without a budget: for schedules that are simulated."""

    busy = False
    abandoned = 0

    def __init__(self) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._ended: list[GrammarCall] = []

    def begin(self, owner: Any, work: Callable[[], Any], *, spent: float = 0.0, quick: bool = True) -> GrammarCall:
        call = GrammarCall(owner, work, REQUEST_SECONDS - spent, quick)
        _run(call)
        self._ended.append(call)
        return call

    def collect(self) -> list[GrammarCall]:
        calls, self._ended = self._ended, []
        return calls

    def wait(self) -> None: ...


@dataclass
class _State:
    queue: deque[GrammarCall] = field(default_factory=deque)
    busy: list[GrammarCall] = field(default_factory=list)
    ended: list[GrammarCall] = field(default_factory=list)
    threads: int = 0  # without those whose call is slow
    abandoned: int = 0  # calls that have not returned yet

    def next_call(self) -> GrammarCall | None:
        """The first call of the queue that may begin now."""
        crowd = self.abandoned + sum(call.slow or not call.quick for call in self.busy)
        return next((call for call in self.queue if crowd < _limit(call)), None)


class GrammarThreads:
    """`begin` calls, `wait` for the quick ones, and `collect` those that have ended or are beyond their budget. All for one thread;
    `notify` is called on another one when there is something to collect and nobody waits. Calls start at the next `wait` or
    `collect`."""

    def __init__(self, notify: Callable[[], None] = lambda: None, *, call_seconds: float = CALL_SECONDS) -> None:
        self.notify = notify
        self._call_seconds = call_seconds
        self._state = _State()
        self._lock = threading.Lock()
        self._queued, self._quick_ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._waiting = False  # inside `wait`

    @property
    def busy(self) -> bool:
        """Calls run or wait, so `collect` is to be called again within SLOW_SECONDS."""
        return bool(self._state.busy or self._state.queue)

    @property
    def abandoned(self) -> int:
        """Calls beyond their budget that have not returned."""
        return self._state.abandoned

    def begin(self, owner: Any, work: Callable[[], Any], *, spent: float = 0.0, quick: bool = True) -> GrammarCall:
        """Run `work` on a thread. spent: CPU seconds of the owner's calls, less TOKEN_SECONDS for each. quick: the last one was."""
        call = GrammarCall(owner, work, min(self._call_seconds, REQUEST_SECONDS - spent), quick)
        with self._lock:
            self._state.queue.append(call)
        return call

    def wait(self) -> None:
        """Wait until the calls of quick owners have ended, PATIENCE_SECONDS at most."""
        with self._lock:
            self._start_calls()
            if self._quick_calls():
                self._waiting = True
                self._quick_ended.wait_for(lambda: not self._quick_calls(), timeout=PATIENCE_SECONDS)
                self._waiting = False

    def _quick_calls(self) -> bool:
        state = self._state
        return any(call.quick and not call.slow for call in (*state.queue, *state.busy))

    def collect(self) -> list[GrammarCall]:
        """The calls that have ended, and those that are beyond their budget or are refused: with an error, and never again."""
        state = self._state
        with self._lock:
            for call in list(state.busy):
                seconds = time.clock_gettime(call.clock) - call.began
                if not call.slow and time.monotonic() - call.began_at > SLOW_SECONDS:
                    call.slow = True
                    state.threads -= 1
                if not call.lowered and seconds > SLOW_SECONDS:
                    call.lowered = True
                    _lower_priority(call, SLOW_NICE)
                if seconds > call.budget:
                    call.seconds, call.error, call.ended = seconds, _beyond_budget(call, self._call_seconds), True
                    state.busy.remove(call)
                    state.ended.append(call)
                    state.abandoned += 1
                    _lower_priority(call, 19)
            for call in [call for call in state.queue if state.abandoned >= _limit(call)]:
                state.queue.remove(call)
                call.error, call.ended = overloaded(state.abandoned), True
                state.ended.append(call)
            self._start_calls()
            calls, state.ended = state.ended, []
        return calls

    def _start_calls(self) -> None:
        """Wake the threads for what is queued; not at each `begin`, because threads would then take the GIL from the loop."""
        if not self._state.queue:
            return
        while self._state.threads < min(THREADS, len(self._state.queue) + sum(not call.slow for call in self._state.busy)):
            self._state.threads += 1
            threading.Thread(target=self._serve, name=_IDLE, daemon=True).start()
        self._queued.notify(len(self._state.queue))

    def _serve(self) -> None:
        state, thread = self._state, threading.current_thread()
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        while True:
            with self._lock:
                call = self._queued.wait_for(state.next_call)
                assert call is not None  # wait_for has no timeout
                state.queue.remove(call)
                call.thread, call.clock, call.began, call.began_at = thread, clock, time.clock_gettime(clock), time.monotonic()
                state.busy.append(call)
            thread.name = _BUSY
            value, error = _outcome(call.work)
            thread.name = _IDLE
            with self._lock:
                if not call.ended:
                    call.value, call.error, call.ended = value, error, True
                    call.seconds = time.clock_gettime(clock) - call.began
                    state.busy.remove(call)
                    state.ended.append(call)
                else:
                    state.abandoned -= 1
                slow, waiting = call.slow, self._waiting
                if waiting and not self._quick_calls():
                    self._quick_ended.notify()
            if not waiting:
                self.notify()
            if slow:  # another one has its place, and its priority may be low
                return


def calls_run() -> bool:
    """Whether a thread is inside a call. Python's finalization would then abort the process: end it by os._exit."""
    return any(thread.name == _BUSY for thread in threading.enumerate())


def require_room(*calls: GrammarThreads | InlineGrammarCalls) -> None:
    """Raise Overloaded where no constrained request may begin, because too many calls were abandoned and have not returned."""
    abandoned = sum(each.abandoned for each in calls)
    if abandoned >= MAX_SLOW_CALLS:
        raise overloaded(abandoned)


def overloaded(abandoned: int) -> Overloaded:
    return Overloaded(
        "the engine is busy with grammars that take too long to follow", held=f"{abandoned} calls beyond their budget still run",
        why="a call into a grammar cannot be interrupted", next="try again later, or without structured output",
    )  # fmt: skip


def _limit(call: GrammarCall) -> int:
    """Of calls that are slow or abandoned, for this one to begin."""
    return MAX_SLOW_CALLS * (QUICK_FACTOR if call.quick else 1)


def _run(call: GrammarCall) -> None:
    call.value, call.error = _outcome(call.work)
    call.ended = True


def _outcome(work: Callable[[], Any]) -> tuple[Any, PhalanxError | None]:
    try:
        return work(), None
    except PhalanxError as error:
        return None, error
    except Exception as error:
        return None, RequestError("the grammar failed", why=repr(error), next="report this as a bug")


def _beyond_budget(call: GrammarCall, call_seconds: float) -> RequestError:
    limit = (
        f"{call_seconds:g} s of CPU time for one token"
        if call.budget == call_seconds
        else f"{TOKEN_SECONDS:g} s of CPU time a token"
    )
    return RequestError(
        "structured output takes too long to follow", held=f"the budget is {limit}",
        why="the grammar is ambiguous: the same text has so many derivations that each token costs more than the one before",
        next="write it without repeats within repeats: `a{0,400}` instead of `(a{0,20}){0,20}`",
    )  # fmt: skip


def _lower_priority(call: GrammarCall, steps: int) -> None:
    """So many steps below the thread that asks for it. On Linux the priority is that of a thread."""
    if call.thread is not None and call.thread.native_id is not None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, call.thread.native_id, min(os.getpriority(os.PRIO_PROCESS, 0) + steps, 19))
