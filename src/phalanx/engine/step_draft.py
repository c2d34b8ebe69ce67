# SPDX-License-Identifier: Apache-2.0
"""A step that is being built (`StepDraft`), and how many of the decodes of running requests one step of a pipeline may hold
(`DecodeCounts`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.engine.adapters import Claims
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import SlotAssignment, StepRow
from phalanx.engine.request import Request
from phalanx.engine.step_times import StepLoad, StepTimes, prompt_pairs

ADMITTED_TOKENS = 2**14
"""Tokens of the prompts that one step admits, at least one, also those of the prefix cache: hashing them takes 5 ms, and every
running request waits for it. 48 completions of one prompt of 20,000 tokens took 265 ms."""


@dataclass
class DecodeCounts:
    """Numbers of running requests whose next row is a decode.

    all: whether they can go on now or not. ready: that can. last: ready ones whose next token is their last one. without_block:
    ready ones that need no new KV block for it.
    """

    all: int = 0
    ready: int = 0
    last: int = 0
    without_block: int = 0

    @classmethod
    def of(cls, running: Iterable[Request], eligible: Iterable[Request], *, apart: bool) -> tuple[DecodeCounts, DecodeCounts]:
        """Of the running requests, of which these can go on: first those that decode with the budget of all; then, with `apart`,
        the constrained ones."""
        plain, constrained, can_go_on = cls(), cls(), set(eligible)
        for request in running:
            goal = len(request.tokens) + request.pending
            if goal >= request.limit or goal - request.submitted != 1:
                continue
            decodes = constrained if apart and request.constrained else plain
            decodes.all += 1
            if request in can_go_on:
                decodes.ready += 1
                decodes.last += goal + 1 == request.limit
                decodes.without_block += request.submitted < request.capacity
        return plain, constrained

    def share(self, stages: int, *, prompts_wait: bool) -> int:
        """Those that one step may hold. A step full of decodes takes no prompt, and while it is in flight the steps with prompts,
        which take much longer, pass the stages one after the other.

        Where no prompt waits, to spread last tokens would only take further steps: requests may end together.
        """
        spread = self.all if prompts_wait else self.all - self.last
        return min(self.ready, -(-spread // stages) + self.all - spread)


AUTO_FACTOR = 4.0
"""With max_decode_gap "auto", a step with prompts takes at most so many times as long as without."""
HEADROOM = 0.97
"""The part of a bound that a step's predicted time takes."""
LEAST_CHUNK = 16
"""Tokens of prompts that each step computes, whatever it takes: prompts go on, too."""
KEPT_FACTOR = 1.25
"""Where a step of LEAST_CHUNK takes longer than the bound, so that no step keeps it: how many times as long a step may take. Then
most of its time is that of the decodes, or of one token's way through a long context, and more tokens cost little."""


class StepPace:
    """What prompts may add to a step that decodes wait for: as much as keeps its predicted time below a bound. bound: seconds.
    decodes: the load of the step without prompts. load: of the step so far."""

    def __init__(self, times: StepTimes, bound: float, load: StepLoad) -> None:
        self._times, self.bound, self.decodes, self.load = times, bound, load, load
        self._limit = HEADROOM * bound / times.margin
        self._begun = False
        self.shortest: float | None = None
        """Seconds of the shortest step with a prompt, where it takes longer than the bound."""

    def fit(self, start: int, most: int) -> int:
        """How many tokens of a prompt, from `start` on, the step can take, at most `most`; at least LEAST_CHUNK where it has none
        of a prompt yet."""
        limit = self._limit
        if not self._begun and most and self.bound:
            least = self._times.seconds(self._with(start, min(LEAST_CHUNK, most))) or 0.0
            if least > self.bound:
                self.shortest, limit = least, KEPT_FACTOR * least
            elif least > limit:  # it keeps the bound, without what is left for the noise of steps
                limit = min(self.bound, KEPT_FACTOR * least)
        fitting, beyond = 0, most + 1
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            seconds = self._times.seconds(self._with(start, middle))
            if seconds is not None and seconds <= limit:
                fitting = middle
            else:
                beyond = middle
        return fitting if self._begun else max(fitting, min(LEAST_CHUNK, most))

    def take(self, start: int, count: int) -> None:
        """The step takes this chunk."""
        self.load, self._begun = self._with(start, count), True

    def _with(self, start: int, count: int) -> StepLoad:
        load = self.load
        return StepLoad(
            load.tokens + count, load.kv_tokens, load.pairs + prompt_pairs(start, count, self._times.prompt_wave), load.drafts,
            max(load.keys, start + count),
        )  # fmt: skip


class GapPrice(NamedTuple):
    """What a prompt of `tokens` takes beside `decodes` requests: seconds and steps to its first token, and seconds of its longest
    step, for which each stream waits."""

    tokens: int
    decodes: int
    seconds: float
    steps: int
    gap: float

    @classmethod
    def of(
        cls, times: StepTimes, tokens: int, decodes: StepLoad, max_num_tokens: int, bound: float | None
    ) -> GapPrice | None:  # fmt: skip
        """Predicted from the steps that were measured here; None where they do not tell. decodes: the load of a step without
        prompts. bound: seconds of a step; None: steps are filled."""
        done = steps = 0
        total = longest = 0.0
        while done < tokens:
            most = min(tokens - done, max(max_num_tokens - decodes.tokens, 1))
            pace = StepPace(times, math.inf if bound is None else bound, decodes)
            count = most if bound is None else pace.fit(done, most)
            pace.take(done, count)
            seconds = times.seconds(pace.load)
            if seconds is None:
                return None
            done, steps, total, longest = done + count, steps + 1, total + seconds, max(longest, seconds)
        return cls(tokens, decodes.tokens, total, steps, longest)


