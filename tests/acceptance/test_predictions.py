# SPDX-License-Identifier: Apache-2.0
"""Committed predictions are set beside the reports of the engine that they are about, and of no other."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import RESULTS
from benchmarks.plan import predict

ROW = {
    "group": "H100", "gpu": "H100", "model": "llama-3-8b", "dtype": "bf16", "kv_cache_dtype": "fp8", "kv_tokens": 900,
    "layout": {"tp": 1, "pp": 1, "ep": 1, "replicas": 1, "moe_ep": 1},
    "figures": {"decode-1": {"value": 5.5, "low": 5.0, "high": 6.0, "label": "derived"}},
}  # fmt: skip


def report(gpu: str = "NVIDIA H100 80GB HBM3", tpot_ms: float = 5.0, **options: object) -> dict[str, object]:
    return {
        "about": {"machine": {"gpus": [gpu]}},
        "asked": {"model": "llama-3-8b", "dtype": "bf16", "kv_cache_dtype": "fp8", **options},
        "engines": {"AUTO": {"kv_tokens": 1000}},
        "results": [{"workload": "decode-1", "tpot_ms": tpot_ms}, {"workload": "decode-7", "tpot_ms": 1.0}],
    }


def test_a_figure_stands_beside_its_prediction():
    (entry,) = predict.beside([ROW], report())
    assert entry["error"] == pytest.approx(0.1)
    assert entry["inside"]
    assert entry["kv_tokens"] == {"predicted": 900, "start_gave": 1000}
    (entry,) = predict.beside([ROW], report(tpot_ms=6.1))
    assert not entry["inside"]


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


def test_the_committed_figures_are_what_was_predicted_before():
    document = json.loads((RESULTS / f"{predict.MEASURED}.json").read_text())
    predictions = json.loads((RESULTS / f"{predict.NAME}.json").read_text())
    assert document["predicted_at"] == predictions["about"]["commit"]
    for entry in document["figures"]:
        (row,) = [
            row
            for row in predictions["rows"]
            if all(row[name] == entry[name] for name in ("gpu", "model", "dtype", "kv_cache_dtype", "layout"))
        ]
        assert entry["predicted"] == row["figures"][entry["workload"]]
    assert document["groups"] == predict.groups(document["figures"])
