# SPDX-License-Identifier: Apache-2.0
"""The engine's own scheduler, prefix cache included, on the cost model's clock: one replica or many, without a GPU.

A step is submitted as soon as the scheduler gives it, up to its depth, and passes the stages one after the other, each stage one
step at a time; its tokens are known when the last stage has ended. So a request that comes while steps are in flight waits as it
would.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.bench.prediction.arrivals import Arrival
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import AddRequest, RowResult, Step, StepResult
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import EngineError, PhalanxError
from phalanx.plan.burst import padded
from phalanx.plan.cost import Costs, Work

_TOKEN = RowResult(token=1)  # what every row yields: nothing but its length ends a request here


@dataclass(slots=True)
class Served:
    """One request's times in seconds from the start; None where it was refused. queued: until a step that computes it was
    submitted."""

    arrival: float
    input_len: int
    output_len: int
    queued: float = 0.0
    first: float = 0.0
    last: float = 0.0
    refused: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per token after the first: (end - first) / (n - 1); 0 for one token."""
        return (self.last - self.first) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def e2e(self) -> float:
        return self.last - self.arrival


@dataclass
class Replica:
    """One engine: its scheduler, and when each stage is free."""

    scheduler: Scheduler
    costs: Costs
    served: dict[str, Served]
    free: list[float] = field(default_factory=list)
    flying: deque[tuple[Step, float]] = field(default_factory=deque)
    waiting_first: set[str] = field(default_factory=set)
    open: int = 0
    busy: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.free = [0.0] * self.costs.split.pp

    def submit(self, now: float) -> None:
        """Every step that the scheduler gives now."""
        while (step := self.scheduler.schedule()) is not None:
            batch = step.batches[0]
            if self.waiting_first and batch.admitted:
                self._note_admitted(now)
            begin, costs = now, self._stages(step)
            for stage, seconds in enumerate(costs):
                begin = max(begin, self.free[stage]) + seconds
                self.free[stage] = begin
            self.busy += max(costs)
            self.flying.append((step, begin))

    def settle(self) -> float:
        """The oldest step in flight has ended; when."""
        step, end = self.flying.popleft()
        rows = step.batches[0].rows
        served, scheduler = self.served, self.scheduler
        for update in scheduler.process_result(StepResult(step.number, [[_TOKEN] * len(rows)])):
            entry = served[update.request_id]
            if not entry.first:
                entry.first = end
            if getattr(update, "finish_reason", None):
                entry.last, self.open = end, self.open - 1
        return end

    def _note_admitted(self, now: float) -> None:
        running = {request.id for request in self.scheduler.running}
        for name in self.waiting_first & running:
            self.served[name].queued = now - self.served[name].arrival
        self.waiting_first -= running

    def _stages(self, step: Step) -> tuple[float, ...]:
        rows = step.batches[0].rows
        tokens, kv, pairs, samples, longest = 0, 0, 0.0, 0, 0
        for row in rows:
            count = row.count
            tokens += count
            if count == 1:
                start = row.start
                kv += start
                if start > longest:
                    longest = start
                samples += 1
            else:
                pairs += count * (row.start + count / 2)
                samples += row.samples
        self.tokens += tokens
        if not pairs:
            return self.costs.step_seconds(Work(padded(tokens, self.scheduler.options.max_rows), samples, kv, longest=longest))
        return self.costs.step_seconds(Work(_by_8(tokens), samples, kv, pairs, tokens > self.costs.graph_tokens, longest))


def _by_8(tokens: int) -> int:
    """Prices are kept by tokens: for long steps by every eighth number."""
    return tokens if tokens < 64 else tokens + -tokens % 8


@dataclass(frozen=True)
class Result:
    """Of one simulation. seconds: simulated; cpu: seconds of one core that it took; hits, queries: prompt tokens that the prefix
    cache had, and was asked for."""

    served: list[Served]
    seconds: float
    cpu: float
    computed: int
    generated: int
    hits: int
    queries: int
    preemptions: int
    busy: float
    replicas: int

    @property
    def tokens_per_core_second(self) -> float:
        """Simulated tokens, computed and taken from the prefix cache, for each second of a core."""
        return (self.computed + self.hits) / self.cpu if self.cpu else 0.0


