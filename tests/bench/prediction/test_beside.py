# SPDX-License-Identifier: Apache-2.0
"""The prediction beside a bench figure is the one that the committed row was held against; none for an unknown machine."""

from __future__ import annotations

import pytest

from benchmarks.plan import accuracy
from benchmarks.plan.rows import rows
from phalanx.bench.prediction import beside
from phalanx.bench.workloads import parse
from phalanx.config.model import ModelShape
from phalanx.engine.messages import EngineFacts, RankFacts
from phalanx.hardware.probe import Gpu, Machine
from phalanx.plan.cost import Costs
from phalanx.plan.families import known
from phalanx.plan.memory import INT8_KV, KvFormat

MODEL = ModelShape.from_config(known("llama-3-70b"))


def facts(device, scale_bytes=0):
    kv = 2_791_952 * 2 * 8 * (128 + scale_bytes) * 80 // 4
    ranks = [RankFacts(rank, 0, device, (0, 80), {"kv": kv}) for rank in range(4)]
    return EngineFacts("70b", "fp8", device, 4, (1, 1, 4), 4096, 512, 8192, 16, 2_791_952 // 16, 128256, [], ranks)


def test_it_is_what_the_accuracy_command_says(monkeypatch):
    here = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 90, 1, 1) for index in range(4))
    monkeypatch.setattr(beside.subject.probe, "detect_machine", lambda: Machine(here, 1, 1, 1))
    same = [r for r in rows() if r.model == "llama-3-70b" and r.tp == 4 and r.workload.name == "decode-64" and r.strategy == "AUTO"]
    name = next(r.name for r in same if r.bandwidth < 4385)
    line = next(each for each in accuracy.decodes() if each.what == name)
    prediction = beside.predicted(MODEL, facts("cuda"), parse("decode-64"))
    assert prediction["value"] == pytest.approx(line.predicted, rel=0.01)
    batch = beside.predicted(MODEL, facts("cuda"), parse("batch-512x1000x1000"))
    assert batch["value"] == pytest.approx(10_413, rel=0.05)
    assert batch["label"] == "table"


def test_the_scales_of_an_int8_cache_are_read_too(monkeypatch):
    """Which the bytes of the engine's cache tell."""
    here = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 90, 1, 1) for index in range(4))
    monkeypatch.setattr(beside.subject.probe, "detect_machine", lambda: Machine(here, 1, 1, 1))
    formats = []
    monkeypatch.setattr(beside, "Costs", lambda shape, dtype, kv, *rest: formats.append(kv) or Costs(shape, dtype, kv, *rest))
    fp8, int8 = (beside.predicted(MODEL, facts("cuda", size), parse("decode-64"))["value"] for size in (0, 2))
    assert formats == [KvFormat(1), INT8_KV]
    assert fp8 < int8 < 1.016 * fp8


def test_an_unknown_machine_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr("phalanx.plan.calibration.folder", lambda: tmp_path)
    assert beside.predicted(MODEL, facts("cpu"), parse("decode-1")) is None
