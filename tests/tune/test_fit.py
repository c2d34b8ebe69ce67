# SPDX-License-Identifier: Apache-2.0
"""The fit finds the model that made the times, outliers notwithstanding; regret is counted cell by cell."""

from __future__ import annotations

import random

import pytest

from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import Latency, default, sequence_parallel
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.decide import decide
from phalanx.tune.fit import by_cell, fit, fit_seed, regret, relative_error
from phalanx.tune.sweep import Task
from tests.support.tune_benchmarks import LAYERS, NVLINK2, SMALL, bench

RS, GEMM_RS = Choice(Strategy.RS_NORM_AG), Choice(Strategy.GEMM_RS)


def test_finds_the_model_through_outliers():
    model = Latency.of_us(4.0, 3e-6, 0.002)
    dice = random.Random(7)
    points = [(t * h * 2, t, model.us(t, t * h * 2)) for t in (1, 8, 64, 512, 4096) for h in (128, 1024, 8192)]
    points = [(b, t, us * (5 if dice.random() < 0.15 else 1)) for b, t, us in points]
    fitted = fit(points)
    assert fitted == pytest.approx(model, rel=1e-3)
    assert relative_error(points, fitted) < 1e-3


def test_coefficients_are_never_negative():
    assert fit([(1 << 20, 1, 10.0), (2 << 20, 2, 5.0), (4 << 20, 4, 2.0)]).b == 0
    assert min(fit([(128, 1, 3.0)])) == 0


def test_the_seed_of_a_benchmark():
    benchmark = bench()
    seed = fit_seed(benchmark.times, NVLINK2)
    assert next(iter(seed.models[Fusion.RESIDUAL_RMS_NORM])) == Choice(Strategy.NCCL)
    assert len(seed.models[Fusion.RESIDUAL_RMS_NORM]) == 5
    assert seed.models[Fusion.RESIDUAL_RMS_NORM_QUANT_FP8] == default(NVLINK2).models[Fusion.RESIDUAL_RMS_NORM_QUANT_FP8]
    priced = regret(benchmark.times, seed)
    assert priced.cells == 2 * 15 * 7
    assert priced.worst < 0.05


def test_other_numeric_classes_take_no_part():
    low = Choice(Strategy.LOWPRECISION)
    times = {Task("bf16", Fusion.NONE, 1, 128, low): 1.0, Task("bf16", Fusion.NONE, 1, 128, Choice(Strategy.NCCL)): 9.0}
    assert low not in fit_seed(times, NVLINK2).models[Fusion.NONE]
    table = decide(times, NVLINK2)
    assert table.lookup("bf16", Fusion.NONE, 1, 128).strategy is Strategy.NCCL
    assert regret(times, table).worst == 0


def test_regret_names_the_worst_cell():
    one, two = Choice(Strategy.ONESHOT), Choice(Strategy.TWOSHOT)
    times = {Task("bf16", Fusion.NONE, 1, 128, one): 2.0, Task("bf16", Fusion.NONE, 1, 128, two): 3.0}
    wrong = decide({task: us for task, us in times.items() if task.choice == two}, NVLINK2)
    priced = regret(times, wrong)
    assert priced.worst == pytest.approx(0.5)
    assert "NONE 1 x 128 bf16, TWOSHOT" in str(priced)
    assert regret({}, wrong) is None


def test_thresholds_are_where_sequence_parallelism_wins():
    """Its times cross those of the others at some size, which the thresholds name; a machine on which it never wins has none."""
    benchmark = bench(NVLINK2, strategies=LAYERS, noise=0.0, hidden="8192", fusions="RESIDUAL_RMS_NORM")
    cells, gemm = by_cell(benchmark.times, Caller.SHARDED), by_cell(benchmark.times, Caller.GEMM)
    seed = fit_seed(benchmark.times, NVLINK2).sequence_parallel
    wins = [cell[2] for cell, us in cells.items() if us[RS] < min(time for choice, time in us.items() if choice != RS)]
    assert seed.rs_norm_ag_min_tokens == min(wins) > min(cell[2] for cell in cells)
    wins = [
        2 * 8192 * cell[2]
        for cell, us in gemm.items()
        if us[GEMM_RS] < min(time for choice, time in us.items() if choice != GEMM_RS)
    ]
    assert seed.gemm_rs_min_bytes == min(wins) > min(2 * 8192 * cell[2] for cell in gemm)
    assert (seed.origin, seed.estimated) == (f"fitted to {len(benchmark.times)} times of {NVLINK2}", False)
    slow = {task: us * (9 if task.choice in (RS, GEMM_RS) else 1) for task, us in benchmark.times.items()}
    never = fit_seed(slow, NVLINK2).sequence_parallel
    assert (never.rs_norm_ag_min_tokens, never.gemm_rs_min_bytes) == (None, None)
    assert fit_seed(bench(NVLINK2, **SMALL).times, NVLINK2).sequence_parallel == sequence_parallel(NVLINK2)


def test_regret_in_layers_is_of_what_they_run():
    benchmark = bench(NVLINK2, strategies=LAYERS, fusions="RESIDUAL_RMS_NORM")
    table = decide(benchmark.times, NVLINK2, samples=benchmark.samples)
    of_layers = regret(benchmark.times, table, (Caller.SHARDED, Caller.GEMM))
    assert of_layers.cells == len(by_cell(benchmark.times, Caller.SHARDED)) + len(by_cell(benchmark.times, Caller.GEMM))
    assert of_layers.worst < 0.05
    wrong = {task: us * (3 if task.choice in (RS, GEMM_RS) else 1) for task, us in benchmark.times.items()}
    assert regret(wrong, table, (Caller.SHARDED,)).worst > 1


def test_cells_that_a_run_did_not_reach_are_left_to_the_seed():
    """A run that its time limit ended has times of other strategies where sequence parallelism comes last; a skip is an answer."""
    benchmark = bench(NVLINK2, strategies=LAYERS, noise=0.0, hidden="8192", fusions="RESIDUAL_RMS_NORM")
    cut = {task: us for task, us in benchmark.times.items() if task.tokens < 1024 or task.choice not in (RS, GEMM_RS)}
    left = [task for task in benchmark.times if task not in cut]

    def sources(skips: list[Task]) -> set[str]:
        table = decide(cut, NVLINK2, samples=benchmark.samples, skips=skips)
        lookups = (table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, 4096, 8192, caller) for caller in (Caller.SHARDED, Caller.GEMM))
        return {entry.source for entry in lookups}

    assert sources([]) == {"seed"}
    assert sources(left) == {"table"}
