# SPDX-License-Identifier: Apache-2.0
"""A plan that is run here stands beside its prediction, on CPU too; one that cannot start is a row with its error."""

from __future__ import annotations

import pytest

from phalanx.bench.prediction import verified
from phalanx.errors import OptionError
from phalanx.layout import Layout
from phalanx.planner import search, subject
from phalanx.planner.search import PlanRequest


def test_measured_stands_beside_predicted():
    """test_cli.py runs a plan on CPU ranks."""
    machine = subject.machine_for("H100", gpus_per_node=1)[0]
    plan = search.search(subject.shape_for("demo"), machine, PlanRequest(dtype="fp32", isl=32, osl=8, concurrency=2)).plans[0]
    measured = {"output_tokens_per_second": 90.0, "ms_per_token": plan.ms_per_token.value, "ttft_ms": 35.0, "kv_tokens": 256.0}
    text = verified.text([{"name": plan.layout.name, "predicted": plan.as_json(), "measured": measured}])
    lines = {name: next(line for line in text.splitlines() if name in line) for name in verified.FIGURES}
    assert "outside" in lines["output_tokens_per_second"]
    assert "outside" in lines["ttft_ms"]
    assert "+0.0%, inside" in lines["ms_per_token"]
    assert "KV tokens measured 256" in text


def test_one_replica_runs_and_stands_for_all(monkeypatch):
    """A plan of two replicas starts one of them, with its share of the requests."""
    machine = subject.machine_for("H200", gpus_per_node=2)[0]
    request = PlanRequest(isl=8, osl=2, concurrency=4)
    plan = search.examine(subject.shape_for("llama-3-8b"), machine, request, Layout(replicas=2))
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
