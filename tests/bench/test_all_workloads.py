# SPDX-License-Identifier: Apache-2.0
"""All workloads through one engine, strategies side by side, and nothing measured twice."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager

import pytest

from phalanx import cli
from phalanx.bench import all_workloads, load, offline, report, workloads
from phalanx.bench.roofline import Bandwidth
from phalanx.errors import EngineError, OptionError
from phalanx.hardware import provenance
from tests.bench.conftest import requested_options

WORKLOADS = [workloads.parse(name) for name in ("decode-1x8x8", "decode-2x8x8", "batch-4x8x4")]


@pytest.fixture
def started(monkeypatch, running):
    """The strategies of the engines that were started: the session's own stands in for each."""
    _, llm = running
    strategies = []

    @contextmanager
    def engine(target):
        strategies.append(target.options.allreduce_strategy)
        yield llm, 1.0

    monkeypatch.setattr(all_workloads.offline, "engine", engine)
    monkeypatch.setattr(all_workloads.roofline, "measure", lambda device: Bandwidth(1e9, {"copy": 1e9}))
    return strategies


def test_strategies():
    assert all_workloads.parse_strategies("AUTO, NCCL,AUTO") == ["AUTO", "NCCL"]
    with pytest.raises(OptionError, match="strategy 'FASTEST' is unknown; use AUTO, NCCL, ONESHOT, TWOSHOT, RS_NORM_AG, GEMM_RS"):
        all_workloads.parse_strategies("AUTO,FASTEST")


def test_one_engine_for_all_workloads_of_a_strategy(target, started, tmp_path, capsys):
    file = tmp_path / "all.json"
    document = all_workloads.run(target, WORKLOADS, ["AUTO", "NCCL"], json_file=file)
    assert started == ["AUTO", "NCCL"]
    assert [(row["allreduce_strategy"], row["workload"]) for row in document["results"]] == [
        (strategy, workload.name) for strategy in ("AUTO", "NCCL") for workload in WORKLOADS
    ]
    assert set(document["engines"]) == {"AUTO", "NCCL"}
    assert document["engines"]["AUTO"]["rank_phases_s"]["import torch"] > 0
    assert json.loads(file.read_text()) == json.loads(json.dumps(document))
    report.show(*all_workloads.tables(document))
    shown = capsys.readouterr().out
    assert shown.count("import torch") == 2
    assert "AUTO over NCCL" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.strip().startswith("batch-4x8x4")] == ["batch-4x8x4"] * 3
    assert load.offline_row(file, load.Load(requests=4, input_len=8, output_len=4, rate=1.0))["output_tok_s"] > 0


def test_what_is_in_the_file_is_not_run_again(target, started, tmp_path, monkeypatch):
    file = tmp_path / "all.json"
    ran = []

    def measure(target, llm, workload, bandwidth):
        ran.append((target.options.allreduce_strategy, workload.name))
        if ran[-1] == ("NCCL", "decode-2x8x8") and len(ran) == 5:
            raise EngineError("rank 1 was lost")
        return {"workload": workload.name, "tpot_ms": 1.0}

    monkeypatch.setattr(all_workloads, "measure", measure)
    with pytest.raises(EngineError):
        all_workloads.run(target, WORKLOADS, ["AUTO", "NCCL"], json_file=file)
    document = all_workloads.run(target, WORKLOADS, ["AUTO", "NCCL"], json_file=file)
    assert ran[5:] == [("NCCL", "decode-2x8x8"), ("NCCL", "batch-4x8x4")]
    assert started == ["AUTO", "NCCL", "NCCL"]
    assert len(document["results"]) == 6
    with pytest.raises(OptionError, match="its workloads differ"):
        all_workloads.run(target, WORKLOADS[:1], ["AUTO", "NCCL"], json_file=file)


def test_a_file_that_can_no_longer_be_written_stops_nothing(target, started, tmp_path, monkeypatch):
    monkeypatch.setattr(
        all_workloads, "measure", lambda target, llm, workload, bandwidth: {"workload": workload.name, "tpot_ms": 1.0}
    )
    (tmp_path / "plain").write_text("x")
    document = all_workloads.run(target, WORKLOADS, ["AUTO"], json_file=tmp_path / "plain" / "all.json")
    assert len(document["results"]) == len(WORKLOADS)


def test_a_figure_keeps_the_commit_that_it_was_measured_at(target, started, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_checkout", lambda: "")
    monkeypatch.setattr(
        all_workloads, "measure", lambda target, llm, workload, bandwidth: {"workload": workload.name, "tpot_ms": 1.0}
    )
    file, strategies = tmp_path / "all.json", ["AUTO", "NCCL"]
    all_workloads.run(dataclasses.replace(target, commit="old"), WORKLOADS, strategies, json_file=file)
    document = json.loads(file.read_text())
    document["results"].pop()
    file.write_text(json.dumps(document))
    document = all_workloads.run(dataclasses.replace(target, commit="new"), WORKLOADS, strategies, json_file=file)
    assert [row["measured"]["commit"] for row in document["results"]] == ["old"] * 5 + ["new"]
    assert document["results"][5]["measured"]["date"] == document["about"]["date"]


def test_the_verb(tiny_shape, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "0123456789ab")
    monkeypatch.setattr(provenance, "_checkout", lambda: "")
    file = tmp_path / "all.json"
    flags = ["--load-format", "dummy", "--device", "cpu", "--kv_cache_bytes", "4194304", "--max_batch_size", "4"]
    names = ["-w", "decode-1x8x8", "-w", "batch-4x8x4"]
    assert cli.main(["bench", "all", str(tiny_shape), *flags, *names, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert [row["workload"] for row in document["results"]] == ["decode-1x8x8", "batch-4x8x4"]
    assert document["about"]["commit"] == "0123456789ab"
    assert "batch-4x8x4" in capfd.readouterr().out
    line = ["bench", "all", str(tiny_shape), "--strategies", "AUTO,NCCL", "--allreduce_strategy", "NCCL"]
    assert cli.main(line) == 2
    assert "--allreduce_strategy exclude each other; give one of them" in capfd.readouterr().err


def test_a_target_knows_its_commit(tiny_shape):
    with offline.target(requested_options(tiny_shape), "abc") as target:
        assert target.commit == "abc"
