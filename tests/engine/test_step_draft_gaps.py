# SPDX-License-Identifier: Apache-2.0
"""Gaps between the tokens of streams beside a long prompt, with the scheduler and its predictions on a simulated machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.messages import AddRequest, RequestUpdate, RowResult, Step, StepResult
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.engine.step_draft import LEAST_CHUNK, GapPrice, StepPace, price_line
from phalanx.engine.step_times import StepLoad, StepTimes

OPTIONS = SchedulerOptions(
    num_blocks=100_000, block_size=16, max_batch_size=64, max_num_tokens=8192, max_seq_len=300_000, prefix_caching=False
)
STREAMS = 16


def machine(load: StepLoad) -> float:
    """Seconds of a step: 8 ms of weights, then 20 us a token, and attention that grows with the context."""
    return max(8e-3, 20e-6 * load.tokens) + 1.5e-9 * load.kv_tokens + 0.5e-9 * load.pairs


@dataclass
class Run:
    """The scheduler on a simulated clock. gaps: between tokens of streams; first: when each request had its first token."""

    scheduler: Scheduler | DpScheduler
    noise: float = 0.05
    seconds: Callable[[StepLoad], float] = machine
    now: float = 0.0
    gaps: list[float] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.times = self.scheduler.times
        self._chance = random.Random(3)
        self._free, self._flight = 0.0, list[tuple[Step, float]]()

    def add(self, name: str, tokens: int, output: int) -> None:
        self.scheduler.add(AddRequest(name, [1 + len(name)] * tokens, SamplingParams(max_tokens=output)))

    def steps(self, until: Callable[[], bool]) -> Iterator[None]:
        """Run steps, two in flight, until something is so."""
        while not until():
            while (step := self.scheduler.schedule()) is not None:
                self.times.submitted(step.number, StepLoad.of(step, self.times.prompt_wave), self.now)
                self._free = max(self._free, self.now) + self.seconds(StepLoad.of(step)) * (1 + self.noise * self._chance.random())
                self._flight.append((step, self._free))
            step, end = self._flight.pop(0)
            self.now = end
            results = [[RowResult([1] if row.samples else []) for row in batch.rows] for batch in step.batches]
            for update in self.scheduler.process_result(StepResult(step.number, results)):
                assert isinstance(update, RequestUpdate)
                self._updated(update)
            self.times.ended(step.number, self.now)
            yield

    def _updated(self, update: RequestUpdate) -> None:
        name = update.request_id
        if update.tokens:
            self.first.setdefault(name, self.now)
            if name in self.latest:
                self.gaps.append(self.now - self.latest[name])
            self.latest[name] = self.now
        if update.finish_reason is not None:
            self.ended.add(name)
            self.latest.pop(name, None)


def with_streams(
    options: SchedulerOptions, *, noise: float = 0.05, indices: int = 1, seconds: Callable[[StepLoad], float] = machine,
    wave: tuple[int, int] = (0, 0),
) -> Run:  # fmt: skip
    """A run in which STREAMS requests decode, and steps are known."""
    scheduler = Scheduler(options) if indices == 1 else DpScheduler(options, indices)
    scheduler.times = StepTimes(prompt_wave=wave)
    run = Run(scheduler, noise, seconds)
    for number in range(STREAMS):
        run.add(f"stream {number}", 100, 50_000)
    for _ in run.steps(lambda: len(run.first) == STREAMS and run.times.steps > 200):
        pass
    run.gaps.clear()
    return run


@cache
def beside_a_long_prompt(bound: float | None, *, prompt: int = 200_000, indices: int = 1) -> tuple[list[float], float]:
    """The gaps of streams while a prompt is computed, sorted, and how long it took."""
    run = with_streams(replace(OPTIONS, max_decode_gap=bound), indices=indices)
    begin = run.now
    run.add("long prompt", prompt, 1)
    for _ in run.steps(lambda: "long prompt" in run.first):
        pass
    return sorted(run.gaps), run.first["long prompt"] - begin


@pytest.mark.parametrize(("bound", "indices"), [(0.05, 1), (0.1, 1), (0.2, 1), (0.1, 2)])
def test_gaps_stay_below_the_bound_beside_a_prompt_of_200_000_tokens(bound: float, indices: int) -> None:
    gaps, seconds = beside_a_long_prompt(bound, indices=indices)
    _, plain = beside_a_long_prompt(None)
    assert gaps[int(0.99 * len(gaps))] <= bound
    assert gaps[-1] <= 1.05 * bound
    assert gaps[3 * len(gaps) // 4] > 0.7 * bound, "the time is used"
    assert seconds < 2.5 * plain, "and the prompt goes on"


def machine_of_waves(load: StepLoad) -> float:
    """As 70B on two H200: the programs of 33 tiles of 16 tokens run at once, and attention takes as long for the first of them as
    for all; programs share the keys of as many tiles as fit into that twice or more."""
    tiles = -(-(load.tokens - STREAMS) // 16)
    waves = -(-tiles // 33) if tiles > 33 else tiles and 1 / (33 // tiles)
    return max(8e-3, 40e-6 * load.tokens) + 1.5e-9 * load.kv_tokens + 1.2e-6 * waves * load.keys


@pytest.mark.parametrize("bound", [0.05, 0.1, 0.2])
def test_gaps_stay_below_the_bound_where_attention_runs_in_waves(bound: float) -> None:
    (_, unknown, slower), (late, longest, seconds) = (beside_waves(bound, wave) for wave in ((0, 0), (33, 16)))
    assert late <= longest <= bound
    assert bound < 0.2 or unknown > 1.05 * bound, "the bound is not kept by chance"
    assert seconds < 1.01 * slower


def beside_waves(bound: float, wave: tuple[int, int]) -> tuple[float, float, float]:
    """The 99th percentile and the maximum of the gaps beside a long prompt, and how long that took."""
    run = with_streams(replace(OPTIONS, max_decode_gap=bound), seconds=machine_of_waves, wave=wave)
    begin = run.now
    run.add("long prompt", 150_000, 1)
    for _ in run.steps(lambda: "long prompt" in run.first):
        pass
    gaps = sorted(run.gaps)
    return gaps[int(0.99 * len(gaps))], gaps[-1], run.first["long prompt"] - begin


def test_without_a_bound_streams_wait_for_whole_steps() -> None:
    gaps, _ = beside_a_long_prompt(None)
    assert gaps[-1] > 0.5


def test_auto_is_four_times_what_the_step_takes_without_prompts() -> None:
    run = with_streams(replace(OPTIONS, max_decode_gap="auto"), noise=0.0)
    for _ in run.steps(lambda: len(run.gaps) > 20 * STREAMS):
        pass
    alone = max(run.gaps[-STREAMS:])
    run.gaps.clear()
    run.add("long prompt", 100_000, 1)
    for _ in run.steps(lambda: "long prompt" in run.first):
        pass
    assert max(run.gaps) < 4.4 * alone
    assert sorted(run.gaps)[len(run.gaps) // 2] > 2.5 * alone


def test_short_prompts_still_overtake_a_long_one() -> None:
    run = with_streams(replace(OPTIONS, max_decode_gap=0.1))
    run.add("long prompt", 200_000, 1)
    for _ in run.steps(lambda: run.times.steps > 260):
        pass
    begin = run.now
    for number in range(4):
        run.add(f"short {number}", 500, 1)
    for _ in run.steps(lambda: len(run.first) == STREAMS + 4):
        pass
    assert "long prompt" not in run.first
    assert run.now - begin < 1.0


def test_prompts_go_on_where_decodes_alone_take_longer_than_the_bound() -> None:
    run = Run(Scheduler(replace(OPTIONS, max_decode_gap=0.001)))
    run.add("stream", 100, 50_000)
    for _ in run.steps(lambda: run.times.steps > 50):
        pass
    begin = run.times.steps
    run.add("prompt", 10 * LEAST_CHUNK, 1)
    for _ in run.steps(lambda: "prompt" in run.ended):
        pass
    assert run.times.steps - begin <= 13


def test_a_prompt_goes_on_where_its_context_alone_takes_longer_than_the_bound() -> None:
    """A kernel that goes through all keys one after the other, as that of an H200 does: 50 ms at 83,000 of them, however few tokens
    a step has. Steps of LEAST_CHUNK would take minutes."""
    run = Run(
        Scheduler(replace(OPTIONS, max_decode_gap=0.05)), seconds=lambda load: machine(load._replace(pairs=0)) + max(
            0.5e-9 * load.pairs, 0.6e-6 * load.keys
        ),
    )  # fmt: skip
    for number in range(STREAMS):
        run.add(f"stream {number}", 100, 50_000)
    for _ in run.steps(lambda: len(run.first) == STREAMS and run.times.steps > 200):
        pass
    run.gaps.clear()
    begin = run.now
    run.add("long prompt", 150_000, 1)
    for _ in run.steps(lambda: "long prompt" in run.first):
        if run.times.steps > 3000:
            break
    assert run.first["long prompt"] - begin < 40.0
    assert max(run.gaps) < 1.6 * (8e-3 + 0.6e-6 * 150_000)
    pace = run.scheduler.pace  # type: ignore[union-attr]
    assert pace is not None
    assert pace.shortest is not None


def test_a_prompt_alone_is_not_cut() -> None:
    run = Run(Scheduler(replace(OPTIONS, max_decode_gap=0.01)))
    run.add("prompt", 8192 * 3, 1)
    for _ in run.steps(lambda: "prompt" in run.ended):
        pass
    assert run.times.steps == 3


def test_the_price_of_a_bound_is_predicted_and_told() -> None:
    """Before it is paid: prompts and gaps, beside what the machine takes."""
    times = StepTimes()
    now = 0.0
    for number, tokens in enumerate([16, 2048, 4096, 8192] * 20, start=1):
        load = StepLoad(tokens, STREAMS * 1000, tokens * tokens // 2)
        times.submitted(number, load, now)
        now += machine(load)
        times.ended(number, now)
    decodes = StepLoad(STREAMS, STREAMS * 1000, 0)
    bounded = GapPrice.of(times, 8192, decodes, 8192, 0.05)
    free = GapPrice.of(times, 8192, decodes, 8192, None)
    assert bounded is not None
    assert free is not None
    assert free.steps == 2  # the streams have a place in the first
    assert free.gap == pytest.approx(machine(StepLoad(8192, STREAMS * 1000, 8176 * 8177 // 2)), rel=0.2)
    assert bounded.gap <= 0.05
    assert bounded.steps > 4
    assert bounded.seconds > free.seconds
    assert GapPrice.of(times, 200_000, decodes, 8192, None) is None  # nothing so large was measured
    line = price_line(times, StepPace(times, 0.05, decodes), 199_999, 8192)
    assert line.startswith("price of the bound of 50 ms on gaps")
    assert f"beside {STREAMS} streams takes" in line
    assert price_line(StepTimes(), StepPace(times, 0.05, decodes), 8191, 8192) == ""
