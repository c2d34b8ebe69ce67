# SPDX-License-Identifier: Apache-2.0
"""`StepScheduler`: what the engine's loop needs of a scheduler, whether its steps have one batch (`Scheduler`) or one for each
data-parallel index (`DpScheduler`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from phalanx.engine.adapters import Adapter, Adapters
from phalanx.engine.grammar import OpenMatcher, TokenMatcher
from phalanx.engine.grammar_threads import GrammarThreads, InlineGrammarCalls
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import AddRequest, NextTokens, RequestRejected, RequestUpdate, Stats, Step, StepResult
from phalanx.engine.request import Request
from phalanx.engine.step_draft import StepPace
from phalanx.engine.step_times import StepTimes

if TYPE_CHECKING:
    from phalanx.engine.scheduler import Scheduler


def _ignore(drafts: int, accepted: int) -> None: ...


Messages = list[RequestUpdate | NextTokens | RequestRejected]
StepRows = TypeVar("StepRows")


class StepScheduler(ABC, Generic[StepRows]):
    """Decides what each step computes. Each scheduled step must be submitted, and its result processed, in order.

    options: the limits of one batch. waiting: requests without a slot. StepRows: what a scheduler keeps of a step in flight.
    """

    def __init__(
        self, options: SchedulerOptions, open_matcher: OpenMatcher, grammar_calls: GrammarThreads | InlineGrammarCalls | None, *,
        num_blocks: int, adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        """num_blocks: KV blocks of all batches. adapters: that requests may name."""
        self.adapters = adapters or Adapters()
        self.options, self.open_matcher = options, open_matcher
        self.grammar_calls = grammar_calls or InlineGrammarCalls()
        self.choose_drafts: Callable[[int], int] = lambda _: options.max_drafts
        """How many drafts each of so many decode rows of a step verifies, 0 to max_drafts. With several batches one number for all,
        by the rows of the largest."""
        self.times = StepTimes()
        """Of the steps that it makes, as the loop measures them. May be replaced before the first."""
        self.pace: StepPace | None = None
        """Of the last step that was bounded."""
        self.verified: Callable[[int, int], None] = _ignore
        """Told, of each row that verified drafts, how many there were and how many were accepted."""
        self.waiting: deque[Request] = deque()
        self.held_requests: deque[Request] = deque()
        """Requests that no step has begun, while `hold` is in force."""
        self.parts: Sequence[Scheduler] = ()
        """Those with blocks and slots: this one, or that of each index."""
        self._holds = False
        self.counters = Stats(blocks_total=num_blocks, accepted_tokens=[0] * options.max_drafts)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[int, StepRows]] = deque()  # the number of each step, the oldest first

    @abstractmethod
    def add(self, add: AddRequest, matcher: TokenMatcher | None = None, adapter: Adapter | None = None) -> None:
        """Queue a request. matcher: its grammar's, opened here where there is none. adapter: that its name stood for when it came;
        without it the name is looked up here. Raises PromptTooLong, CapacityError or RequestError: then nothing has changed."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is. An unknown one is no error: it may just have ended."""

    @abstractmethod
    def schedule(self, now: int = 0) -> Step | None:
        """The next step; None when `depth` steps are in flight, or no request can go on before a result is processed. now: in
        microseconds of the monotonic clock, for the updates of requests that it admits."""

    @abstractmethod
    def process_result(self, result: StepResult) -> Messages:
        """Take in the result of the oldest step in flight. Returns a RequestUpdate or a part of NextTokens for each request with a
        new token, RequestRejected where a grammar failed.

        Raises StepDiverged when the result is not that step's.
        """

    @abstractmethod
    def process_grammar_calls(self) -> Messages:
        """Take in the tokens that grammars have accepted meanwhile; messages as from `process_result`."""

    @abstractmethod
    def stats(self) -> Stats:
        """The counters, with the gauges of now. The same object each time."""

    @abstractmethod
    def check(self) -> None:
        """Verify the accounting of blocks and slots; for idle moments. Raises EngineError."""

    @abstractmethod
    def empty_step(self) -> Step | None:
        """A step without rows, for what ranks do beside requests; None when `depth` steps are in flight."""

    def stop_running(self) -> None:
        """Stop every running request: it will compute its tokens again. No step is in flight."""
        for part in self.parts:
            while part.running:
                part.preempt(part.running[-1])

    def forget_prefixes(self) -> None:
        """Share no block with what comes later: the KV cache has been discarded, or is of other weights."""
        for part in self.parts:
            part.kv.forget_prefixes()

    def hold(self) -> None:
        """From now on, until `resume`, requests that no step has begun wait; the others go on."""
        self._holds = True
        self.held_requests.extend(request for request in self.waiting if not request.was_admitted)
        self.waiting = deque(request for request in self.waiting if request.was_admitted)

    def resume(self) -> None:
        """Let the held requests go on, in order."""
        self._holds = False
        self.waiting.extend(self.held_requests)
        self.held_requests.clear()

    def _wait(self, request: Request) -> None:
        """Queue a request that is new."""
        (self.held_requests if self._holds else self.waiting).append(request)

    def _stop_waiting(self, request: Request) -> None:
        (self.held_requests if request in self.held_requests else self.waiting).remove(request)

    @property
    def drained(self) -> bool:
        """Whether no request is left but those that are held, and no step in flight."""
        return len(self._requests) == len(self.held_requests) and not self._in_flight

    @property
    def begun_ids(self) -> list[str]:
        """The requests that are not held."""
        others = {request.id for request in self.held_requests}
        return [id for id in self._requests if id not in others]

    @property
    def open_ids(self) -> list[str]:
        """The requests that have not ended, in order of arrival."""
        return list(self._requests)

    def count_adapters(self, stats: Stats) -> None:
        """Write which adapters are in slots, and how many requests of each run and wait."""
        counts: tuple[dict[str, int], dict[str, int]] = {}, {}
        for request in self._requests.values():
            if request.adapter is not None:
                of_state = counts[request.slot < 0]
                of_state[request.adapter.name] = of_state.get(request.adapter.name, 0) + 1
        stats.adapters_running, stats.adapters_waiting = counts
        occupants = self.adapters.slots.occupants
        stats.adapters_in_slots, stats.max_adapters = sorted({each.name for each in occupants if each is not None}), len(occupants)

    def open_adapters(self) -> list[Adapter | None]:
        """The adapter of each request that has not ended."""
        return [request.adapter for request in self._requests.values()]

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        return not self._requests and not self._in_flight
