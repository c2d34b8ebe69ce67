# SPDX-License-Identifier: Apache-2.0
"""The engine's own scheduler, prefix cache included, on the cost model's clock: one replica or many, without a GPU.

A step is submitted as soon as the scheduler gives it, up to its depth, and passes the stages one after the other, each stage one
step at a time; its tokens are known when the last stage has ended. So a request that comes while steps are in flight waits as it
would. What lies between a client and the engine is a `Frontend`: without one, times are the engine's own.

With speculative decoding rows verify drafts, as many as the engine would, and yield what is accepted of them at stated rates.

Where the scheduler's options say that the last stage returns tokens to the first, a step that takes some begins no earlier than the
first stage has them.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.messages import AddRequest, NextTokens, RowOutput, RowResult, Step, StepBatch, StepResult, StepRow
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import EngineError, PhalanxError, RequestError
from phalanx.layout.attention_calls import padded
from phalanx.layout.graphs import max_decode_rows
from phalanx.layout.memory import COPIED_STATES
from phalanx.planner.arrivals import Arrival
from phalanx.planner.burst import computed_rows, computed_tokens
from phalanx.planner.cost import Costs, Work
from phalanx.planner.power import PowerCredit
from phalanx.planner.speculation import SimulatedDrafts, Speculation

AnyScheduler = Scheduler | DpScheduler
_TOKEN: RowOutput = 1  # what every row yields: nothing but its length ends a request here


@dataclass(frozen=True)
class Frontend:
    """What is between a client and the engine, in seconds. path: of a request alone, there and back, beside the step that computes
    it (HTTP, messages between processes, the ranks' wake-up). event: of one token's event in the server and the client, which send
    and read them one after the other: the tokens of a step arrive one by one."""

    path: float = 0.0
    event: float = 0.0


NO_FRONTEND = Frontend()


@dataclass(frozen=True)
class CopySeconds:
    """Of one KV block, and of one state of a prefix, between a rank and host memory: each direction has a bus of its own."""

    block: float = 0.0
    state: float = 0.0


NO_COPIES = CopySeconds()


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
class SimulatedReplica:
    """One replica in simulated time: its scheduler, and when each stage is free. copies: to and from host memory;
    copied_back, copied_out: when those of the steps so far end. drafts: None without speculative decoding. sent: when the last
    event was. ends: when the latest steps leave the last stage, as many as there are stages, the oldest first."""

    scheduler: AnyScheduler
    costs: Costs
    served: dict[str, Served]
    free: list[float] = field(default_factory=list)
    flying: deque[tuple[Step, float]] = field(default_factory=deque)
    waiting_first: set[str] = field(default_factory=set)
    frontend: Frontend = NO_FRONTEND
    observe: Callable[[Work], None] | None = None
    power: PowerCredit = field(default_factory=PowerCredit)
    copies: CopySeconds = NO_COPIES
    copied_back: float = 0.0
    copied_out: float = 0.0
    drafts: SimulatedDrafts | None = None
    sent: float = 0.0
    open: int = 0
    busy: float = 0.0
    tokens: int = 0
    ends: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.free = [0.0] * self.costs.layout.pp
        self.ends = deque([0.0] * len(self.free), len(self.free))
        if self.drafts is not None:
            self.scheduler.choose_drafts, self.scheduler.verified = self.drafts.depth.choose, self.drafts.depth.verified

    def submit(self, now: float) -> None:
        """Every step that the scheduler gives now."""
        while (step := self.scheduler.schedule()) is not None:
            if self.waiting_first and any(batch.admitted for batch in step.batches):
                self._note_admitted(now)
            if now > self.free[0]:
                self.power.rest(now - self.free[0])
            begin, costs = max(now, self._tokens_returned(step), self._copied(step, now)), self._stages(step)
            for stage, seconds in enumerate(costs):
                begin = max(begin, self.free[stage]) + seconds
                self.free[stage] = begin
            self.busy += max(costs)
            self.flying.append((step, begin))
            self.ends.append(begin)

    def _copied(self, step: Step, now: float) -> float:
        """When the copies to and from host memory let the step begin. Those back run from now on, beside the steps before, as far
        as the ranks have buffers, and the step waits for their end. Those out run beside the steps behind, and the step waits for
        buffers only."""
        block, state = self.copies.block, self.copies.state
        back, out = (
            max(block * len(blocks) + state * len(states) for blocks, states in each)
            for each in (
                [(batch.loaded, batch.loaded_states) for batch in step.batches],
                [(batch.saved, batch.saved_states) for batch in step.batches],
            )
        )
        buffered, ready = block * self.scheduler.options.copied_blocks + state * COPIED_STATES, 0.0
        if back:
            ready = max(now, self.copied_back) + min(back, buffered)
            if back > buffered:
                ready = max(ready, self.free[0]) + back - buffered
            self.copied_back = ready
        if out:
            self.copied_out = max(now, self.free[0], self.copied_out) + out
            ready = max(ready, self.copied_out - buffered)
        return ready

    def _tokens_returned(self, step: Step) -> float:
        """When the first stage of a pipeline has the tokens that the step takes and the engine does not know."""
        if len(self.free) == 1 or all(row.tokens for batch in step.batches for row in batch.rows):
            return 0.0
        return self.ends[0]

    def finish_step(self) -> float:
        """The oldest step in flight has ended; when."""
        step, end = self.flying.popleft()
        results: list[list[RowOutput]] = [
            [self._verified(row) if row.drafts else _TOKEN for row in batch.rows] for batch in step.batches
        ]
        served, scheduler, event = self.served, self.scheduler, self.frontend.event
        arrived = max(self.sent, end + self.frontend.path)
        for update in scheduler.process_result(StepResult(step.number, results)):
            if isinstance(update, NextTokens):  # neither the first nor the last of any request
                arrived += len(update.tokens) * event
                continue
            entry, arrived = served[update.request_id], arrived + event
            if not entry.first:
                entry.first = arrived
            if getattr(update, "finish_reason", None):
                entry.last, self.open = arrived, self.open - 1
        self.sent = arrived
        return end

    def _verified(self, row: StepRow) -> RowOutput:
        assert self.drafts is not None
        return RowResult([1] * (1 + self.drafts.accepted(row.drafts)), drafted=row.drafts)

    def _note_admitted(self, now: float) -> None:
        running = {request.id for request in self.scheduler.running}
        for name in self.waiting_first & running:
            self.served[name].queued = now - self.served[name].arrival
        self.waiting_first -= running

    def _stages(self, step: Step) -> tuple[float, ...]:
        if not any(batch.rows for batch in step.batches):
            return (0.0,) * len(self.free)
        if not self.costs.machine.replays_graphs and len(step.batches) == 1:
            return self._on_cpu(step.batches[0])
        parts = [_work_of(batch.rows) for batch in step.batches]
        self.tokens += sum(part[0] for part in parts)
        # All dp indices take as long as the fullest: the costs are of a step in which each has as much as that.
        tokens, samples, kv, pairs, longest = parts[0] if len(parts) == 1 else map(max, zip(*parts, strict=True))
        indices = len(parts)
        if not pairs:
            options = self.scheduler.options
            rows = computed_rows(self.costs, tokens, max_decode_rows(options.max_rows, options.max_drafts)) * indices
            stages = self._seconds(Work(rows, samples * indices, kv * indices, longest=longest), step.batches)
            self.power.rest(max(stages))
            return stages
        tokens, eager = computed_tokens(self.costs, tokens, pairs)
        work = Work(_by_8(tokens) * indices, samples * indices, kv * indices, pairs * indices, eager, longest)
        stages, free = self._seconds(work, step.batches), self.costs.without_power_limit
        return stages if free is None else self.power.spend(stages, free.step_seconds(work))

    def _on_cpu(self, batch: StepBatch) -> tuple[float, ...]:
        """Nothing is padded but the calls of attention."""
        rows = batch.rows
        tokens = sum(row.count for row in rows)
        self.tokens += tokens
        each = (one for row in rows for one in ([(1, row.start)] * row.count if row.drafts else [(row.count, row.start)]))
        attention = padded(each, self.scheduler.options.block_size)
        samples = sum(row.count if row.drafts else row.samples for row in rows)
        work = Work(tokens, samples, attention.keys, attention.pairs, eager=True, calls=attention.calls)
        return self._seconds(work, [batch])

    def _seconds(self, work: Work, batches: Sequence[StepBatch]) -> tuple[float, ...]:
        if self.observe is not None:
            self.observe(work)
        stages = self.costs.step_seconds(work)
        if self.drafts is None:
            return stages
        sampling = max(([row for row in batch.rows if row.samples] for batch in batches), key=len)
        proposed = max(batch.propose for batch in batches)
        return *stages[:-1], stages[-1] + self.drafts.step_seconds(work, len(sampling), sum(r.start for r in sampling), proposed)


def _work_of(rows: Sequence[StepRow]) -> tuple[int, int, int, float, int]:
    """Of the part of a dp index: tokens, rows that sample, cached tokens that decode rows read, pairs, the longest of these
    rows."""
    tokens, kv, pairs, samples, longest = 0, 0, 0.0, 0, 0
    for row in rows:
        count = row.count
        tokens += count
        if count == 1 or row.drafts:  # each token attends as a row of its own
            start = row.start
            kv += count * start
            if start > longest:
                longest = start
            samples += count
        else:
            pairs += count * (row.start + count / 2)
            samples += row.samples
    return tokens, samples, kv, pairs, longest


def _by_8(tokens: int) -> int:
    """Prices are kept by tokens: for long steps by every eighth number."""
    return tokens if tokens < 64 else tokens + -tokens % 8


@dataclass(frozen=True)
class SimulationResult:
    """Of one simulation. seconds: simulated; cpu: seconds of one core that it took; hits, queries: prompt tokens that the prefix
    cache had, and was asked for; host_hits: of the hits, those from host memory."""

    served: list[Served]
    seconds: float
    cpu: float
    computed: int
    generated: int
    hits: int
    queries: int
    preemptions: int
    busy: float
    host_hits: int = 0
    drafts: int = 0
    accepted: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Of the report."""
        return {
            "prefix_hits": self.hits,
            "prefix_hits_on_host": self.host_hits,
            "preemptions": self.preemptions,
            "draft_tokens": self.drafts,
            "accepted_tokens": self.accepted,
        }

    @property
    def tokens_per_core_second(self) -> float:
        """Simulated tokens, computed and taken from the prefix cache, for each second of a core."""
        return (self.computed + self.hits) / self.cpu if self.cpu else 0.0


def run(
    costs: Costs, options: SchedulerOptions, arrivals: Sequence[Arrival], replicas: int = 1, concurrency: int | None = None,
    frontend: Frontend = NO_FRONTEND, *, scheduler_of: Callable[[SchedulerOptions, int], AnyScheduler] | None = None,
    observe: Callable[[Work], None] | None = None, copies: CopySeconds = NO_COPIES, speculation: Speculation | None = None,
) -> SimulationResult:  # fmt: skip
    """Serve the arrivals. concurrency: a closed loop of so many requests, at whatever times they were to come. frontend: of each
    replica. scheduler_of: that of so many dp indices with these limits together; None: the engine's. observe: called at each step.
    copies: as of SimulatedReplica. speculation: the drafts of options.max_drafts.

    A request goes to the replica with the fewest open ones. Raises EngineError where the scheduler stands still.
    """
    begin = time.process_time()
    served: dict[str, Served] = {}
    make = scheduler_of or engine_scheduler
    simulated = [
        SimulatedReplica(
            make(options, costs.layout.dp),
            costs,
            served,
            frontend=frontend,
            observe=observe,
            copies=copies,
            drafts=None if speculation is None else SimulatedDrafts(costs, speculation, options.max_rows, seed),
        )
        for seed in range(replicas)
    ]
    if concurrency is not None:
        end = _closed_loop(simulated, arrivals, served, concurrency)
    else:
        end = _open_loop(simulated, arrivals, served)
    stats = [replica.scheduler.stats() for replica in simulated]
    return SimulationResult(
        list(served.values()),
        end,
        time.process_time() - begin,
        sum(e.tokens for e in simulated),
        sum(s.generation_tokens for s in stats),
        sum(s.prefix_hits for s in stats),
        sum(s.prefix_queries for s in stats),
        sum(s.preemptions for s in stats),
        sum(e.busy for e in simulated),
        sum(s.host_hits for s in stats),
        sum(s.draft_tokens for s in stats),
        sum(sum(s.accepted_tokens) for s in stats),
    )


def engine_scheduler(
    options: SchedulerOptions, indices: int, one: type[Scheduler] = Scheduler, several: type[DpScheduler] = DpScheduler
) -> AnyScheduler:  # fmt: skip
    """The scheduler of an engine whose dp indices have these limits together. one, several: its types."""
    if indices == 1:
        return one(options)
    batch_size, num_tokens = -(-options.max_batch_size // indices), -(-options.max_num_tokens // indices)
    num_blocks = options.num_blocks // indices
    return several(replace(options, max_batch_size=batch_size, max_num_tokens=num_tokens, num_blocks=num_blocks), indices)


def _open_loop(replicas: list[SimulatedReplica], arrivals: Sequence[Arrival], served: dict[str, Served]) -> float:
    events: list[tuple[float, int]] = []  # when the oldest step in flight of a replica ends
    clock, number = 0.0, 0
    while number < len(arrivals):
        now = arrivals[number].at
        while events and events[0][0] <= now:
            clock = _next(replicas, events)
        woken = set()
        while number < len(arrivals) and arrivals[number].at == now:  # those that come at one moment are seen together
            index = min(range(len(replicas)), key=lambda each: replicas[each].open) if len(replicas) > 1 else 0
            _take(replicas[index], number, arrivals[number], now, served)
            woken.add(index)
            number += 1
        for index in woken:
            replica = replicas[index]
            idle = not replica.flying
            replica.submit(now)
            if idle and replica.flying:
                heapq.heappush(events, (replica.flying[0][1], index))
    while events:
        clock = _next(replicas, events)
    _require_ended(replicas)
    return clock


def _next(replicas: list[SimulatedReplica], events: list[tuple[float, int]]) -> float:
    _, index = heapq.heappop(events)
    replica = replicas[index]
    end = replica.finish_step()
    replica.submit(end)
    if replica.flying:
        heapq.heappush(events, (replica.flying[0][1], index))
    return end


def _closed_loop(
    replicas: list[SimulatedReplica], arrivals: Sequence[Arrival], served: dict[str, Served], concurrency: int
) -> float:
    """As many requests as `concurrency` are open at all times, over all replicas."""
    left = deque(enumerate(arrivals))
    events: list[tuple[float, int]] = []
    clock = 0.0

    def fill(now: float) -> None:
        while left and sum(replica.open for replica in replicas) < concurrency:
            number, arrival = left.popleft()
            replica = min(replicas, key=lambda each: each.open)
            _take(replica, number, arrival, now, served)

    fill(0.0)
    for index, replica in enumerate(replicas):
        replica.submit(0.0)
        if replica.flying:
            heapq.heappush(events, (replica.flying[0][1], index))
    while events:
        _, index = heapq.heappop(events)
        clock = replicas[index].finish_step()
        fill(clock)
        for other, replica in enumerate(replicas):
            idle = not replica.flying
            replica.submit(clock)
            if replica.flying and (idle or other == index):
                heapq.heappush(events, (replica.flying[0][1], other))
    _require_ended(replicas)
    return clock


def _take(replica: SimulatedReplica, number: int, arrival: Arrival, now: float, served: dict[str, Served]) -> None:
    name = str(number)
    served[name] = Served(now, arrival.input_len, arrival.output_len)
    params = SamplingParams(max_tokens=arrival.output_len, temperature=0, ignore_eos=True)
    most = replica.scheduler.options.max_seq_len
    try:
        if arrival.input_len < most < arrival.input_len + arrival.output_len:
            raise RequestError(
                f"a request of {arrival.input_len} + {arrival.output_len} tokens is too long", held=f"max_seq_len is {most}",
                why="a simulated request generates as many tokens as its trace says",
            )  # fmt: skip
        replica.scheduler.add(AddRequest(name, arrival.tokens(number), params))
    except PhalanxError as error:
        served[name].refused = str(error)
        return
    replica.open += 1
    replica.waiting_first.add(name)


def _require_ended(replicas: list[SimulatedReplica]) -> None:
    for replica in replicas:
        if not replica.scheduler.idle:
            raise EngineError(
                "the simulation stands still", held=f"{len(replica.scheduler.open_ids)} requests are open and no step is made",
                why="no request can go on with the KV blocks there are", next="give the KV cache more tokens, or shorter requests",
            )  # fmt: skip
