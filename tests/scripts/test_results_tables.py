# SPDX-License-Identifier: Apache-2.0
"""Measured figures of README and docs stand in tables that are written from benchmarks/results."""

from __future__ import annotations

import json

import pytest

from scripts import results_tables


def test_pages_and_chart_are_what_the_measurements_give():
    assert results_tables.main(["--check"]) == 0, "run: python scripts/results_tables.py"


def test_a_figure_is_the_median_of_what_matches(tmp_path, monkeypatch):
    runs = [{"kind": "a", "ms": value} for value in (3.0, 1.0, 2.2)] + [{"kind": "b", "ms": 9.0}]
    (tmp_path / "runs.json").write_text(json.dumps({"rows": runs}))
    monkeypatch.setattr(results_tables, "RESULTS", tmp_path)
    results_tables.content.cache_clear()
    cell = {"digits": 1, "text": "peer: {}", "runs": ["runs.json: rows[kind=a]/ms"]}
    assert results_tables.printed(cell) == "peer: 2.2"
    assert results_tables.printed(cell | {"how": "min"}) == "peer: 1.0"
    with pytest.raises(LookupError, match="no measurement matches"):
        results_tables.measurements("runs.json: rows[kind=c]/ms")
    results_tables.content.cache_clear()
