# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: one scheduler for all ranks decides what each step computes, and returns it as plain data. No torch, no
clock, no I/O.

First come, first served: the running requests have all come before the waiting ones. When blocks run out, the request that came
last is preempted (by recompute) and waits in front; what it computed stays in the prefix cache while there is room. A request that
only its limit ends is admitted only if there will be blocks for all of it (`forecast_of`).

Steps are asynchronous: up to `depth` are in flight. The slot and blocks of a request that leaves are free at once, also while steps
that use them are in flight: every rank runs steps in the order of their numbers, so a later step cannot overtake them. A token that
arrives late for a preempted request is output like any other; one for a request that has ended is dropped.

A token of a constrained request stays pending until its grammar has accepted it and the next mask is computed, which may take long.
The request skips steps meanwhile, and the others do not wait (`process_grammar_calls`).
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, takewhile

from phalanx.engine.adapters import Adapter, Adapters, Claims
from phalanx.engine.grammar import OpenMatcher, TokenMatcher, no_grammars, request_matcher
from phalanx.engine.grammar_threads import SLOW_SECONDS, TOKEN_SECONDS, GrammarCall, GrammarThreads, InlineGrammarCalls
from phalanx.engine.limits import SchedulerOptions, length_limit
from phalanx.engine.messages import (
    NO_DRAFT,
    AddRequest,
    NextTokens,
    RequestRejected,
    RequestUpdate,
    RowResult,
    Stats,
    Step,
    StepBatch,
    StepResult,
    StepRow,
    row_result,
)
from phalanx.engine.request import Followed, Request
from phalanx.engine.request_blocks import RequestBlocks, forecast_of
from phalanx.engine.step_draft import ADMITTED_TOKENS, DecodeCounts, StepDraft
from phalanx.engine.step_scheduler import Messages, StepScheduler
from phalanx.errors import EngineError, RequestError, StepDiverged
from phalanx.layout.layout import max_chunk

__all__ = ["Scheduler", "SchedulerOptions"]

SHORTER = 4
"""How many times as long as another a prompt is that leaves it room in its steps."""

FIRST_CHUNK = 16
"""Tokens of a long prompt with which it is admitted where the step's others are left to shorter ones: they come behind it."""


