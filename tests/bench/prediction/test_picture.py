# SPDX-License-Identifier: Apache-2.0
"""The picture of a simulation."""

from __future__ import annotations

import pytest

from phalanx.bench.prediction import picture
from phalanx.errors import OptionError
from phalanx.layout import Layout
from phalanx.planner import arrivals, scenario, subject
from phalanx.planner.search import PlanRequest


def test_it_is_drawn_in_a_known_kind_of_file(tmp_path):
    machine, _ = subject.machine_for("H200")
    request = PlanRequest(dtype="bf16", isl=1, osl=1, max_batch_size=64, max_seq_len=4096)
    replica = scenario.ReplicaSpec.of(subject.shape_for("llama-3-8b"), machine, request, Layout())
    rows = arrivals.of("poisson:40", isl=1000, osl=100, requests=30, seed=5)
    report = scenario.document(replica, rows, 2, scenario.Bounds(ttft=0.5), trace="poisson:40", model="llama-3-8b")
    picture.draw(report, str(tmp_path / "latency.png"))
    assert (tmp_path / "latency.png").stat().st_size > 5000
    with pytest.raises(OptionError, match="unknown kind"):
        picture.draw(report, str(tmp_path / "latency.xyz"))