def price_line(times: StepTimes, pace: StepPace, most_tokens: int, max_num_tokens: int) -> str:
    """The price of a bound on gaps in one line, for the longest prompt of up to most_tokens of which the measured steps tell. pace:
    of a step that was bounded. Empty where too little has been measured."""
    tokens = most_tokens
    while tokens > max_num_tokens // 2:
        bounded, free = (GapPrice.of(times, tokens, pace.decodes, max_num_tokens, each) for each in (pace.bound, None))
        if bounded is not None and free is not None:
            return (
                f"price of the bound of {pace.bound * 1e3:.0f} ms on gaps, predicted by the steps measured here: a prompt of "
                f"{tokens:,} tokens beside {bounded.decodes} streams takes {bounded.seconds:.2f} s in {bounded.steps} steps "
                f"({free.seconds:.2f} s in {free.steps} without); streams wait {bounded.gap * 1e3:.0f} ms at most "
                f"({free.gap * 1e3:.0f} ms without)"
            )
        tokens //= 2
    return ""


@dataclass
class StepDraft:
    """A step that is being built. Tokens have budgets of their own, so that neither decodes nor prefills starve the other."""

    claims: Claims
    rows_left: int
    decode_budget: int
    prefill_budget: int
    for_shorter: int = 0  # of prefill_budget: what a long prompt leaves to much shorter ones behind it, at most
    constrained_budget: int = 0  # as decode_budget, of constrained requests where the tokens of others return on the device
    pace: StepPace | None = None  # where decodes wait for the step, and their gaps are bounded
    long: int = 1 << 62  # of a prompt of more tokens, the step leaves some to shorter ones
    drafts: int = 0  # that each decode row verifies; the budgets of decodes count rows
    propose: int = 0
    ahead: int = 0  # positions behind a row that samples at which what it proposes has keys and values
    hash_budget: int = ADMITTED_TOKENS  # tokens of waiting prompts that may be hashed, to ask for their prefix hits
    arrivals: list[Request] | None = None  # that could be admitted when the step was begun; None: not asked yet
    assignments: list[SlotAssignment] = field(default_factory=list)
    decode_rows: list[tuple[Request, StepRow]] = field(default_factory=list)
    prefill_rows: list[tuple[Request, StepRow]] = field(default_factory=list)
    reserved_blocks: int = 0  # that running prompts will still take

    def take_pace(
        self, times: StepTimes, options: SchedulerOptions, running: Sequence[Request], eligible: Sequence[Request], *,
        waiting: bool,
    ) -> StepPace | None:  # fmt: skip
        """Bound the time of the step by options.max_decode_gap, where requests decode and others have prompts, in slots or waiting.
        Returns `pace`. In a pipeline, the next step of a request ends as many steps later as there are stages."""
        if options.max_decode_gap is None:
            return None
        prompts = waiting or any(not request.decoding for request in eligible)
        if not prompts or not any(request.decoding for request in running):
            return None
        decodes, each = [request for request in eligible if request.decoding], 1 + self.drafts
        rows = min(len(decodes), self.decode_budget + self.constrained_budget)
        context = sum(request.submitted + each for request in decodes)
        load = StepLoad(rows * each, context * each * rows // max(len(decodes), 1), 0, self.propose)
        if options.max_decode_gap == "auto":
            bound = AUTO_FACTOR * (times.seconds(load) or 0.0)
        else:
            bound = options.max_decode_gap / options.pipeline_stages
        self.pace = StepPace(times, bound, load)
        oldest = next((request.submitted for request in eligible if not request.decoding), 0)
        self.prefill_budget = self.pace.fit(oldest, self.prefill_budget)
        self.long = self.prefill_budget // 2
        self.for_shorter = min(self.for_shorter, self.long)
        return self.pace

    def fitting(self, start: int, count: int) -> int:
        """How many of so many tokens of a prompt, from `start` on, the step has time for."""
        return count if self.pace is None or not count else self.pace.fit(start, count)

    def take_chunk(self, start: int, count: int) -> None:
        """Take a row of so many tokens of a prompt."""
        self.rows_left -= 1
        self.prefill_budget -= count
        if self.pace is not None:
            self.pace.take(start, count)

    def take_drafts(
        self, options: SchedulerOptions, eligible: Sequence[Request], choose: Callable[[int], int], *, waiting: bool
    ) -> None:  # fmt: skip
        """Decide how many drafts the decode rows of the step verify, and how many are proposed. choose: see
        `StepScheduler.choose_drafts`. waiting: requests wait for a slot."""
        proposed = [request.proposed for request in eligible if request.decoding]
        rows = min(len(proposed), self.rows_left, self.decode_budget + self.constrained_budget)
        self.propose = choose(max(rows, 1))
        self.ahead = self.propose if options.drafts_keep_kv else 0
        if rows:
            prompts = waiting or any(len(r.tokens) + r.pending - r.submitted > 1 for r in eligible)
            most = min(self.propose, max(proposed))
            self._verify(most, rows, prompts=prompts, chunked=options.chunked_prefill)

    def _verify(self, most: int, rows: int, *, prompts: bool, chunked: bool) -> None:
        """Let each of so many decode rows verify drafts, at most `most`: no more than leave each of these rows its place, and
        prompts half of the step."""
        if chunked:
            budget = self.prefill_budget // 2 if prompts else self.prefill_budget
            self.drafts = min(most, budget // rows)
            self.prefill_budget -= self.drafts * rows
            self.for_shorter = min(self.for_shorter, self.prefill_budget // 2)
        else:
            self.drafts = min(most, self.decode_budget // rows - 1)
            self.decode_budget //= 1 + self.drafts
