# SPDX-License-Identifier: Apache-2.0
"""A plan that is run here stands beside its prediction, on CPU too; one that cannot start is a row with its error."""

from __future__ import annotations

from phalanx.bench.prediction import verified
from phalanx.plan import search, subject
from phalanx.plan.search import Wanted


def test_a_plan_runs_on_cpu_beside_its_prediction():
    shape, machine = subject.shape_for("demo"), subject.machine_for("H100", gpus_per_node=1)[0]
    wanted = Wanted(dtype="fp32", isl=32, osl=8, concurrency=2)
    plans = search.search(shape, machine, wanted).plans
    rows = verified.run("demo", machine, wanted, plans[:1], device="cpu")
    measured = rows[0]["measured"]
    assert measured["kv_tokens"] > 0
    assert 0 < measured["output_tokens_per_second"] < 1e5
    text = verified.text(rows)
    assert "measured" in text
    assert "outside" in text  # a laptop is no H100


def test_what_does_not_start_is_told(monkeypatch):
    shape, machine = subject.shape_for("llama-3-8b"), subject.machine_for("H100", gpus_per_node=1)[0]
    wanted = Wanted(isl=8, osl=2, concurrency=1)
    plans = search.search(shape, machine, wanted).plans
    rows = verified.run("llama-3-8b", machine, wanted, plans[:1], device="cuda")
    assert "device='cuda'" in rows[0]["error"]
    assert "did not run" in verified.text(rows)