def run(
    costs: Costs, options: SchedulerOptions, arrivals: Sequence[Arrival], replicas: int = 1, concurrency: int | None = None
) -> Result:
    """Serve the arrivals. concurrency: a closed loop of so many requests, at whatever times they were to come.

    A request goes to the replica with the fewest open ones. Raises EngineError where the scheduler stands still.
    """
    begin = time.process_time()
    served: dict[str, Served] = {}
    engines = [Replica(Scheduler(options), costs, served) for _ in range(replicas)]
    if concurrency is not None:
        end = _closed_loop(engines, arrivals, served, concurrency)
    else:
        end = _open_loop(engines, arrivals, served)
    stats = [engine.scheduler.stats() for engine in engines]
    return Result(
        list(served.values()),
        end,
        time.process_time() - begin,
        sum(e.tokens for e in engines),
        sum(s.generation_tokens for s in stats),
        sum(s.prefix_hits for s in stats),
        sum(s.prefix_queries for s in stats),
        sum(s.preemptions for s in stats),
        sum(e.busy for e in engines),
        replicas,
    )


def _open_loop(engines: list[Replica], arrivals: Sequence[Arrival], served: dict[str, Served]) -> float:
    events: list[tuple[float, int]] = []  # when the oldest step in flight of a replica ends
    clock, number = 0.0, 0
    while number < len(arrivals):
        now = arrivals[number].at
        while events and events[0][0] <= now:
            clock = _next(engines, events)
        woken = set()
        while number < len(arrivals) and arrivals[number].at == now:  # those that come at one moment are seen together
            index = min(range(len(engines)), key=lambda each: engines[each].open) if len(engines) > 1 else 0
            _take(engines[index], number, arrivals[number], now, served)
            woken.add(index)
            number += 1
        for index in woken:
            engine = engines[index]
            idle = not engine.flying
            engine.submit(now)
            if idle and engine.flying:
                heapq.heappush(events, (engine.flying[0][1], index))
    while events:
        clock = _next(engines, events)
    _require_ended(engines)
    return clock


def _next(engines: list[Replica], events: list[tuple[float, int]]) -> float:
    _, index = heapq.heappop(events)
    engine = engines[index]
    end = engine.settle()
    engine.submit(end)
    if engine.flying:
        heapq.heappush(events, (engine.flying[0][1], index))
    return end


def _closed_loop(engines: list[Replica], arrivals: Sequence[Arrival], served: dict[str, Served], concurrency: int) -> float:
    """As many requests as `concurrency` are open at all times, over all replicas."""
    left = deque(enumerate(arrivals))
    events: list[tuple[float, int]] = []
    clock = 0.0

    def fill(now: float) -> None:
        while left and sum(engine.open for engine in engines) < concurrency:
            number, arrival = left.popleft()
            engine = min(engines, key=lambda each: each.open)
            _take(engine, number, arrival, now, served)

    fill(0.0)
    for index, engine in enumerate(engines):
        engine.submit(0.0)
        if engine.flying:
            heapq.heappush(events, (engine.flying[0][1], index))
    while events:
        _, index = heapq.heappop(events)
        clock = engines[index].settle()
        fill(clock)
        for other, engine in enumerate(engines):
            idle = not engine.flying
            engine.submit(clock)
            if engine.flying and (idle or other == index):
                heapq.heappush(events, (engine.flying[0][1], other))
    _require_ended(engines)
    return clock


def _take(engine: Replica, number: int, arrival: Arrival, now: float, served: dict[str, Served]) -> None:
    name = str(number)
    served[name] = Served(now, arrival.input_len, arrival.output_len)
    params = SamplingParams(max_tokens=arrival.output_len, temperature=0, ignore_eos=True)
    try:
        engine.scheduler.add(AddRequest(name, arrival.tokens(number), params))
    except PhalanxError as error:
        served[name].refused = str(error)
        return
    engine.open += 1
    engine.waiting_first.add(name)


def _require_ended(engines: list[Replica]) -> None:
    for engine in engines:
        if not engine.scheduler.idle:
            raise EngineError(
                "the simulation stands still", held=f"{len(engine.scheduler.open_ids)} requests are open and no step is made",
                why="no request can go on with the KV blocks there are", next="give the KV cache more tokens, or shorter requests",
            )  # fmt: skip
