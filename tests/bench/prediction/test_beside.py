# SPDX-License-Identifier: Apache-2.0
"""The prediction beside a bench figure is the one that the committed row was held against; none for an unknown machine."""

from __future__ import annotations

import pytest

from benchmarks.planner import accuracy
from benchmarks.planner.rows import rows
from phalanx.bench.prediction import beside
from phalanx.bench.workloads import parse
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.engine.messages import EngineFacts
from phalanx.hardware.nvml import Gpu
from phalanx.hardware.probe import Machine
from phalanx.layout import Layout
from phalanx.layout.families import known

OPTIONS = EngineOptions(model="70b", kv_cache_dtype="fp8")
MODEL = ModelShape.from_config(known("llama-3-70b"))


def facts(device):
    return EngineFacts("70b", "fp8", device, Layout(tp=4), 4096, 512, 8192, 16, 2_791_952 // 16, 2_791_952, 128256, [])


def test_it_is_what_the_accuracy_command_says(monkeypatch):
    here = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 90, 1, 1) for index in range(4))
    monkeypatch.setattr(beside.subject.probe, "detect_machine", lambda: Machine(here, 1, 1, 1))
    same = [r for r in rows() if r.model == "llama-3-70b" and r.tp == 4 and r.workload.name == "decode-64" and r.strategy == "AUTO"]
    name = next(r.name for r in same if r.bandwidth < 4385)
    line = next(each for each in accuracy.decodes() if each.what == name)
    prediction = beside.predicted(MODEL, facts("cuda"), parse("decode-64"), OPTIONS)
    assert prediction["value"] == pytest.approx(line.predicted, rel=0.01)
    batch = beside.predicted(MODEL, facts("cuda"), parse("batch-512x1000x1000"), OPTIONS)
    assert batch["value"] == pytest.approx(10_413, rel=0.05)
    assert batch["label"] == "table"


def test_the_scales_of_an_int8_cache_are_read_too(monkeypatch):
    here = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 90, 1, 1) for index in range(4))
    monkeypatch.setattr(beside.subject.probe, "detect_machine", lambda: Machine(here, 1, 1, 1))
    fp8, int8 = (
        beside.predicted(MODEL, facts("cuda"), parse("decode-64"), EngineOptions(model="70b", kv_cache_dtype=kind))["value"]
        for kind in ("fp8", "int8")
    )
    assert fp8 < int8 < 1.016 * fp8


def test_replicas_and_the_split_of_experts_are_priced(monkeypatch):
    """Two replicas of half the requests; experts split by number, and the exchange that was asked for."""
    here = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 90, 1, 1) for index in range(8))
    monkeypatch.setattr(beside.subject.probe, "detect_machine", lambda: Machine(here, 1, 1, 1))

    def value(model, facts, workload, **options):
        prediction = beside.predicted(model, facts, parse(workload), EngineOptions(model="x", **options))
        return prediction and prediction["value"]

    one, two = facts("cuda"), facts("cuda")
    two.layout, two.num_blocks, two.max_batch_size = Layout(tp=4, replicas=2), 2 * one.num_blocks, 2 * one.max_batch_size
    assert value(MODEL, two, "decode-64") == pytest.approx(value(MODEL, one, "decode-32"))
    assert value(MODEL, two, "batch-512x1000x1000") == pytest.approx(2 * value(MODEL, one, "batch-256x1000x1000"))
    mixture = ModelShape.from_config(known("mixtral-8x7b"))
    one_group, by_number = facts("cuda"), facts("cuda")
    by_number.layout = Layout(tp=4, moe_ep=4)
    assert value(mixture, by_number, "decode-1") != value(mixture, one_group, "decode-1")
    groups = facts("cuda")
    groups.layout = Layout(dp=2, tp=2)
    gathered, one_sided = (value(mixture, groups, "decode-64", expert_exchange=name) for name in ("ALL_GATHER", "ONE_SIDED"))
    assert gathered > 1.02 * one_sided
    assert value(mixture, one_group, "decode-64", expert_traffic=1.2) is None
    assert value(mixture, one_group, "decode-64", expert_traffic=0.0) == value(mixture, one_group, "decode-64")


def test_an_unknown_machine_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr("phalanx.planner.calibration.folder", lambda: tmp_path)
    assert beside.predicted(MODEL, facts("cpu"), parse("decode-1"), OPTIONS) is None
