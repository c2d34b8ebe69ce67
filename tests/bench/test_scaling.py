# SPDX-License-Identifier: Apache-2.0
"""Sizes that fit, that do not, and that fail; efficiency; and that nothing measured is lost or measured twice."""

from __future__ import annotations

import dataclasses
import json

import pytest

from phalanx.bench import report, scaling, workloads
from phalanx.bench.roofline import Bandwidth
from phalanx.errors import CapacityError, EngineError, OptionError
from phalanx.hardware import provenance
from tests.bench.conftest import requested_options

pytestmark = pytest.mark.usefixtures("forked_python")

BATCH, DECODE = workloads.parse("batch-8x16x8"), workloads.parse("decode-1x16x8")
RATES = {(1, 1): 100.0, (2, 1): 180.0, (4, 1): 300.0, (1, 2): 150.0, (2, 2): 320.0}


class ScriptedMachine:
    """Stands in for engines: sizes have rates, or errors."""

    def __init__(self, capacity=8, **errors):
        self.capacity = capacity  # requests that a rank's KV cache holds
        self.errors = {tuple(map(int, name[1:].split("x"))): error for name, error in errors.items()}
        self.ran = []

    def __call__(self, target, wanted, bandwidth):
        size = target.options.tensor_parallel_size, target.options.pipeline_parallel_size
        self.ran.append(size)
        assert list(wanted) == [BATCH, DECODE]
        assert bandwidth.best
        if size in self.errors:
            raise self.errors[size]
        return {
            "output_tok_s": RATES[size], "tpot_ms": 1.0, "fraction_of_roof": {"throughput": 0.5, "latency": None},
            "engine": {"kv_tokens": 24 * target.options.world_size * self.capacity, "max_batch_size": 6},
        }  # fmt: skip


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    monkeypatch.setattr(scaling.roofline, "measure", lambda device: Bandwidth(1e9, {"copy": 1e9}))


def run(target, sizes, machine, json_file=None):
    return scaling.run(target, scaling.parse_sizes(sizes), BATCH, DECODE, json_file=json_file, measure=machine)


def test_sizes():
    assert scaling.parse_sizes("1, 4,2x2,4") == [(1, 1), (4, 1), (2, 2)]
    for text in ("", "0", "2x", "x2", "2,two"):
        with pytest.raises(OptionError, match="TP or TPxPP"):
            scaling.parse_sizes(text)
    assert scaling.parse_sizes(scaling.DEFAULT_SIZES)


def test_efficiency_of_one_gpu(target):
    rows = run(target, "1,2,4,2x2", ScriptedMachine())["rows"]
    assert [row["efficiency"] for row in rows] == pytest.approx([1.0, 0.9, 0.75, 0.8])
    assert {row["efficiency_of"] for row in rows} == {"TP1"}


def test_efficiency_of_the_smallest_that_fits(target):
    document = run(
        target, "1,2,4,1x2", ScriptedMachine(_1x1=CapacityError("no room"), _2x1=EngineError("rank 0: CUDA out of memory."))
    )
    rows = document["rows"]
    assert [row["status"] for row in rows] == ["OOM", "OOM", "ok", "ok"]
    assert [row["efficiency_of"] for row in rows] == [None, None, "TP1 x PP2", "TP1 x PP2"]
    assert rows[2]["efficiency"] == pytest.approx((300 / 4) / (150 / 2))


def test_the_guides_two_tables(target, capsys):
    document = run(target, "1,2,1x2,2x2", ScriptedMachine(_1x1=CapacityError("not a single KV block fits")))
    report.show(*scaling.tables(document))
    shown = capsys.readouterr().out
    assert "efficiency (of TP2)" in shown
    assert next(line.split() for line in shown.splitlines() if "OOM" in line)[:4] == ["1", "1", "1", "OOM"]
    assert "TP1: OOM: not a single KV block fits" in shown
    pipelines = shown[shown.index("pipelines") :].splitlines()
    assert pipelines[2].split() == ["nodes", "TP", "PP", "GPUs", "throughput", "tok/s"]
    assert [line.split() for line in pipelines[4:8]] == [
        ["1", "1", "1", "1", "OOM"], ["1", "1", "2", "2", "150"], ["1", "2", "1", "2", "180"], ["1", "2", "2", "4", "320"],
    ]  # fmt: skip
    report.show(*scaling.tables(run(target, "1,2", ScriptedMachine())))
    assert "pipelines" not in capsys.readouterr().out


def test_a_size_whose_cache_is_too_small_says_so(target, capsys):
    report.show(*scaling.tables(run(target, "1,2,4", ScriptedMachine(capacity=2, _4x1=EngineError("killed")))))
    assert [line for line in capsys.readouterr().out.splitlines() if "the KV cache holds" in line] == [
        "TP1: the KV cache holds 2 of 6 requests at once", "TP2: the KV cache holds 4 of 6 requests at once",
    ]  # fmt: skip
    report.show(*scaling.tables(run(target, "1", ScriptedMachine(capacity=6))))
    assert "the KV cache holds" not in capsys.readouterr().out


