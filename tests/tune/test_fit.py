# SPDX-License-Identifier: Apache-2.0
"""The fit finds the model that made the times, outliers notwithstanding; regret is counted cell by cell."""

from __future__ import annotations

import random

import pytest

from phalanx.tables.message import Fusion
from phalanx.tables.seed import Latency, default
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.decide import decide
from phalanx.tune.fit import fit, fit_seed, regret, relative_error
from phalanx.tune.sweep import Task
from tests.support.tune_benchmarks import NVLINK2, bench


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
