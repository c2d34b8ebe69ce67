# SPDX-License-Identifier: Apache-2.0
"""`StepTimes`: how long steps take here, by what they compute. Measured once, for all that decides by it: how many drafts rows
verify (`draft_depth`), how long prompts are cut (`step_draft.StepPace`), and when a step counts as stuck (`limit`). Pure: the time
is an argument.

The prediction is linear in what a step computes,

    seconds = c_0 + c_1 tokens + c_2 kv_tokens + c_3 pairs + c_4 drafts + c_5 keys,    no c below 0

fitted by least squares of relative errors to the steps that have run, the older ones less and less. Decode steps, whose time is no
straight line, have a table by their numbers of tokens and of drafts beside it.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.engine.messages import Step, StepBatch

LEAST_LIMIT, LIMIT_FACTOR = 5.0, 10.0
"""A step counts as stuck after so many times its predicted time, and so many seconds at least. A clock at a third of its frequency
takes 3 times as long, and a core that is shared with a neighbour twice as long again."""
SURE_STEPS = 16
"""Steps that must have run before one has a limit: the first ones load kernels and connect ranks."""
REACH = 2.0
"""The prediction holds for steps of up to so many times what has been measured."""
WEIGHT_LEFT = 0.99
"""What one more step leaves of the weight of those before it."""
TIME_WEIGHT = 0.2
"""What part a new time has in the average of the decode steps of its size."""
FORGET_STEPS = 2048
"""After so many steps the time of a size that was not met is forgotten: requests have grown longer meanwhile."""
LATE_RATIOS, LATE_PERCENTILE = 64, 0.97
"""From how many of the latest steps with prompts, and as which percentile, `margin` is taken."""
LATEST_RATIOS = 8
"""Of so many it is the second largest, where that is more: as contexts grow, steps may take longer and longer than the fit says."""
RUN_STEPS = 16
"""So many decode steps of one size, one after the other, are fitted as one: a step of a small model takes less than the fit of each
would."""


def prompt_pairs(start: int, count: int, wave: tuple[int, int]) -> int:
    """Pairs of `count` tokens of a prompt, from `start` on, with the keys that each sees. wave: `RankFacts.prompt_wave`; where it
    is there, as many as attention takes the time for: a tile that begins another wave of programs takes as long as all of it, and
    the keys of fewer tiles are divided by how many times they fit into one."""
    at_once, tile = wave
    if at_once and count:
        tiles = -(-count // tile)
        taken = at_once * tile // (at_once // tiles) if tiles <= at_once else -(-tiles // at_once) * at_once * tile
        return taken * (2 * start + count + 1) // 2
    return count * (2 * start + count + 1) // 2


class StepLoad(NamedTuple):
    """What one step computes, of the dp index that has the most. tokens: all. kv_tokens: that decode rows read. pairs: of prompt
    tokens with the keys that each sees, as `prompt_pairs` counts them. drafts: that it proposes for a row, which may take a pass of
    a network each. keys: that the last token of a prompt sees, of the one that has the most: a kernel goes through them one after
    the other, however few tokens the step has of the prompt."""

    tokens: int
    kv_tokens: int
    pairs: int
    drafts: int = 0
    keys: int = 0

    @classmethod
    def of(cls, step: Step, wave: tuple[int, int] = (0, 0)) -> StepLoad:
        """Each field is that of the index that has the most of it. wave: as of `prompt_pairs`."""
        if len(step.batches) == 1:
            return cls._of_batch(step.batches[0], wave)
        return cls(*map(max, zip(*(cls._of_batch(batch, wave) for batch in step.batches), strict=True)))

    @classmethod
    def _of_batch(cls, batch: StepBatch, wave: tuple[int, int]) -> StepLoad:
        rows = batch.rows
        tokens = sum([row.count for row in rows])
        if tokens == len(rows):  # decode rows without drafts: by far the most steps
            return cls(tokens, sum([row.start for row in rows]) + tokens, 0, batch.propose)
        kv_tokens = pairs = keys = 0
        for row in rows:
            count, start = row.count, row.start
            if count == 1 or row.drafts:
                kv_tokens += count * (start + count)
            else:
                pairs += prompt_pairs(start, count, wave)
                keys = max(keys, start + count)
        return cls(tokens, kv_tokens, pairs, batch.propose, keys)

    @property
    def attention(self) -> int:
        return self.kv_tokens + self.pairs


@dataclass(slots=True)
class _Time:
    seconds: float
    step: int


@dataclass(slots=True)
class _Run:
    """Decode steps of one size, one after the other. longest: seconds that count of one of them. kv_tokens, seconds: of all."""

    tokens: int
    drafts: int
    time: _Time
    longest: float = math.inf
    steps: int = 0
    kv_tokens: int = 0
    seconds: float = 0.0


class StepTimes:
    """Of one engine. step_timeout: the limit of a step whose time is unknown, and the most of any. prompt_wave: see `RankFacts`."""

    def __init__(self, step_timeout: float = math.inf, prompt_wave: tuple[int, int] = (0, 0)) -> None:
        self._step_timeout, self.prompt_wave = step_timeout, prompt_wave
        self.steps = 0
        """That have ended."""
        self._decodes: dict[tuple[int, int], _Time] = {}  # by the size of their tokens, and drafts
        self._fit = _Fit()
        self._run: _Run | None = None  # not in the fit yet
        self._measured = 0  # steps in the fit
        self._most_tokens = self._most_attention = 0
        self._submitted: dict[int, tuple[StepLoad | None, float, float]] = {}  # in flight, the oldest first
        self._ended_at = 0.0
        self._ratios: deque[float] = deque()
        self._sorted_ratios: list[float] = []

    # ---- what is measured --------------------------------------------------------------------------------------------

    def submitted(self, number: int, load: StepLoad | None, now: float) -> float:
        """A step is submitted. load: None where it does other work, too, so that its time tells nothing. Returns its limit."""
        limit = self.limit(load)
        self._submitted[number] = None if load is None or not load.tokens else load, now, limit
        return limit

    def ended(self, number: int, now: float, *, alone: bool = True) -> None:
        """The result of a step came in. alone: no other did at the same time, so that this is when the step ended."""
        load, began, _ = self._submitted.pop(number, (None, now, 0.0))
        seconds = now - max(began, self._ended_at)
        self._ended_at = now
        self.steps += 1
        if load is None or not alone or seconds <= 0:
            return
        run = self._run
        if load.pairs:
            self._prompts_ended(load, seconds)
            return
        if run is None or run.tokens != load.tokens or run.drafts != load.drafts or run.steps == RUN_STEPS:
            run = self._begin_run(load, seconds)
        run.time.seconds += TIME_WEIGHT * (min(seconds, 2 * run.time.seconds) - run.time.seconds)
        run.time.step = self.steps
        run.steps += 1
        run.kv_tokens += load.kv_tokens
        run.seconds += seconds if seconds <= run.longest else max(run.longest, seconds / 10)
        self._met(load)
        if self._measured < SURE_STEPS:
            self._end_run()

    def _prompts_ended(self, load: StepLoad, seconds: float) -> None:
        self._end_run()
        if self._measured >= SURE_STEPS:
            self._compared(seconds / max(self._fit.seconds(load), 1e-6))
        self._fit.add(load, max(min(seconds, self._longest(load)), seconds / 10))
        self._measured += 1
        self._met(load)

    def _begin_run(self, load: StepLoad, seconds: float) -> _Run:
        self._end_run()
        time = self._decodes.setdefault((_size(load.tokens), load.drafts), _Time(seconds, self.steps))
        run = self._run = _Run(load.tokens, load.drafts, time, self._longest(load))
        return run

    def _end_run(self) -> None:
        """Take the run into the fit: the mean of its steps counts as often as there are."""
        run, self._run = self._run, None
        if run is not None:
            load = StepLoad(run.tokens, run.kv_tokens // run.steps, 0, run.drafts)
            self._fit.add(load, run.seconds / run.steps, run.steps)
            self._measured += run.steps

    def _longest(self, load: StepLoad) -> float:
        """What counts of the time of a step, at most: one that waited for something else, or whose result was seen late, tells
        little. But what was predicted may be wrong: a tenth of its time counts at least."""
        predicted = self._predicted(load)
        return math.inf if predicted is None else 3 * predicted

    def _met(self, load: StepLoad) -> None:
        if load.tokens > self._most_tokens:
            self._most_tokens = load.tokens
        if load.attention > self._most_attention:
            self._most_attention = load.attention

    def _compared(self, ratio: float) -> None:
        if len(self._ratios) == LATE_RATIOS:
            self._sorted_ratios.remove(self._ratios.popleft())
        self._ratios.append(ratio)
        insort(self._sorted_ratios, ratio)

    # ---- what is predicted -------------------------------------------------------------------------------------------

    def seconds(self, load: StepLoad) -> float | None:
        """How long a step takes; None where too little was measured to tell, as of decodes after nothing but prompts."""
        self._end_run()
        return self._predicted(load)

    def _predicted(self, load: StepLoad) -> float | None:
        """`seconds`, without what is not in the fit yet."""
        return self._fit.seconds(load) or None if self._measured >= SURE_STEPS and self._reaches(load) else None

    def limit(self, load: StepLoad | None) -> float:
        """Seconds after which a step is stuck. load: as in `submitted`."""
        seconds = None if load is None else self._predicted(load)
        return self._step_timeout if seconds is None else min(max(LEAST_LIMIT, LIMIT_FACTOR * seconds), self._step_timeout)

    def oldest(self, now: float) -> tuple[int, float, float] | None:
        """The number of the oldest step in flight, for how many seconds it has run, and its limit; None where there is none."""
        for number, (_, began, limit) in self._submitted.items():
            return number, now - max(began, self._ended_at), limit
        return None

    @property
    def margin(self) -> float:
        """By what factor steps with prompts take longer than predicted, but for a few of them: 1 at least."""
        ratios, latest = self._sorted_ratios, [*self._ratios][-LATEST_RATIOS:]
        if not ratios:
            return 1.0
        return max(1.0, ratios[int(LATE_PERCENTILE * len(ratios))], sorted(latest)[-2] if len(latest) > 1 else 1.0)

    def _reaches(self, load: StepLoad) -> bool:
        return load.tokens <= REACH * self._most_tokens and load.attention <= REACH * self._most_attention

    def decode_seconds(self, tokens: int, drafts: int = 0) -> float:
        """The time of a step of so many tokens of decode rows that proposes so many drafts: the longest of what smaller ones take,
        too."""
        size = _size(tokens)
        return max(
            time.seconds for (other, its_drafts), time in self._decodes.items()
            if other <= size and its_drafts <= drafts and self._is_recent(time)
        )  # fmt: skip

    def knows_decodes(self, tokens: int) -> bool:
        """Whether a step of so many tokens of decode rows that proposes nothing was timed lately."""
        time = self._decodes.get((_size(tokens), 0))
        return time is not None and self._is_recent(time)

    def _is_recent(self, time: _Time) -> bool:
        return self.steps - time.step < FORGET_STEPS


class _Fit:
    """Least squares of relative errors, with coefficients of at least 0: by descent along one coordinate after the other, which
    goes on from step to step."""

    def __init__(self) -> None:
        self._c = [0.0] * 6
        self._squares = [[0.0] * 6 for _ in range(6)]  # sums of x_i x_j / seconds^2
        self._sums = [0.0] * 6  # of x_i / seconds

    def add(self, load: StepLoad, seconds: float, steps: int = 1) -> None:
        """So many steps, one after the other, took so long each."""
        x = [value / seconds for value in (1.0, *load)]
        left = WEIGHT_LEFT**steps
        weight = (1 - left) / (1 - WEIGHT_LEFT)  # of the steps together
        for i, row in enumerate(self._squares):
            at_i = weight * x[i]
            for j in range(6):
                row[j] = left * row[j] + at_i * x[j]
            self._sums[i] = left * self._sums[i] + at_i
        for _ in range(2):
            self._descend()

    def _descend(self) -> None:
        c, squares, sums = self._c, self._squares, self._sums
        for i, row in enumerate(squares):
            if row[i] > 1e-12:  # else no step of this kind was met for a long time, and what is known of it stays
                all_of_row = row[0] * c[0] + row[1] * c[1] + row[2] * c[2] + row[3] * c[3] + row[4] * c[4] + row[5] * c[5]
                c[i] = max(0.0, c[i] + (sums[i] - all_of_row) / row[i])

    def seconds(self, load: StepLoad) -> float:
        c = self._c
        tokens, kv_tokens, pairs, drafts, keys = load
        return c[0] + c[1] * tokens + c[2] * kv_tokens + c[3] * pairs + c[4] * drafts + c[5] * keys


_SIZES = [*range(1, 17), *range(24, 65, 8), *range(80, 257, 16), *range(288, 4097, 32)]
"""Steps of about so many tokens take the same time."""


def _size(tokens: int) -> int:
    size: int = _SIZES[min(bisect_right(_SIZES, tokens - 1), len(_SIZES) - 1)]
    return size
