# SPDX-License-Identifier: Apache-2.0
"""One scheduler for all ranks: it decides what each step computes, and returns it as plain data. No torch, no clock, no I/O.

First come, first served: the requests that run have all come before those that wait. When blocks run out, the one that came last
gives up its place (preemption by recompute) and waits in front; what it computed stays in the prefix cache while there is room.
A request that nothing but its limit ends is only admitted if there will be blocks for all of it, as `forecast_of` tells.

Steps are asynchronous: up to `depth` are in flight. Whatever a request gives up (slot, blocks) is free at once, also while steps
that use it are in flight: every rank runs steps in the order of their numbers, so a later step cannot overtake them. Tokens that
come late for a preempted request are its output like any other; those for a request that has ended are dropped.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from phalanx.engine.blocks import BlockPool
from phalanx.engine.limits import SchedulerOptions, length_limit
from phalanx.engine.messages import (
    AddRequest,
    RequestRejected,
    RequestUpdate,
    SlotAssignment,
    Stats,
    Step,
    StepBatch,
    StepResult,
    StepRow,
)
from phalanx.engine.prefix import extend_keys, longest_hit
from phalanx.engine.request import OpenMatcher, Request, forecast_of, open_matcher, request_matcher
from phalanx.errors import EngineError, PhalanxError, RequestError, StepDiverged

__all__ = ["Scheduler", "SchedulerOptions"]

SPLIT_FROM = 256
"""Pipeline stages share a prompt in chunks of at least so many tokens; smaller ones read the weights more often than they gain."""


@dataclass
class _Draft:
    """A step in the making. Tokens are counted in two purses, so that neither decodes nor prefills starve the other."""

    rows_left: int
    decode_tokens: int
    prefill_tokens: int
    admitted: list[SlotAssignment] = field(default_factory=list)
    singles: list[tuple[Request, StepRow]] = field(default_factory=list)
    chunks: list[tuple[Request, StepRow]] = field(default_factory=list)
    owed: int = 0  # blocks that running prompts will still ask for


class Scheduler:
    """`add`, `abort`, `schedule`, `settle`; each `schedule()`d step must be submitted, and settled in order."""

    def __init__(self, options: SchedulerOptions, open_matcher: OpenMatcher = open_matcher) -> None:
        self.options = options
        self.pool = BlockPool(options.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.counters = Stats(blocks_total=options.num_blocks)
        self._open_matcher = open_matcher
        self._requests: dict[str, Request] = {}
        self._slots = list(range(options.max_batch_size - 1, -1, -1))
        self._released: list[int] = []
        self._in_flight: deque[tuple[int, list[tuple[Request, StepRow]]]] = deque()
        self._seeds = random.Random(options.seed)

    # ---- requests come and go ----------------------------------------------------------------------------------------

    def add(self, add: AddRequest) -> None:
        """Take a request in. Raises PromptTooLong, CapacityError or RequestError: then nothing has changed."""
        if add.request_id in self._requests:
            raise RequestError(f"request id {add.request_id!r} was given twice", next="give each request its own id")
        limit = length_limit(add, self.options)
        matcher = request_matcher(add, self._open_matcher)
        seed = self._seeds.getrandbits(63) if add.params.seed is None else add.params.seed
        request = Request(add, seed=seed, limit=limit, matcher=matcher)
        self._requests[request.id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; one that is not there (it may just have ended) is no error."""
        request = self._requests.get(request_id)
        if request is not None:
            request.ended = True
            self._leave([request])

    @property
    def open_ids(self) -> list[str]:
        """The requests that still wait for an answer, in order of arrival."""
        return list(self._requests)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        return not self._requests and not self._in_flight

    def stats(self) -> Stats:
        """The counters, with the gauges of now. The same object each time."""
        found = self.counters
        found.running, found.waiting = len(self.running), len(self.waiting)
        found.waiting_tokens = sum(len(request.tokens) for request in self.waiting)
        found.blocks_referenced = self.pool.referenced
        return found

    def check(self) -> None:
        """Verify the accounting of blocks and slots; for idle moments. Raises EngineError."""
        self.pool.check(request.blocks for request in self.running)
        taken = sorted(self._slots + [request.slot for request in self.running])
        if taken != list(range(self.options.max_batch_size)):
            raise EngineError("the slot accounting is broken", held=f"free or held: {taken}", next="report this with the log")

    # ---- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when `depth` steps are in flight or no request can go on before one is settled."""
        if len(self._in_flight) >= self.options.depth or not self._requests:
            return None
        draft, eligible = self._draft()
        self._continue_running(draft, eligible)
        self._admit_waiting(draft)
        rows = draft.singles + draft.chunks
        return self._close(draft, rows) if rows else None

    def _draft(self) -> tuple[_Draft, list[Request]]:
        """How much this step may hold, and which running requests can go on."""
        options = self.options
        alone = options.pipeline_stages > 1  # a request whose token is on its way through the stages waits for it
        eligible, decodes = [], 0
        for request in self.running:
            pending = request.pending
            goal = len(request.tokens) + pending
            if goal >= request.limit or (pending and (alone or request.guided)):
                continue
            eligible.append(request)
            decodes += goal - request.submitted == 1
        rows = options.most_rows
        arrivals = self._arrivals() if alone or not options.chunked_prefill else []
        if alone:
            # Spread the requests evenly over the steps that are still missing, and over all stages: no stage stands still.
            missing = max(1, options.pipeline_stages - len(self._in_flight))
            everybody = len(self.running) + len(arrivals)
            rows = max(1, min(rows, -(-(len(eligible) + len(arrivals)) // missing), -(-everybody // options.pipeline_stages)))
        if options.chunked_prefill:
            decode_tokens = min(decodes, rows, options.max_num_tokens)
            return _Draft(rows, decode_tokens, options.max_num_tokens - decode_tokens), eligible
        # A prompt that must fit one step would wait for ever behind decodes: it goes first.
        heads = [r for r in eligible if len(r.tokens) + r.pending - r.submitted > 1] or arrivals
        head_tokens = min(len(heads[0].tokens) - heads[0].submitted, options.max_num_tokens) if heads else 0
        return _Draft(rows, options.max_num_tokens - head_tokens, head_tokens), eligible

    def _arrivals(self) -> list[Request]:
        """The waiting requests for which there are slots and blocks now (not counting what the prefix cache saves)."""
        found: list[Request] = []
        left, forecast = self.pool.available - len(self.running), forecast_of(self.running, self.pool.available, self.options)
        for request in self.waiting:
            left -= self._blocks_for(len(request.tokens))
            fits = forecast is None or forecast.admits(len(request.tokens), request.to_go, anyway=not (found or self.running))
            if request.in_flight or len(found) == len(self._slots) or not fits or (left < 0 and (found or self.running)):
                break
            found.append(request)
        return found

    def _continue_running(self, draft: _Draft, eligible: list[Request]) -> None:
        """Rows for the requests that run, in order of arrival."""
        size = self.options.block_size
        singles = draft.singles
        for request in eligible:
            if not draft.rows_left:
                return
            start, tokens = request.submitted, request.tokens
            if len(tokens) + request.pending - start > 1:
                self._continue_prompt(draft, request)
                continue
            if not draft.decode_tokens or request.slot < 0:  # it may have been preempted for one before it
                continue
            blocks: list[int] = []
            if start >= len(request.blocks) * size:
                self._name_blocks(request)
                if not self._room(request, 1):
                    continue
                blocks = self._take(request, 1)
            mask = request.matcher.mask() if request.matcher is not None else None
            row = StepRow(request.slot, start, 1, [tokens[start]] if start < len(tokens) else [], blocks, True, mask)
            request.submitted = start + 1
            request.pending += 1
            singles.append((request, row))
            draft.rows_left -= 1
            draft.decode_tokens -= 1

    def _continue_prompt(self, draft: _Draft, request: Request) -> None:
        if request.slot < 0:
            return
        left = len(request.tokens) - request.submitted
        count = self._room(request, self._chunk(request, left, draft.prefill_tokens))
        if count:
            self._add_chunk(draft, request, count)
        else:
            draft.owed += self._blocks_for(len(request.tokens)) - len(request.blocks)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Give slots to waiting requests, in order, as long as there are tokens, slots and blocks."""
        pool, size = self.pool, self.options.block_size
        draft.prefill_tokens += draft.decode_tokens
        forecast = forecast_of(self.running, pool.available, self.options) if self.waiting and self._slots else None
        while self.waiting and self._slots and draft.rows_left and draft.prefill_tokens:
            request = self.waiting[0]
            if request.in_flight:  # preempted, and its last tokens are not known yet
                return
            hit = self._hit(request)
            woken = sum(block >= 0 and pool.idle(block) for block in hit)
            # One block is left to each request that runs, so that the newcomer does not push one out at once.
            if self.running and self._blocks_at_once(request, len(hit)) + woken + draft.owed + len(self.running) > pool.available:
                return
            left = len(request.tokens) - len(hit) * size
            if left > draft.prefill_tokens and not self._may_split(request):
                return
            if forecast is not None and not forecast.admits(left + woken * size, request.to_go, anyway=not self.running):
                return
            self._admit(draft, request, hit)
            self._add_chunk(draft, request, self._room(request, self._chunk(request, left, draft.prefill_tokens)))

    def _admit(self, draft: _Draft, request: Request, hit: list[int]) -> None:
        stages = self.options.pipeline_stages
        self.waiting.popleft()
        self.running.append(request)
        request.slot = self._slots.pop()
        for block in hit:
            if block >= 0:
                self.pool.share(block)
        request.blocks, request.sent, request.named, request.shared = hit, 0, len(hit), len(hit)
        request.first_live = hit.count(-1)
        request.submitted = len(hit) * self.options.block_size
        left = len(request.tokens) - request.submitted
        request.chunk_cap = left if stages == 1 else max(SPLIT_FROM, -(-left // stages))
        draft.admitted.append(request.admission())
        if not request.seen:
            request.seen = True
            request.cached_tokens = request.submitted
            self.counters.prompt_tokens += request.prompt_length
            self.counters.prefix_hits += request.submitted
            self.counters.prefix_queries += request.prompt_length if self._may_hit(request) else 0

    def _may_hit(self, request: Request) -> bool:
        return self.options.prefix_caching and request.prompt_logprobs is None  # those need the logits of every position

    def _hit(self, request: Request) -> list[int]:
        """Blocks of the prefix cache for its beginning. The last token is always computed: somebody must yield its logits."""
        if not self._may_hit(request):
            return []
        size = self.options.block_size
        full = (len(request.tokens) - 1) // size
        extend_keys(request.keys, request.tokens, size, full)
        return longest_hit(self.pool, request.keys[:full], size, self.options.window)

    def _chunk(self, request: Request, left: int, purse: int) -> int:
        """How many of the `left` known tokens the next row takes."""
        if self._may_split(request):
            return min(left, purse, request.chunk_cap)
        return left if left <= purse else 0

    def _may_split(self, request: Request) -> bool:
        """Without chunked prefill a prompt stays whole; what a preempted request computes again may be split all the same."""
        return self.options.chunked_prefill or len(request.tokens) > request.prompt_length

    def _add_chunk(self, draft: _Draft, request: Request, count: int) -> None:
        start = request.submitted
        blocks = self._take(request, count)
        end = request.submitted = start + count
        samples = end == len(request.tokens)
        mask = request.matcher.mask() if samples and request.matcher is not None else None
        row = StepRow(request.slot, start, count, request.tokens[start:end], blocks, samples, mask)
        request.pending += samples
        (draft.singles if count == 1 else draft.chunks).append((request, row))
        draft.rows_left -= 1
        draft.prefill_tokens -= count
        draft.owed += self._blocks_for(len(request.tokens)) - len(request.blocks)

    def _close(self, draft: _Draft, rows: list[tuple[Request, StepRow]]) -> Step:
        for request, _ in rows:
            request.in_flight += 1
        for request, _ in draft.chunks:
            self._name_blocks(request)  # not earlier: a row must not share what another row of its own step computes
        self.counters.steps += 1
        step = Step(self.counters.steps, [StepBatch(self._released, draft.admitted, [row for _, row in rows])])
        self._in_flight.append((step.number, rows))
        self._released = []
        return step

    # ---- settle ------------------------------------------------------------------------------------------------------

    def settle(self, result: StepResult) -> list[RequestUpdate | RequestRejected]:
        """Take in what the oldest step in flight yielded. One Update per request with a new token, Refused where a grammar broke.

        Raises StepDiverged when the result is not that step's.
        """
        number, rows = self._in_flight[0] if self._in_flight else (None, [])
        if number != result.number or len(result.batches) != 1 or len(result.batches[0]) != len(rows):
            raise StepDiverged(
                f"the result of step {result.number} came, with {[len(batch) for batch in result.batches]} rows",
                held=f"the oldest step in flight is {number}, with {len(rows)} rows",
            )
        self._in_flight.popleft()
        said: list[RequestUpdate | RequestRejected] = []
        ended: list[Request] = []
        for (request, row), found in zip(rows, result.batches[0], strict=True):
            request.in_flight -= 1
            if request.ended:
                continue
            if found.prompt_logprobs:
                request.take_prompt_logprobs(row.start, found.prompt_logprobs)
            if not row.samples:
                continue
            request.pending -= 1
            if found.token is None:
                raise StepDiverged(f"step {number} was to sample a token for request {request.id}", held="its result has none")
            try:
                said.append(request.take_token(found, found.token))
            except PhalanxError as error:
                request.ended = True
                said.append(RequestRejected(request.id, error.to_wire()))
            if request.ended:
                ended.append(request)
        self.counters.generation_tokens += len(said)
        if ended:
            self._leave(ended)
        return said

    # ---- blocks and slots --------------------------------------------------------------------------------------------

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.options.block_size)

    def _blocks_at_once(self, request: Request, held: int) -> int:
        """How many blocks the request takes before it gives any back, beyond the `held` entries of its hit."""
        needed = self._blocks_for(len(request.tokens)) - held
        if self.options.window is None or not self._may_split(request):
            return needed
        reach = self._blocks_for(self.options.window + self.options.max_num_tokens) + 1
        return min(needed, reach)

    def _room(self, request: Request, count: int) -> int:
        """For how many of the next `count` positions there are blocks, once those that came later have given up theirs."""
        self._name_blocks(request)
        self._drop_dead_blocks(request)
        needed = self._blocks_for(request.submitted + count) - len(request.blocks)
        while self.pool.available < needed and self.running[-1] is not request:
            self._preempt(self.running[-1])
        found = min(count, (len(request.blocks) + self.pool.available) * self.options.block_size - request.submitted)
        return found if found == count or self._may_split(request) else 0

    def _take(self, request: Request, count: int) -> list[int]:
        """Take the blocks of the next `count` positions; what the ranks' block table of the slot still lacks."""
        blocks = request.blocks
        blocks += self.pool.take(self._blocks_for(request.submitted + count) - len(blocks))
        unsent = [max(block, 0) for block in blocks[request.sent :]]  # any id does where the window never reaches
        request.sent = len(blocks)
        return unsent

    def _name_blocks(self, request: Request) -> None:
        """Offer the blocks that its steps have filled, as far as their tokens are known, to the prefix cache."""
        if not self.options.prefix_caching:
            return
        full = min(request.submitted, len(request.tokens)) // self.options.block_size
        if full > request.named:
            extend_keys(request.keys, request.tokens, self.options.block_size, full)
            for index in range(request.named, full):
                if request.blocks[index] >= 0:
                    self.pool.name(request.blocks[index], request.keys[index])
            request.named = full

    def _drop_dead_blocks(self, request: Request) -> None:
        """Give back the blocks that lie wholly before the window of its next position."""
        if self.options.window is None:
            return
        live = max(0, request.submitted - self.options.window) // self.options.block_size
        for index in range(request.first_live, live):
            self.pool.release((request.blocks[index],))
            request.blocks[index] = -1
        request.first_live = max(request.first_live, live)

    def _preempt(self, request: Request) -> None:
        """Take its place from the request that came last of those that run; it will compute its tokens again."""
        self.running.pop()
        self._give_up(request)
        self.waiting.appendleft(request)
        self.counters.preemptions += 1

    def _give_up(self, request: Request) -> None:
        """Slot and blocks are free for the next step."""
        self._name_blocks(request)
        self.pool.release(reversed(request.blocks[request.first_live :]))
        self._released.append(request.slot)
        self._slots.append(request.slot)
        request.blocks, request.slot, request.submitted = [], -1, 0

    def _leave(self, ended: list[Request]) -> None:
        for request in ended:
            del self._requests[request.id]
            if request.slot < 0:
                self.waiting.remove(request)
            else:
                self._give_up(request)
        self.running = [request for request in self.running if not request.ended]
