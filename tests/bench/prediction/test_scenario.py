# SPDX-License-Identifier: Apache-2.0
"""Deployments: percentiles, objectives, the fewest replicas, cost, and the picture."""

from __future__ import annotations

import numpy
import pytest

from phalanx.bench.prediction import arrivals, scenario
from phalanx.bench.prediction.scenario import Bounds, Engine
from phalanx.errors import CapacityError, LayoutError, OptionError
from phalanx.plan import subject
from phalanx.plan.search import PlanRequest

SHAPE = subject.shape_for("llama-3-8b")


def engine(gpu="H200", **options):
    machine, _ = subject.machine_for(gpu)
    request = PlanRequest(dtype="bf16", isl=1, osl=1, max_batch_size=64, max_seq_len=4096)
    return Engine.of(SHAPE, machine, request, **{"tp": 1, **options})


ROWS = arrivals.of("poisson:40", isl=1000, osl=100, requests=300, seed=5)


def test_percentiles_are_numpys():
    values = [float(value) for value in numpy.random.default_rng(0).exponential(size=101)]
    for part in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert scenario.percentile(values, part) == pytest.approx(numpy.quantile(values, part))
    assert scenario.percentile([], 0.5) == 0.0


def test_the_fewest_replicas_hold_and_one_less_do_not():
    mine, bounds = engine(), Bounds(ttft=0.3, tpot=0.02, part=0.95)
    count = scenario.fewest_replicas(mine, ROWS, bounds)
    assert count > 1
    held = [sum(map(bounds.holds, mine.run(ROWS, each).served)) / len(ROWS) for each in (count - 1, count)]
    assert held[0] < 0.95 <= held[1]
    looser = Bounds(ttft=0.6, tpot=0.04, part=0.9)
    assert scenario.fewest_replicas(mine, ROWS, looser) <= count


def test_an_objective_that_no_number_holds_is_an_error(monkeypatch):
    monkeypatch.setattr(scenario, "MOST_REPLICAS", 20)
    with pytest.raises(CapacityError, match="20 replicas do not hold the objective"):
        scenario.fewest_replicas(engine(), ROWS[:3], Bounds(ttft=1e-6))
    with pytest.raises(OptionError, match="has no objective"):
        scenario.fewest_replicas(engine(), ROWS, Bounds())


def test_the_report_adds_up(tmp_path):
    found = scenario.document(engine(), ROWS, 2, Bounds(ttft=0.5), gpu_hour=3.6, trace="poisson:40", model="llama-3-8b")
    assert found["completed"] == 300
    assert found["asked"]["gpus"] == 2
    spent = 3.6 / 3600 * 2 * found["seconds"]
    assert found["cost_per_million_output_tokens"] == pytest.approx(spent / (300 * 100) * 1e6)
    assert found["goodput_requests_per_second"] == pytest.approx(found["within_slo"] * 300 / found["seconds"])
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queued_ms"):
        spread = found[name]
        assert spread["p50"] <= spread["p90"] <= spread["p99"]
    assert found["e2e_ms"]["mean"] == pytest.approx(found["ttft_ms"]["mean"] + 99 * found["tpot_ms"]["mean"])
    text = scenario.text(found)
    assert "goodput" in text
    assert "per million output tokens" in text
    scenario.draw(found, str(tmp_path / "latency.png"))
    assert (tmp_path / "latency.png").stat().st_size > 5000
    with pytest.raises(OptionError, match="unknown kind"):
        scenario.draw(found, str(tmp_path / "latency.xyz"))


def test_what_cannot_run_is_told_before_it_is_simulated():
    with pytest.raises(CapacityError, match="does not fit; memory: weights"):
        Engine.of(subject.shape_for("llama-3-70b"), subject.machine_for("L4")[0], PlanRequest(max_seq_len=2048), tp=1)
    with pytest.raises(LayoutError, match="does not divide"):
        engine(tp=3)
