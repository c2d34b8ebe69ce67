# SPDX-License-Identifier: Apache-2.0
"""States of recurrent models do not drift: behind many tokens drawn one by one they are as close to the states of the same tokens
as a prompt as behind few. Here for some hundreds, and for 32,768 in the reports of benchmarks/models/state_drift.py."""

from __future__ import annotations

import json

import pytest

from benchmarks import harness
from benchmarks.models import state_drift

APART = 2e-5
"""Of states in fp32, whose sums are in another order."""


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_states_of_hundreds_of_tokens(family: str) -> None:
    drifts = state_drift.of_family(family, 600)
    assert [drift.length for drift in drifts] == [256, 512, 600]
    assert all(0 < drift.apart < APART for drift in drifts)
    assert all(drift.same > 0.99 for drift in drifts)


@pytest.mark.parametrize("family", ["qwen3_next", "granite_hybrid"])
def test_states_in_the_reports_on_record(family: str) -> None:
    report = json.loads((harness.RESULTS / f"models_state_drift_{family}.json").read_text(encoding="utf-8"))
    drifts = report[family]["drift"]
    assert drifts[-1]["length"] == report["tokens"] == 32768
    assert len(drifts) == 8
    assert all(0 < drift["apart"] < APART for drift in drifts)
    assert drifts[-1]["apart"] < 3 * drifts[0]["apart"]
    assert all(drift["same"] > 0.999 for drift in drifts)
