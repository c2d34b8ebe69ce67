# SPDX-License-Identifier: Apache-2.0
"""A plan that is run here stands beside its prediction, on CPU too; one that cannot start is a row with its error."""

from __future__ import annotations

import pytest

from phalanx.bench.prediction import verified
from phalanx.errors import OptionError
from phalanx.plan import search, subject
from phalanx.plan.search import PlannedLayout, PlanRequest


def test_a_plan_runs_on_cpu_beside_its_prediction():
    shape, machine = subject.shape_for("demo"), subject.machine_for("H100", gpus_per_node=1)[0]
    request = PlanRequest(dtype="fp32", isl=32, osl=8, concurrency=2)
    plans = search.search(shape, machine, request).plans
    rows = verified.run("demo", machine, request, plans[:1], device="cpu")
    measured = rows[0]["measured"]
    assert measured["kv_tokens"] > 0
    assert 0 < measured["output_tokens_per_second"] < 1e5
    # Two requests at once: the burst takes their first token and seven more steps, by the same definitions as the plan's.
    seconds = 2 * 8 / measured["output_tokens_per_second"]
    assert 0 < measured["ttft_ms"] < 1e3 * seconds
    assert 1e3 * seconds == pytest.approx(measured["ttft_ms"] + 7 * measured["ms_per_token"], rel=0.5)
    text = verified.text(rows)
    assert "measured" in text
    assert "outside" in text  # a laptop is no H100


def test_one_replica_runs_and_stands_for_all(monkeypatch):
    """A plan of two replicas starts one of them, with its share of the requests."""
    machine = subject.machine_for("H200", gpus_per_node=2)[0]
    request = PlanRequest(isl=8, osl=2, concurrency=4)
    plan = search.examine(subject.shape_for("llama-3-8b"), machine, request, PlannedLayout(1, 1, 1, 2))
    started = []

    def refuse(raw):
        started.append(raw.values)
        raise OptionError("seen")

    monkeypatch.setattr(verified.offline, "target", refuse)
    verified.run("llama-3-8b", machine, request, [plan], device="cuda")
    assert [values["replicas"] for values in started] == [1]


def test_figures_are_as_a_plan_defines_them():
    """Two of four requests, each of 5 tokens, 0.1 s apart: of both replicas, and with the prompts between the decodes counted."""
    figures = verified.figures(10.0, [(10.2, 11.0), (10.4, 11.2)], 5, 2.0)
    assert figures["output_tokens_per_second"] == pytest.approx(2 * 2 * 5 / 1.2)
    assert figures["ms_per_token"] == pytest.approx(200.0)
    assert figures["ttft_ms"] == pytest.approx(300.0)


def test_what_does_not_start_is_told(monkeypatch):
    shape, machine = subject.shape_for("llama-3-8b"), subject.machine_for("H100", gpus_per_node=1)[0]
    request = PlanRequest(isl=8, osl=2, concurrency=1)
    plans = search.search(shape, machine, request).plans
    rows = verified.run("llama-3-8b", machine, request, plans[:1], device="cuda")
    assert "device='cuda'" in rows[0]["error"]
    assert "did not run" in verified.text(rows)