def test_more_ranks_than_gpus(target):
    machine = ScriptedMachine()
    here = dataclasses.replace(target, device="cuda", gpus=2, options=target.options.model_copy(update={"device": "cuda"}))
    rows = run(here, "1,2,4,2x2", machine)["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "no GPUs", "no GPUs"]
    assert rows[2]["why"] == "4 ranks, and this host has 2 GPUs"
    assert machine.ran == [(1, 1), (2, 1)]


def test_a_crash_loses_nothing(target, tmp_path):
    file = tmp_path / "s.json"
    with pytest.raises(KeyboardInterrupt):
        run(target, "1,2,4", ScriptedMachine(_4x1=KeyboardInterrupt()), file)
    assert [row["tp"] for row in json.loads(file.read_text())["rows"]] == [1, 2]
    machine = ScriptedMachine(_1x2=EngineError("rank 1 was killed by SIGKILL"))
    document = run(target, "1,2,4,1x2", machine, file)
    assert machine.ran == [(4, 1), (1, 2)]
    assert [row["status"] for row in document["rows"]] == ["ok", "ok", "ok", "failed"]
    assert json.loads(file.read_text()) == json.loads(json.dumps(document))
    machine = ScriptedMachine()  # what failed is tried again
    assert [row["status"] for row in run(target, "1,1x2", machine, file)["rows"]] == ["ok"] * 4
    assert machine.ran == [(1, 2)]


def test_a_file_that_can_no_longer_be_written_stops_nothing(target, tmp_path):
    (tmp_path / "plain").write_text("x")
    machine = ScriptedMachine()
    document = run(target, "1,2", machine, tmp_path / "plain" / "s.json")
    assert machine.ran == [(1, 1), (2, 1)]
    assert [row["status"] for row in document["rows"]] == ["ok", "ok"]


def test_a_size_keeps_the_commit_that_it_was_measured_at(target, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_checkout", lambda: "")
    file = tmp_path / "s.json"
    run(dataclasses.replace(target, commit="old"), "1", ScriptedMachine(), file)
    document = run(dataclasses.replace(target, commit="new"), "1,2", ScriptedMachine(), file)
    assert [row["measured"]["commit"] for row in document["rows"]] == ["old", "new"]


def test_a_file_of_something_else(target, tiny_shape, tmp_path):
    file = tmp_path / "s.json"
    run(target, "1", ScriptedMachine(), file)
    other = dataclasses.replace(target, options=target.options.model_copy(update={"max_batch_size": 3}))
    earlier = file.read_text()
    with pytest.raises(OptionError, match=r"its max_batch_size differ"):
        run(other, "1", ScriptedMachine(), file)
    assert file.read_text() == earlier
    file.write_text("{")
    with pytest.raises(OptionError, match=r"cannot be extended; JSONDecodeError"):
        run(target, "1", ScriptedMachine(), file)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (CapacityError("x"), True), (EngineError("rank 3: OutOfMemoryError: CUDA out of memory. Tried to allocate"), True),
        (EngineError("x", why="out of memory"), True), (EngineError("rank 3 was killed"), False),
    ],
)  # fmt: skip
def test_what_does_not_fit(error, memory):
    assert scaling.is_out_of_memory(error) is memory


def test_a_real_engine_that_does_not_fit(tiny_shape):
    with scaling.offline.target(requested_options(tiny_shape, kv_cache_bytes=16)) as target:
        row = scaling.run(target, [(1, 1)], BATCH, DECODE)["rows"][0]
    assert row["status"] == "OOM"
    assert "not a single KV block fits" in row["why"]


def test_a_real_engine(tiny_shape):
    with scaling.offline.target(requested_options(tiny_shape)) as target:
        row = scaling.run(target, [(2, 1)], BATCH, DECODE)["rows"][0]
    assert (row["status"], row["gpus"], row["efficiency"], row["efficiency_of"]) == ("ok", 2, 1.0, "TP2")
    assert row["engine"]["tp"] == 2
    assert row["output_tok_s"] > 0


def test_several_decode_workloads_make_a_table_of_their_own(target, capsys):
    wide_decode = workloads.parse("decode-4x16x8")

    def measure(target, wanted, bandwidth):
        assert list(wanted) == [BATCH, DECODE, wide_decode]
        size = target.options.tensor_parallel_size
        steps = {DECODE.name: {"tpot_ms": 4.25 / size}, wide_decode.name: {"tpot_ms": 6.5 / size}}
        rate = {"output_tok_s": 100.0, "tpot_ms": 4.25 / size, "fraction_of_roof": {"throughput": 0.5, "latency": None}}
        return {**rate, "decodes": steps, "engine": {"kv_tokens": 1 << 20, "max_batch_size": 8}}

    document = scaling.run(target, [(1, 1), (2, 1)], BATCH, DECODE, wide_decode, measure=measure)
    report.show(*scaling.tables(document))
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["size", DECODE.name, wide_decode.name] in shown
    assert ["TP1", "4.25", "6.50"] in shown
