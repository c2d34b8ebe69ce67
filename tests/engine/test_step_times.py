# SPDX-License-Identifier: Apache-2.0
"""What is known of the time of steps: predictions of simulated machines, and the limit from which a step counts as stuck."""

from __future__ import annotations

import random

import pytest

from phalanx.engine.messages import Step, StepBatch, StepRow
from phalanx.engine.step_times import LEAST_LIMIT, RUN_STEPS, SURE_STEPS, StepLoad, StepTimes, prompt_pairs


def machine(load: StepLoad) -> float:
    """Seconds of a step."""
    return 4e-3 + 30e-6 * load.tokens + 2e-9 * load.kv_tokens + 3e-9 * load.pairs


def ran(times: StepTimes, loads: list[StepLoad], speed: float = 1.0, noise: float = 0.0, seed: int = 1) -> None:
    chance, now = random.Random(seed), times._ended_at
    for load in loads:
        number = times.steps + 1
        times.submitted(number, load, now)
        now += machine(load) * speed * (1 + noise * (chance.random() - 0.3))
        times.ended(number, now)


def mixed(count: int, seed: int = 2) -> list[StepLoad]:
    """Decode steps, and prompts of any length beside them."""
    chance, loads = random.Random(seed), []
    for _ in range(count):
        rows, context = chance.randint(1, 64), chance.randint(100, 100_000)
        chunk = chance.choice((0, 0, 0, chance.randint(16, 2048)))
        loads.append(StepLoad(rows + chunk, rows * context, chunk * context))
    return loads


def test_the_load_of_a_step_is_that_of_the_fullest_index() -> None:
    decode, chunk = StepRow(0, 99, 1), StepRow(1, 10, 20)
    verifies = StepRow(2, 50, 3, drafts=2)
    assert StepLoad.of(Step(1, [StepBatch(rows=[decode, chunk])])) == StepLoad(21, 100, 20 * 10 + 210, keys=30)
    assert StepLoad.of(Step(1, [StepBatch(rows=[verifies])])) == StepLoad(3, 159, 0)
    assert StepLoad.of(Step(1, [StepBatch(rows=[decode]), StepBatch(rows=[chunk])])) == StepLoad(20, 100, 410, keys=30)
    assert StepLoad.of(Step(1, [StepBatch(rows=[decode, chunk])]), (4, 8)).pairs == 32 * (10 + (20 + 1) / 2)


def test_pairs_of_prompts_are_counted_in_whole_waves():
    taken = {1: 16, 16: 16, 176: 176, 177: 264, 256: 264, 257: 528, 264: 528, 528: 528, 529: 1056, 1057: 1584}
    for count, tokens in taken.items():
        assert prompt_pairs(1000, count, (33, 16)) == tokens * (2 * 1000 + count + 1) // 2
        assert prompt_pairs(1000, count, (0, 0)) == sum(range(1001, 1001 + count))
    assert prompt_pairs(0, 0, (33, 16)) == 0


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_of_any_mixture_are_predicted_by_those_that_ran(noise: float) -> None:
    times = StepTimes()
    ran(times, mixed(400), noise=noise)
    for load in mixed(50, seed=3):
        seconds = times.seconds(load)
        assert seconds is not None
        assert seconds == pytest.approx(machine(load), rel=0.12 + noise)


def test_the_prediction_follows_clocks_that_fall() -> None:
    times = StepTimes()
    ran(times, mixed(400))
    ran(times, mixed(600, seed=5), speed=3.0)
    load = mixed(1, seed=6)[0]
    assert times.seconds(load) == pytest.approx(3 * machine(load), rel=0.2)


def test_a_prediction_knows_the_latest_steps_also_in_the_midst_of_a_run() -> None:
    """Decode steps of one size are fitted together, but not later than somebody asks."""
    for count in range(1, 3 * RUN_STEPS):
        times, load = StepTimes(), StepLoad(32, 32_000, 0)
        ran(times, [load] * 200)
        assert times.seconds(load) == pytest.approx(machine(load), rel=1e-3)
        ran(times, [load] * count, speed=2.0)
        left = 0.99**count
        least_squares = (left + (1 - left) / 2) / (left + (1 - left) / 4)  # of relative errors
        assert times.seconds(load) / machine(load) == pytest.approx(least_squares, rel=0.03), count


def test_what_prompts_cost_is_not_forgotten_while_only_decodes_run() -> None:
    times = StepTimes()
    ran(times, mixed(400))
    ran(times, [StepLoad(32, 32_000, 0)] * 20_000)
    load = StepLoad(32 + 1024, 32_000, 1024 * 50_000)
    assert times.seconds(load) == pytest.approx(machine(load), rel=0.3)


def test_the_first_steps_and_those_beyond_what_was_measured_may_take_step_timeout() -> None:
    times, small = StepTimes(300.0), StepLoad(8, 8_000, 0)
    ran(times, [small] * (SURE_STEPS - 1))
    assert times.limit(small) == times.limit(None) == 300.0
    ran(times, [small])
    assert times.limit(small) == LEAST_LIMIT
    assert times.limit(StepLoad(17, 8_000, 0)) == 300.0
    assert times.limit(StepLoad(8, 16_001, 0)) == 300.0


def test_a_limit_is_a_multiple_of_long_predictions() -> None:
    times, long = StepTimes(300.0), StepLoad(8192, 0, 8192 * 100_000)
    ran(times, [long] * 40)
    assert times.limit(long) == pytest.approx(10 * machine(long), rel=0.01)


def test_a_step_that_waited_for_something_else_tells_little() -> None:
    times, load = StepTimes(), StepLoad(64, 64_000, 0)
    ran(times, [load] * 200)
    ran(times, [load], speed=1000.0)
    assert times.seconds(load) == pytest.approx(machine(load), rel=0.05)
    times.submitted(1000, None, times._ended_at)
    times.ended(1000, times._ended_at + 50.0)
    assert times.seconds(load) == pytest.approx(machine(load), rel=0.05)


def test_a_fit_that_has_come_to_nothing_recovers() -> None:
    """Steps longer than three times their prediction were taken as three times: one of 0 seconds then ended the engine."""
    times, loads = StepTimes(), mixed(300)
    ran(times, loads)
    times._end_run()
    times._fit._c = [0.0] * 6
    assert times.seconds(loads[0]) is None
    assert times.limit(loads[0]) == times._step_timeout
    ran(times, mixed(60, seed=3))
    for load in loads[:50]:
        assert times.seconds(load) == pytest.approx(machine(load), rel=0.25)
