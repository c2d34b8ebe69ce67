# SPDX-License-Identifier: Apache-2.0
"""Committed predictions are set beside the reports of the engine that they are about, and of no other."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import RESULTS
from benchmarks.planner import fit, history, predict, throughput, widths
from benchmarks.planner.rows import rows
from phalanx.planner import coefficients, simulate

ROW = {
    "group": "H100", "gpu": "H100", "model": "llama-3-8b", "dtype": "bf16", "kv_cache_dtype": "fp8", "kv_tokens": 900,
    "layout": {"tp": 1, "pp": 1, "ep": 1, "replicas": 1, "moe_ep": 1},
    "figures": {"decode-1": {"value": 5.5, "low": 5.0, "high": 6.0, "label": "derived"}},
}  # fmt: skip


def report(gpu: str = "NVIDIA H100 80GB HBM3", tpot_ms: float = 5.0, dtype: str = "bf16", **options: object) -> dict[str, object]:
    """dtype: the one that the engine ran in."""
    return {
        "about": {"machine": {"gpus": [gpu]}},
        "asked": {"model": "llama-3-8b", "dtype": dtype, "kv_cache_dtype": "fp8", "max_batch_size": 512, **options},
        "engines": {"AUTO": {"kv_tokens": 1000, "dtype": dtype}},
        "results": [{"workload": "decode-1", "tpot_ms": tpot_ms}, {"workload": "decode-7", "tpot_ms": 1.0}],
    }


def test_a_figure_stands_beside_its_prediction():
    (entry,) = predict.beside([ROW], report())
    assert entry["error"] == pytest.approx(0.1)
    assert entry["inside"]
    assert entry["kv_tokens"] == {"predicted": 900, "start_gave": 1000}
    (entry,) = predict.beside([ROW], report(tpot_ms=6.1))
    assert not entry["inside"]


def test_the_dtype_is_the_one_that_the_engine_ran_in():
    automatic = report()
    del automatic["asked"]["dtype"]
    assert len(predict.beside([ROW], automatic)) == 1
    automatic["engine"] = automatic.pop("engines")["AUTO"]  # as `bench latency` reports it
    assert len(predict.beside([ROW], automatic)) == 1
    automatic["engine"]["dtype"] = "fp16"
    assert predict.beside([ROW], automatic) == []


def test_kv_tokens_of_another_fraction_are_not_compared():
    (entry,) = predict.beside([ROW], report(kv_cache_free_gpu_memory_fraction=0.95))
    assert entry["kv_tokens"] == {"predicted": 900, "start_gave": None}


def test_the_first_measurement_of_a_prediction_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(predict.harness, "RESULTS", tmp_path)
    (tmp_path / "p.json").write_text(json.dumps({"about": {"commit": "c"}, "rows": [ROW]}))
    assert predict.compare("p", [report()]) == 1
    assert predict.compare("p", [report(tpot_ms=9.0)]) == 0
    assert json.loads((tmp_path / "p_measured.json").read_text())["figures"][0]["measured"] == 5.0


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H200"}, {"dtype": "fp8"}, {"kv_cache_dtype": "model"}, {"model": "llama-3-70b"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}, {"moe_expert_parallel_size": 2}, {"replicas": 2},
    ],
)  # fmt: skip
def test_another_engine_is_not_compared(other):
    assert predict.beside([ROW], report(**other)) == []


MEASURED = [name for name in predict.NAMES if (RESULTS / f"{name}_measured.json").is_file()]


@pytest.mark.parametrize("name", MEASURED)
def test_the_committed_figures_are_what_was_predicted_before(name):
    document = json.loads((RESULTS / f"{name}_measured.json").read_text())
    predictions = json.loads((RESULTS / f"{name}.json").read_text())
    assert document["predicted_at"] == predictions["about"]["commit"]
    for entry in document["figures"]:
        (row,) = [
            row
            for row in predictions["rows"]
            if all(row[name] == entry[name] for name in ("gpu", "model", "dtype", "kv_cache_dtype", "layout"))
            and entry["workload"] in row["figures"]
        ]
        assert entry["predicted"] == row["figures"][entry["workload"]]
    for part, figures in predict.summaries(document["figures"]).items():
        assert document[part] == figures


def test_no_measured_report_is_left_out():
    """Every committed result of a predicted engine stands beside its prediction."""
    compared = {predict.key(entry) for entry in json.loads((RESULTS / "plan_predictions_measured.json").read_text())["figures"]}
    rows = json.loads((RESULTS / "plan_predictions.json").read_text())["rows"]
    for path in [*(RESULTS / "experts").glob("*.json"), *(RESULTS / "h100").glob("*.json"), *(RESULTS / "serving").glob("*.json")]:
        document = json.loads(path.read_text())
        if "engines" in document and document["engines"] and "about" in document:
            missing = [predict.key(entry) for entry in predict.beside(rows, document) if predict.key(entry) not in compared]
            assert not missing, path.name


@given(st.lists(st.floats(-0.6, 1.5), min_size=1, max_size=40))
def test_a_width_holds_what_it_promises(errors):
    """nine_of_ten: of the errors that it is made of; an interval of that half width has their measured figures in it."""
    width = widths.nine_of_ten(errors)
    inside = [1 / (1 + width) <= 1 / (1 + error) <= 1 + width for error in errors]
    assert sum(inside) >= 0.9 * len(errors)
    assert widths.half_width(errors) <= max(map(widths.half, errors)) + 1e-4


def split(node: Any, path: str = "") -> tuple[dict[str, Any], dict[str, float]]:
    """The leaves of a JSON value by their paths: all but the floats, and the floats."""
    if isinstance(node, float):
        return {}, {path: node}
    if not isinstance(node, dict | list | tuple):
        return {path: node}, {}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    exact, numbers = dict[str, Any](), dict[str, float]()
    for key, value in items:
        inner = split(value, f"{path}/{key}")
        exact |= inner[0]
        numbers |= inner[1]
    return exact, numbers


def test_widths_and_coverage_are_those_of_the_rows_left_out_and_of_the_predictions():
    """Of all rows under the committed coefficients, each with its model out of the fit and out of the width."""
    fitted = json.loads((RESULTS / "plan_fit.json").read_text())["rows"]
    now = history.fitted()
    intervals = widths.intervals(fitted, fit.attention_errors(now), [row.model for row in fit.fitted_rows()])
    counts, numbers = split(intervals)
    wanted_counts, wanted_numbers = split(coefficients.document()["intervals"])
    assert counts == wanted_counts
    assert numbers == pytest.approx(wanted_numbers, rel=0.03)  # a median of rows that another processor orders otherwise
    errors = sorted(fit.predicted(row, now) / row.measured - 1 for row in fit.fitted_rows() if fit.in_common(row))
    assert errors == pytest.approx(sorted(row["fit"] for row in fitted), abs=1e-4)


@pytest.mark.parametrize("name", predict.NAMES)
def test_predictions_say_by_which_commit(name):
    about = json.loads((RESULTS / f"{name}.json").read_text())["about"]
    assert re.fullmatch("[0-9a-f]{12}", about["commit"]), "predicted with uncommitted changes"


@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_equal_shares_of_the_decodes_pay_in_a_pipeline(layout: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The present scheduler beside that of the rows, at the same costs of a step: docs/planner.md has the range."""
    (row,) = (r for r in rows() if r.file == "scaling_256x512x512" and (r.tp, r.pp) == layout and r.kind == "batch")
    of_its_day = throughput.simulated(row, history.fitted())
    monkeypatch.setattr(throughput, "scheduler_of", lambda row: simulate.engine_scheduler)
    assert 1.105 < throughput.simulated(row, history.fitted()) / of_its_day < 1.145


def test_few_steps_of_a_burst_cost_what_the_scheduler_says():
    """The fit has a burst by 14 steps: at the coefficients that these were taken with, and at others."""
    rows = {row.file: row for row in throughput.batch_rows()}
    chosen = [rows[file] for file in ("mixtral-8x7b_tp2_kv_fp8", "llama-3.1-70b_fp8_tp2_more_kv_fp8")]
    now = history.fitted()
    slower = dataclasses.replace(now, c_layer=1.5 * now.c_layer, e_flops=0.9 * now.e_flops, e_kv_fp8=0.8 * now.e_kv_fp8)
    for row, burst in zip(chosen, throughput.bursts(now, chosen), strict=True):
        assert len(burst.steps) <= throughput.PROMPT_STEPS + throughput.DECODE_STEPS
        assert burst.throughput(now) == pytest.approx(throughput.simulated(row, now), rel=1e-6)
        assert burst.throughput(slower) == pytest.approx(throughput.simulated(row, slower), rel=0.01)
        assert burst.throughput(slower) < 0.97 * burst.throughput(now)