class Scheduler(StepScheduler[list[tuple[Request, StepRow]]]):
    """A `StepScheduler` whose steps have one batch."""

    decode_counts = DecodeCounts

    def __init__(
        self, options: SchedulerOptions, open_matcher: OpenMatcher = no_grammars, *,
        grammar_calls: GrammarThreads | InlineGrammarCalls | None = None, seeds: random.Random | None = None,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        """seeds, adapters: shared with other schedulers of one engine; None: seeds are drawn from options.seed."""
        super().__init__(options, open_matcher, grammar_calls, num_blocks=options.num_blocks, adapters=adapters)
        self.adapters.slots.running.append(lambda: (request.adapter for request in self.running))
        self.kv = RequestBlocks(options)
        self.pool, self.parts = self.kv.pool, [self]
        self.running: list[Request] = []  # in order of arrival
        self._arrived, self._lacks = 0, False  # _lacks: blocks, the next one in the last step
        self._loading: Request | None = None  # the last whose prefix came from host memory in parts
        # Whether constrained requests, which wait for the engine to know their tokens where those of others return on the device,
        # have a budget of their own. Not where a step may have fewer tokens than rows: the oldest must never be without one.
        self._parts_decodes = options.returns_tokens and options.chunked_prefill and options.max_rows < options.max_num_tokens
        self._token_lag, self._max_rows = options.token_lag, options.max_rows
        self._slots = list(range(options.max_batch_size - 1, -1, -1))
        self._released: list[int] = []
        self._seeds = seeds or random.Random(options.seed)

    # ---- requests come and go ----------------------------------------------------------------------------------------

    def add(self, add: AddRequest, matcher: TokenMatcher | None = None, adapter: Adapter | None = None) -> None:
        """As `StepScheduler`."""
        self.enqueue(self.request_of(add, matcher, adapter))

    def request_of(self, add: AddRequest, matcher: TokenMatcher | None = None, adapter: Adapter | None = None) -> Request:
        """The request, which is not queued. Raises as `add`."""
        if add.request_id in self._requests:
            raise RequestError(f"request id {add.request_id!r} is in use", next="give each request its own id")
        limit, adapter = length_limit(add, self.options), adapter or self.adapters.named(add.params.adapter)
        matcher = matcher or request_matcher(add, self.open_matcher)
        seed = self._seeds.getrandbits(63) if add.params.seed is None else add.params.seed
        return Request(add, seed=seed, limit=limit, matcher=matcher, adapter=adapter)

    def enqueue(self, request: Request) -> None:
        """Queue a request that `request_of` has made."""
        self._requests[request.id], request.arrival = request, self._arrived
        self._arrived += 1
        self._wait(request)

    def abort(self, request_id: str) -> None:
        """As `StepScheduler`."""
        if (request := self._requests.get(request_id)) is not None:
            request.ended = True
            self._remove([request])

    def stats(self) -> Stats:
        """As `StepScheduler`."""
        stats = self.counters
        stats.running, stats.waiting = len(self.running), len(self.waiting)
        stats.blocks_referenced = self.pool.referenced
        self.kv.write(stats)
        return stats

    def check(self) -> None:
        """As `StepScheduler`."""
        self.kv.check(self.running)
        slots = sorted(self._slots + [request.slot for request in self.running])
        if slots != list(range(self.options.max_batch_size)):
            raise EngineError("the slot accounting is broken", held=f"free or in use: {slots}", next="report this with the log")

    # ---- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self, now: int = 0) -> Step | None:
        """As `StepScheduler`."""
        if len(self._in_flight) >= self.options.depth or not self._requests:
            return None
        self._stop_passer()
        draft, eligible = self._draft()
        if self.options.max_drafts:
            draft.take_drafts(self.options, eligible, self.choose_drafts, waiting=bool(self.waiting))
        self.pace = draft.take_pace(self.times, self.options, self.running, eligible, waiting=bool(self.waiting)) or self.pace
        self._continue_running(draft, eligible)
        self._admit_waiting(draft, now)
        decode_rows = draft.decode_rows
        if self.options.max_drafts and any(row.drafts or row.late for _, row in decode_rows):
            decode_rows.sort(key=lambda pair: not pair[1].verifies)
        rows = decode_rows + draft.prefill_rows
        return self._close(draft, rows) if rows or self._too_early() else None

    def _too_early(self) -> bool:
        """Whether a request waits only for steps between the one that samples its token and its next one, and not for the token:
        then a step without rows, which costs the device nothing, takes less than the token's way to the engine."""
        latest = self._latest_sampling
        return latest is not None and any(
            request.sampled_in > latest and self._in_slot(request) and not request.constrained
            and len(request.tokens) + request.pending < request.limit
            for request in self.running
        )  # fmt: skip

    def _in_slot(self, request: Request) -> bool:
        """Whether its next row takes its last token from the slot, or its drafts."""
        return request.pending > 0 or (self.options.max_drafts > 0 and request.decoding and not self._knows_drafts(request))

    @property
    def _latest_sampling(self) -> int | None:
        """The latest step whose tokens the next step may take before the engine knows them; None: a request waits for its token."""
        lag = self._token_lag
        return None if lag is None else self.counters.steps + 1 - lag

    def empty_step(self) -> Step | None:
        """As `StepScheduler`."""
        return None if len(self._in_flight) >= self.options.depth else self._close(self._draft()[0], [])

    def _draft(self) -> tuple[StepDraft, list[Request]]:
        """The budgets of this step, and the running requests that can go on."""
        options = self.options
        if options.state_snapshots:
            self.kv.states.begin_step()
        pipelined = options.pipeline_stages > 1
        eligible, budget, constrained_budget = self._eligible()
        rows = self._max_rows
        claims = Claims(self.adapters.slots)
        arrivals = self._arrivals(claims) if pipelined or not options.chunked_prefill else []
        if pipelined:
            # Spread the requests evenly over the steps that are still missing, and over all stages: no stage stands still.
            # Not so the long prompts, which have a row in each step: it must not be the only one, or nobody else would go on.
            missing, stages = max(1, options.pipeline_stages - len(self._in_flight)), options.pipeline_stages
            half = options.max_num_tokens // 2
            long = sum(len(r.tokens) - r.submitted > half for r in eligible) if options.chunked_prefill else 0
            ready, total = (len(requests) + len(arrivals) - long for requests in (eligible, self.running))
            rows = max(1, min(rows, long - (-ready // missing), long - (-total // stages)))
            prompts_wait = bool(self.waiting) or budget + constrained_budget < len(eligible)
            plain, constrained = self.decode_counts.of(self.running, eligible, apart=self._parts_decodes)
            budget, constrained_budget = (each.share(stages, prompts_wait=prompts_wait) for each in (plain, constrained))
            if constrained_budget:
                # The token of a constrained request takes one step longer than those of others, which have filled the next step by
                # then, each time: it has a place beside their share, and where a step holds no more rows, one of theirs. But not if
                # it needs a block, which it may not get: its place could stay empty in every step.
                budget = min(budget, self._max_rows - min(constrained.without_block, constrained_budget))
                rows = min(self._max_rows, max(rows, budget + constrained_budget))
        if options.chunked_prefill:
            budget = min(budget, rows, options.max_num_tokens)
            constrained_budget = min(constrained_budget, rows, options.max_num_tokens - budget)
            prefill_budget = options.max_num_tokens - budget - constrained_budget
            return StepDraft(claims, rows, budget, prefill_budget, prefill_budget // 2, constrained_budget), eligible
        # A prompt that must fit one step would wait for ever behind decodes: it goes first.
        prompts = [r for r in eligible if len(r.tokens) + r.pending - r.submitted > 1] or arrivals
        first_tokens = min(len(prompts[0].tokens) - prompts[0].submitted, options.max_num_tokens) if prompts else 0
        return StepDraft(claims, rows, options.max_num_tokens - first_tokens, first_tokens), eligible

    def _eligible(self) -> tuple[list[Request], int, int]:
        """The running requests that can go on, and how many of them decode: those with the budget of all, and those apart."""
        latest, parted, decodes, apart = self._latest_sampling, self._parts_decodes, 0, 0
        eligible: list[Request] = []
        for request in self.running:
            pending = request.pending
            goal = len(request.tokens) + pending
            if goal >= request.limit or (pending and (latest is None or request.constrained)):
                continue
            if latest is not None and request.sampled_in > latest and self._in_slot(request):
                continue
            eligible.append(request)
            if goal - request.submitted == 1:
                if parted and request.constrained:
                    apart += 1
                else:
                    decodes += 1
        return eligible, decodes, apart

    def _arrivals(self, claims: Claims) -> list[Request]:
        """The waiting requests for which there are slots and blocks now (without what the prefix cache saves)."""
        arrivals: list[Request] = []
        left = self.pool.available - len(self.running) * self.kv.groups
        forecast = forecast_of(self.running, self.pool.available, self.options)
        for request in self.waiting:
            if request.grammar_row is not None or not claims.allow(request.adapter):  # nobody waits for these
                continue
            left -= self.kv.peak_new_blocks(request, 0)
            first = not (arrivals or self.running)
            fits = forecast is None or forecast.add_if_fits(len(request.tokens), request.to_go, force=first)
            if request.in_flight or len(arrivals) == len(self._slots) or not fits or (left < 0 and not first):
                break
            arrivals.append(request)
        return arrivals

    def _continue_running(self, draft: StepDraft, eligible: list[Request]) -> None:
        """Rows for the running requests, in order of arrival."""
        decode_rows, parted = draft.decode_rows, self._parts_decodes
        for number, request in enumerate(eligible):
            if not draft.rows_left:
                return
            start, tokens = request.submitted, request.tokens
            if len(tokens) + request.pending - start > 1:
                self._continue_prompt(draft, request, islice(eligible, number + 1, None))
                continue
            apart = parted and request.constrained
            budget = draft.constrained_budget if apart else draft.decode_budget
            if not budget or request.slot < 0:  # preempted for a request before it
                continue
            drafts = draft.drafts if request.decoding else 0
            ahead = drafts + draft.ahead
            blocks = self._blocks_of_decode(request, ahead) if start + request.drafted + ahead >= request.capacity else []
            if blocks is None:
                continue
            if drafts or request.drafted or request.matcher is not None:
                row = self._verifying_row(request, drafts, blocks)
            else:
                row = StepRow(request.slot, start, 1, [tokens[start]] if start < len(tokens) else [], blocks, True)
            request.submitted = start + 1
            request.pending += 1
            request.decoding, request.proposed = True, draft.propose
            if request.drafts or request.masks:
                request.drafts, request.masks = [], []
            decode_rows.append((request, row))
            draft.rows_left -= 1
            if apart:
                draft.constrained_budget -= 1
            else:
                draft.decode_budget -= 1

    def _verifying_row(self, request: Request, drafts: int, blocks: list[int]) -> StepRow:
        """The decode row of a request that has drafts, now or in flight, or a grammar."""
        start, tokens = request.submitted, request.tokens
        known = [tokens[start]] if start < len(tokens) and not request.drafted else []
        masks: list[bytes] = []
        if request.matcher is not None:
            masks = request.masks[: 1 + drafts] or [request.matcher.mask()]
        if drafts:  # the slot has them, unless the engine must know them
            known = known + (request.drafts[:drafts] + [NO_DRAFT] * drafts)[:drafts] if self._knows_drafts(request) else []
        row = StepRow(request.slot, start + request.drafted, 1 + drafts, known, blocks, True, masks, drafts, late=request.drafted)
        request.drafted += drafts
        return row

    def _knows_drafts(self, request: Request) -> bool:
        """Whether the engine must know the drafts of the request's rows: for the masks of its grammar, or since tokens do not
        return on the device to the stage that embeds them."""
        return request.constrained or self._token_lag is None

    def _blocks_of_decode(self, request: Request, ahead: int) -> list[int] | None:
        """The blocks that a decode row needs, and those of so many drafts as far as nobody else needs them; None where there is
        none for the row."""
        known = request.capacity
        start = min(request.submitted + request.drafted, request.limit - 2)
        wanted = min(start + ahead, request.limit - 2)
        if wanted < known:
            return []
        self.kv.register(request)
        positions = start + 1 - request.submitted
        if start >= known and self._fitting_positions(request, positions) < positions:
            return None
        return self.kv.take_ahead(request, start + 1, wanted + 1, kept=len(self.running))

    def _continue_prompt(self, draft: StepDraft, request: Request, behind: Iterator[Request]) -> None:
        if request.slot < 0:
            return
        left = len(request.tokens) - request.submitted
        count = self._fitting_positions(request, self._chunk(draft, request, left, behind))
        if count:
            self._add_chunk(draft, request, count)
        else:
            draft.reserved_blocks += self.kv.peak_new_blocks(request, request.capacity)

    def _admit_waiting(self, draft: StepDraft, now: int) -> None:
        """Give slots to waiting requests, in order, as long as there are tokens, slots and blocks, and ADMITTED_TOKENS are not
        reached. While the first has its prefix come from host memory in parts, others may pass it that need no such load, and leave
        it its slot and blocks, or are preempted (`_stop_passer`); the next load begins when it is admitted."""
        pool, loading = self.pool, False
        draft.prefill_budget += (draft.decode_budget + draft.constrained_budget) * (1 + draft.drafts)
        forecast = forecast_of(self.running, pool.available, self.options) if self.waiting and self._slots else None
        admitted = 0
        while len(self._slots) > loading and draft.rows_left and draft.prefill_budget and admitted < ADMITTED_TOKENS:
            admissible = (each for each in self.waiting if each.grammar_row is None and not (loading and each.loads))
            request = next((each for each in admissible if draft.claims.allow(each.adapter)), None)
            if request is None or request.in_flight:  # preempted, and its last tokens are not known yet
                return
            hit = self.kv.prefix_hit(request)
            loads = bool(self.running) and not self.kv.loads_at_once(request, hit)
            request.loads = loads and loading
            if request.loads:
                admitted += len(request.tokens)  # hashed
                continue
            cached = self.kv.unreferenced(hit)
            # One block of each group is kept for each running request, so that the new one does not preempt another at once.
            reserved = draft.reserved_blocks + len(self.running) * self.kv.groups
            shared = self.kv.positions_of(hit)
            left = len(request.tokens) - shared
            if (left > draft.prefill_budget and not self.kv.may_split(request)) or not draft.fitting(shared, left):
                return
            lacks = bool(self.running) and self.kv.peak_new_blocks(request, shared) + cached + reserved > pool.available
            if lacks or not (forecast is None or forecast.add_if_fits(left, request.to_go, shared=cached, force=not self.running)):
                self._lacks = request is self._loading
                return
            if loads:
                self.kv.load_part(request, hit)
                request.loads, request.to_compute, loading, self._loading = True, left, True, request
                draft.reserved_blocks += self.kv.peak_new_blocks(request, shared) + cached
                continue
            self._admit(draft, request, hit, now)
            admitted += len(request.tokens)
            count = self._chunk(draft, request, left, iter(())) or min(left, draft.prefill_budget, FIRST_CHUNK)
            self._add_chunk(draft, request, self._fitting_positions(request, count))

    def _stop_passer(self) -> None:
        """Preempt the last of those that have passed a request while its prefix came, where it lacks the blocks they have taken."""
        lacks, self._lacks, passed = self._lacks, False, self._loading
        if lacks and passed is not None and passed in self.waiting and self.running and self.running[-1].arrival > passed.arrival:
            self.preempt(self.running[-1])

    def _admit(self, draft: StepDraft, request: Request, hit: list[int], now: int) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=lambda each: each.arrival)  # others may have passed it while it loaded its prefix
        request.slot = self._slots.pop()
        draft.claims.admit(request.adapter)
        from_host = self.kv.share(request, hit)
        request.to_compute = None
        request.submitted = request.shared
        request.chunk_cap = max_chunk(len(request.tokens) - request.submitted, self.options.pipeline_stages)
        draft.assignments.append(request.assignment())
        if not request.was_admitted:
            request.was_admitted, request.scheduled = True, now
            request.cached_tokens = request.submitted
            self.counters.prompt_tokens += request.prompt_length
            self.counters.prefix_hits += request.submitted
            self.counters.host_hits += from_host
            self.counters.prefix_queries += request.prompt_length if self.kv.may_hit(request) else 0

    def _chunk(self, draft: StepDraft, request: Request, left: int, behind: Iterator[Request]) -> int:
        """How many of the `left` known tokens the next row takes. behind: the running requests that came later."""
        budget = draft.prefill_budget
        if not self.kv.may_split(request):
            return left if left <= budget else 0
        if budget and left > min(self.options.max_num_tokens // 2, draft.long):  # it would fill half of a step, and more
            budget = max(budget - self._left_to_shorter(draft, left, behind), 0)
        return draft.fitting(request.submitted, min(left, budget, request.chunk_cap))

    def _left_to_shorter(self, draft: StepDraft, left: int, behind: Iterator[Request]) -> int:
        """Tokens of the step that a long prompt, of which so many are left, leaves to much shorter ones behind it: else each of
        them would wait until all of it is computed. At most half of the step's, so that it takes twice as long at most, and no
        more than they can take: a pipeline's step has few rows."""
        if draft.arrivals is None:
            draft.arrivals = self._arrivals(draft.claims)
        shorter, first, rows = 0, 0, draft.rows_left - 1
        for other in chain(behind, (request for request in draft.arrivals if request.slot < 0)):
            if not rows:
                break
            tokens = len(other.tokens) - other.submitted
            if tokens > left // SHORTER and other.slot < 0:
                tokens = self._to_compute(draft, other)
            if 1 < tokens <= left // SHORTER:
                cap = max_chunk(tokens, self.options.pipeline_stages) if other.slot < 0 else other.chunk_cap
                shorter, first, rows = shorter + first + min(tokens, cap), 0, rows - 1
                if shorter >= draft.for_shorter:
                    return draft.for_shorter
            elif other.slot < 0:
                first += FIRST_CHUNK
        return shorter

    def _to_compute(self, draft: StepDraft, request: Request) -> int:
        """Of the tokens of a request that waits, those that the prefix cache lacked when it was asked, once; all of them where it
        was not, since hashing them takes time."""
        if request.to_compute is None and draft.hash_budget > 0 and self.kv.may_hit(request):
            draft.hash_budget -= len(request.tokens)
            request.to_compute = len(request.tokens) - self.kv.positions_of(self.kv.prefix_hit(request))
        return len(request.tokens) if request.to_compute is None else request.to_compute

    def _add_chunk(self, draft: StepDraft, request: Request, count: int) -> None:
        start, count = request.submitted, self.kv.until_kept(request, count)
        end = request.submitted = start + count
        self.kv.keep_state(request)
        samples = end == len(request.tokens)
        wanted = min(end + draft.ahead, request.limit - 1) if samples else end
        blocks = self.kv.take_ahead(request, end, wanted, kept=len(self.running))
        masks = [request.matcher.mask()] if samples and request.matcher is not None else []
        row = StepRow(request.slot, start, count, request.tokens[start:end], blocks, samples, masks)
        request.pending += samples
        request.decoding, request.drafts, request.masks, request.proposed = samples, [], [], draft.propose
        (draft.decode_rows if count == 1 else draft.prefill_rows).append((request, row))
        draft.take_chunk(start, count)
        draft.reserved_blocks += max(0, self.kv.peak_new_blocks(request, request.capacity))  # drafts have blocks ahead

    def _close(self, draft: StepDraft, rows: list[tuple[Request, StepRow]]) -> Step:
        self.counters.steps += 1
        number = self.counters.steps
        for request, row in rows:
            request.in_flight += 1
            if row.samples:
                request.sampled_in = number
        for request, _ in draft.prefill_rows:
            self.kv.register(request)  # not earlier: a row must not share what another row of its own step computes
        batch = StepBatch(self._released, draft.assignments, [row for _, row in rows], draft.propose)
        step = Step(self.counters.steps, [batch])
        if self.options.state_snapshots:
            batch.state_copies = self.kv.states.take_copies()
            batch.saved_states, batch.loaded_states = self.kv.states.host.take_copies()
        if self.options.host_blocks:
            batch.saved, batch.loaded = self.pool.host.take_copies()
        if self.adapters.slots.occupants:
            batch.adapted = any(request.adapter is not None for request, _ in rows)
            step.before += self.adapters.slots.works()
        self._in_flight.append((step.number, rows))
        self._released = []
        return step

    # ---- results -----------------------------------------------------------------------------------------------------

    def process_result(self, result: StepResult) -> Messages:
        """As `StepScheduler`."""
        number, rows = self._in_flight[0] if self._in_flight else (None, [])
        if number != result.number or len(result.batches) != 1 or len(result.batches[0]) != len(rows):
            raise StepDiverged(
                f"the result of step {result.number} came out of order, with {[len(batch) for batch in result.batches]} rows",
                held=f"the oldest step in flight is {number}, with {len(rows)} rows",
            )
        self._in_flight.popleft()
        messages: Messages = []
        ended: list[Request] = []
        plain = NextTokens([], [])
        ids, tokens = plain.request_ids, plain.tokens
        for (request, row), output in zip(rows, result.batches[0], strict=True):
            if request.ended:
                continue
            if type(output) is int and row.samples and not row.drafts and request.take_token(output):
                ids.append(request.id)
                tokens.append(output)
            else:
                self._process_row(request, row, row_result(output), messages, ended)
        self.counters.generation_tokens += len(tokens)
        if tokens:
            messages.append(plain)
        self._remove(ended)
        return messages + self.process_grammar_calls() if self.grammar_calls.busy else messages

    def _process_row(self, request: Request, row: StepRow, result: RowResult, messages: Messages, ended: list[Request]) -> None:
        """The result of a row, which may be any."""
        if result.prompt_logprobs:
            request.take_prompt_logprobs(row.start, result.prompt_logprobs)
        if not row.samples:
            request.in_flight -= 1
            return
        if not (tokens := result.tokens):
            raise StepDiverged(f"a step sampled no token for request {request.id}", held="its row was to sample one")
        if min(tokens) < 0:
            ended.append(request)
            self.counters.nonfinite_requests += 1
            messages.append(request.without_token())
            return
        if row.drafts or result.drafted:
            self._count_drafts(row, result)
        if request.slot >= 0:  # else it was preempted
            request.drafted -= row.drafts
            request.submitted += len(tokens) - 1
        if request.matcher is not None and not request.stops_at(tokens[0]):
            request.grammar_row = result
            work = partial(request.follow, tokens, result.drafts)
            self.grammar_calls.begin(request, work, spent=request.grammar_seconds, quick=request.grammar_quick)
            return
        messages.append(self._take_tokens(request, result, ended))
        request.drafts = result.drafts

    def process_grammar_calls(self) -> Messages:
        """As `StepScheduler`."""
        return self.take_grammar_calls(self.grammar_calls.collect())

    def take_grammar_calls(self, calls: Sequence[GrammarCall]) -> Messages:
        """`process_grammar_calls`, of calls that have been collected."""
        messages: Messages = []
        ended: list[Request] = []
        for call in calls:
            request: Request = call.owner
            row_result, request.grammar_row = request.grammar_row, None
            if request.ended or row_result is None:
                continue
            request.grammar_seconds += call.seconds - TOKEN_SECONDS
            request.grammar_quick = call.seconds < SLOW_SECONDS
            if call.error is None:
                followed: Followed = call.value
                messages.append(self._take_tokens(request, row_result, ended, complete_at=followed.complete_at))
                request.drafts, request.masks = followed.drafts, followed.masks
                continue
            request.ended = True
            ended.append(request)
            messages.append(RequestRejected(request.id, call.error.to_wire()))
        self._remove(ended)
        return messages

    def _count_drafts(self, row: StepRow, result: RowResult) -> None:
        """Count the drafts of a row that were verified, and those that were accepted."""
        if row.drafts:
            self.verified(row.drafts, len(result.tokens) - 1)
        if result.drafted:
            self.counters.drafts += 1
            self.counters.draft_tokens += result.drafted
            for position in range(len(result.tokens) - 1):
                self.counters.accepted_tokens[position] += 1

    def _take_tokens(
        self, request: Request, result: RowResult, ended: list[Request], *, complete_at: int | None = None
    ) -> RequestUpdate:
        request.in_flight -= 1
        request.pending -= 1
        update = request.take_tokens(result, complete_at=complete_at)
        self.counters.generation_tokens += len(update.tokens)
        if request.ended:
            ended.append(request)
        return update

    # ---- blocks and slots --------------------------------------------------------------------------------------------

    def _fitting_positions(self, request: Request, count: int) -> int:
        """For how many of the next `count` positions there are blocks; later requests are preempted for them."""
        self.kv.register(request)
        self.kv.release_out_of_window(request)
        needed = self.kv.blocks_for(request.submitted + count - request.capacity) * self.kv.groups
        while self.pool.available < needed and self.running[-1] is not request:
            self.preempt(self.running[-1])
        more = self.pool.available // self.kv.groups * self.options.block_size
        fitting = min(count, request.capacity + more - request.submitted)
        return fitting if fitting == count or self.kv.may_split(request) else 0

    def preempt(self, request: Request) -> None:
        """Move the request that came last of the running ones back to the queue, behind those that it has passed."""
        self.running.pop()
        self._release(request)
        self.waiting.insert(sum(1 for _ in takewhile(lambda each: each.arrival < request.arrival, self.waiting)), request)
        self.counters.preemptions += 1

    def _release(self, request: Request) -> None:
        """Free its slot and blocks for the next step."""
        self.kv.release(request)
        self._released.append(request.slot)
        self._slots.append(request.slot)
        request.slot, request.submitted = -1, 0
        request.drafted, request.decoding, request.drafts, request.masks = 0, False, [], []

    def _remove(self, ended: list[Request]) -> None:
        if not ended:
            return
        for request in ended:
            del self._requests[request.id]
            if request.slot < 0:
                self._stop_waiting(request)
            else:
                self._release(request)
        self.running = [request for request in self.running if not request.ended]
