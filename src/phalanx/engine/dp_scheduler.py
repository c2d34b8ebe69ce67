# SPDX-License-Identifier: Apache-2.0
"""One scheduler for all data-parallel indices. Each has KV blocks, slots and requests of its own, and steps have a part for each.

A request runs on one index from its admission to its end: on that with the fewest tokens to hold and to compute for it, its prefix
cache considered. Until then it waits for all of them. All indices run a step together, since they exchange tokens in every layer:
an index without rows has an empty part, and when none has rows there is no step. The step carries its extent, so that no rank asks
another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.engine.adapters import Adapter, Adapters, Claims
from phalanx.engine.grammar import OpenMatcher, TokenMatcher, no_grammars
from phalanx.engine.grammar_threads import GrammarCall, GrammarThreads, InlineGrammarCalls
from phalanx.engine.messages import (
    AddRequest,
    NextTokens,
    Stats,
    Step,
    StepBatch,
    StepExtent,
    StepResult,
)
from phalanx.engine.request import Request
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.engine.step_scheduler import Messages, StepScheduler
from phalanx.errors import RequestError, StepDiverged


class _SharedCalls(InlineGrammarCalls):
    """The grammar calls of one index: begun with those of the others, and collected for all of them by `DpScheduler`."""

    def __init__(self, calls: GrammarThreads | InlineGrammarCalls) -> None:
        super().__init__()
        self._calls = calls

    def begin(self, owner: Any, work: Callable[[], Any], *, spent: float = 0.0, quick: bool = True) -> GrammarCall:
        return self._calls.begin(owner, work, spent=spent, quick=quick)


@dataclass
class SchedulerLoad:
    """Tokens of a scheduler's requests. running: of those that run; queued: of those that it has not admitted; begun: that the next
    steps compute for all of them."""

    running: int
    begun: int
    queued: int


class DpIndex(Scheduler):
    """The scheduler of one index, which tells what a request would be to it."""

    def load(self) -> SchedulerLoad:
        """What the requests that it has are to it."""
        running = sum(len(request.tokens) + request.pending for request in self.running)
        queued = [len(request.tokens) for request in self.waiting]
        computed = sum((r.loads and r.to_compute) or count for r, count in zip(self.waiting, queued, strict=True))
        return SchedulerLoad(running, self._begun_tokens() + computed, sum(queued))

    @property
    def may_begin(self) -> bool:
        """Whether a request that comes now would wait for no other: none waits, or one alone, for its prefix from host memory."""
        return all(request.loads for request in self.waiting) and len(self.waiting) < 2

    def load_with(self, request: Request, load: SchedulerLoad) -> int | None:
        """Tokens that this scheduler would have to hold and to compute if a request came now: those of its other requests (load),
        and those of the prompt that it has not cached. None if the request would have to wait for a slot, for blocks, or for a
        step that is not full."""
        busy = bool(self.running or self.waiting)
        if busy and (len(self.waiting) >= len(self._slots) or load.begun >= self.options.max_num_tokens):
            return None
        hit = self.kv.prefix_hit(request)
        shared = self.kv.positions_of(hit)
        others = self.kv.blocks_for(load.queued) + len(self.waiting) + len(self.running)  # of each group
        own = self.kv.peak_new_blocks(request, shared) + self.kv.unreferenced(hit)
        if busy and others * self.kv.groups + own > self.pool.available:
            return None
        return load.running + load.queued + len(request.tokens) - shared

    def _begun_tokens(self) -> int:
        """Tokens of the running requests that the next steps compute: what is left of their prompts, or one."""
        half = self.options.max_num_tokens // 2  # a long prompt leaves the other half to much shorter ones
        return sum(min(max(len(r.tokens) + r.pending - r.submitted, 1), half) for r in self.running)


class DpScheduler(StepScheduler[list[int | None]]):
    """A `StepScheduler` of several indices, each with a `Scheduler` of its own. options: the limits of one index. Of a step in
    flight it keeps the number of each index's own step; None: the index has no rows."""

    index_type = DpIndex
    """Of each index."""

    def __init__(
        self, options: SchedulerOptions, indices: int, open_matcher: OpenMatcher = no_grammars, *,
        grammar_calls: GrammarThreads | InlineGrammarCalls | None = None, adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options, open_matcher, grammar_calls, num_blocks=options.num_blocks * indices, adapters=adapters)
        seeds = random.Random(options.seed)
        self.indices = [
            self.index_type(
                options, open_matcher, grammar_calls=_SharedCalls(self.grammar_calls), seeds=seeds, adapters=self.adapters
            ) for _ in range(indices)
        ]  # fmt: skip
        self.parts = self.indices
        for index in self.indices:
            index.verified = lambda drafts, accepted: self.verified(drafts, accepted)
        self._placed: dict[str, DpIndex] = {}

    # ---- requests come and go ----------------------------------------------------------------------------------------

    def add(self, add: AddRequest, matcher: TokenMatcher | None = None, adapter: Adapter | None = None) -> None:
        """As `StepScheduler`."""
        if add.request_id in self._requests:
            raise RequestError(f"request id {add.request_id!r} is in use", next="give each request its own id")
        request = self.indices[0].request_of(add, matcher, adapter)
        self._requests[request.id] = request
        self._wait(request)

    def abort(self, request_id: str) -> None:
        """As `StepScheduler`."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request_id in self._placed:
            self._placed.pop(request_id).abort(request_id)
        else:
            request.ended = True
            self._stop_waiting(request)

    @property
    def running(self) -> list[Request]:
        """The running requests of all indices."""
        return [request for index in self.indices for request in index.running]

    def stats(self) -> Stats:
        """The counters and gauges of all indices together. The same object each time."""
        stats, parts = self.counters, [index.stats() for index in self.indices]
        for name in _SUMMED:
            setattr(stats, name, sum(getattr(part, name) for part in parts))
        stats.accepted_tokens = [sum(counts) for counts in zip(*(part.accepted_tokens for part in parts), strict=True)]
        stats.dp_running = [part.running for part in parts]
        stats.dp_blocks_referenced = [part.blocks_referenced for part in parts]
        stats.waiting += len(self.waiting)
        return stats

    def check(self) -> None:
        """As `StepScheduler`, of each index."""
        for index in self.indices:
            index.check()

    # ---- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self, now: int = 0) -> Step | None:
        """The next step of all indices; None when `depth` steps are in flight, or no request of any index can go on."""
        if len(self._in_flight) >= self.options.depth or not self._requests:
            return None
        self._place_waiting()
        drafts = self.choose_drafts(max(1, *(len(index.running) for index in self.indices))) if self.options.max_drafts else 0
        for index in self.indices:
            index.choose_drafts, index.times = (lambda _: drafts), self.times
        steps = [index.schedule(now) for index in self.indices]
        if not any(steps):
            return None
        return self._close(steps)

    def empty_step(self) -> Step | None:
        """As `StepScheduler`."""
        if len(self._in_flight) >= self.options.depth:
            return None
        return self._close([None] * len(self.indices))

    def _close(self, steps: list[Step | None]) -> Step:
        batches = [StepBatch() if step is None else step.batches[0] for step in steps]
        self.counters.steps += 1
        self._in_flight.append((self.counters.steps, [None if step is None else step.number for step in steps]))
        before = [work for step in steps if step is not None for work in step.before]
        return Step(self.counters.steps, batches, StepExtent.of(batches), before)

    def _place_waiting(self) -> None:
        """Give waiting requests, in order, to the indices that can begin with them. An index that has not admitted all that it was
        given gets no more: another may have room before it."""
        ready = [(index, index.load()) for index in self.indices if index.may_begin] if self.waiting else []
        claims = Claims(self.adapters.slots)
        while ready and (request := next((each for each in self.waiting if claims.allow(each.adapter)), None)) is not None:
            tokens = [(index.load_with(request, load), number) for number, (index, load) in enumerate(ready)]
            fitting = [(count, number) for count, number in tokens if count is not None]
            if not fitting:
                return
            index, load = ready[min(fitting)[1]]
            self.waiting.remove(request)
            index.enqueue(request)
            claims.admit(request.adapter)
            load.queued += len(request.tokens)
            load.begun += len(request.tokens)
            self._placed[request.id] = index

    # ---- results -----------------------------------------------------------------------------------------------------

    def process_result(self, result: StepResult) -> Messages:
        """As `StepScheduler`."""
        number, numbers = self._in_flight[0] if self._in_flight else (None, [])
        empty = [own is None for own in numbers]
        if number != result.number or len(result.batches) != len(numbers) or any(
            rows for rows, without in zip(result.batches, empty, strict=True) if without
        ):  # fmt: skip
            raise StepDiverged(
                f"the result of step {result.number} came out of order, with {[len(batch) for batch in result.batches]} rows",
                held=f"the oldest step in flight is {number}; in it {empty.count(False)} of {len(self.indices)} indices have rows",
            )
        self._in_flight.popleft()
        messages: Messages = []
        for index, own, rows in zip(self.indices, numbers, result.batches, strict=True):
            if own is not None:
                messages += index.process_result(StepResult(own, [rows]))
        self._forget_ended(messages)
        return messages + self.process_grammar_calls()

    def process_grammar_calls(self) -> Messages:
        """As `StepScheduler`."""
        calls: dict[int, list[GrammarCall]] = {}
        for call in self.grammar_calls.collect():
            if call.owner.id in self._placed:  # else it was aborted
                calls.setdefault(self.indices.index(self._placed[call.owner.id]), []).append(call)
        messages: Messages = []
        for index, its_calls in calls.items():
            messages += self.indices[index].take_grammar_calls(its_calls)
        self._forget_ended(messages)
        return messages

    def _forget_ended(self, messages: Messages) -> None:
        for message in messages:
            if not isinstance(message, NextTokens) and self._requests[message.request_id].ended:
                del self._requests[message.request_id], self._placed[message.request_id]


_SUMMED = (
    "running", "waiting", "blocks_referenced", "preemptions", "prefix_queries", "prefix_hits", "prompt_tokens",
    "generation_tokens", "drafts", "draft_tokens", "nonfinite_requests", "host_total", "host_used", "host_hits", "host_saved",
    "host_loaded", "host_dropped", "host_states", "host_states_used",
)  # fmt: skip
