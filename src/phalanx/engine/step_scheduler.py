# SPDX-License-Identifier: Apache-2.0
"""`StepScheduler`: what the engine's loop needs of a scheduler, whether its steps have one batch (`Scheduler`) or one for each
data-parallel index (`DpScheduler`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

from phalanx.engine.grammar import OpenMatcher, TokenMatcher
from phalanx.engine.grammar_threads import GrammarThreads, InlineGrammarCalls
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import AddRequest, RequestRejected, RequestUpdate, Stats, Step, StepResult
from phalanx.engine.request import Request

Messages = list[RequestUpdate | RequestRejected]
StepRows = TypeVar("StepRows")


class StepScheduler(ABC, Generic[StepRows]):
    """Decides what each step computes. Each scheduled step must be submitted, and its result processed, in order.

    options: the limits of one batch. waiting: requests without a slot. StepRows: what a scheduler keeps of a step in flight.
    """

    def __init__(
        self, options: SchedulerOptions, open_matcher: OpenMatcher, grammar_calls: GrammarThreads | InlineGrammarCalls | None, *,
        num_blocks: int,
    ) -> None:  # fmt: skip
        """num_blocks: KV blocks of all batches."""
        self.options, self.open_matcher = options, open_matcher
        self.grammar_calls = grammar_calls or InlineGrammarCalls()
        self.waiting: deque[Request] = deque()
        self.counters = Stats(blocks_total=num_blocks)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[int, StepRows]] = deque()  # the number of each step, the oldest first

    @abstractmethod
    def add(self, add: AddRequest, matcher: TokenMatcher | None = None) -> None:
        """Queue a request. matcher: its grammar's, opened here where there is none. Raises PromptTooLong, CapacityError or
        RequestError: then nothing has changed."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is. An unknown one is no error: it may just have ended."""

    @abstractmethod
    def schedule(self) -> Step | None:
        """The next step; None when `depth` steps are in flight, or no request can go on before a result is processed."""

    @abstractmethod
    def process_result(self, result: StepResult) -> Messages:
        """Take in the result of the oldest step in flight. Returns one RequestUpdate per request with a new token, RequestRejected
        where a grammar failed.

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

    @property
    def open_ids(self) -> list[str]:
        """The requests that have not ended, in order of arrival."""
        return list(self._requests)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        return not self._requests and not self._in_flight
