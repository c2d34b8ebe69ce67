# SPDX-License-Identifier: Apache-2.0
"""benchmarks.engine.two_trees: rounds in turn, and medians of one machine and engine alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.engine import two_trees


def report(start: float, step: float, rate: float | None = None) -> dict[str, object]:
    about = {"machine": {"gpus": ["H200"]}}
    rows = [{"workload": "decode-1", "tpot_ms": step, "output_tok_s": 1e3 / step}]
    if rate is None:
        return {"about": about, "engine": {"start_s": start}, "results": rows}
    rows.append({"workload": "batch-512x1000x1000", "output_tok_s": rate})
    return {"about": about, "engines": {"AUTO": {"start_s": start}}, "results": rows}


def test_medians_of_each_group(tmp_path):
    for name, content in {
        "8b.before.1": report(20, 4.0, 100), "8b.before.2": report(30, 4.2, 90), "8b.before.3": report(21, 4.1, 95),
        "8b.after.1": report(22, 4.1, 95), "8b.before.kept.1": report(9, 5), "8b.after.kept.1": report(8, 3.9),
        "70b.after.1": report(50, 10, 60),
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    medians = {(row["group"], row["measure"]): row for row in two_trees.joined(tmp_path)["medians"]}
    assert {group for group, _ in medians} == {"8b"}  # of 70b there is one tree
    assert medians["8b", "start with no kernels, s"]["before"] == 21
    kept = medians["8b", "start with the kernels of an earlier one, s"]
    assert (kept["before"], kept["after"], kept["ratio"]) == (9, 8, 0.8889)
    step = medians["8b", "decode-1, ms"]
    assert (step["before"], step["after"]) == (4.15, 4.0)
    assert medians["8b", "batch-512x1000x1000, tok/s"]["ratio"] == 1.0


def test_other_strategies_and_long_prompts_have_measures_of_their_own(tmp_path):
    def row(workload: str, step: float, first: float, strategy: str) -> dict[str, object]:
        return {"workload": workload, "tpot_ms": step, "prefill_s": first, "allreduce_strategy": strategy}

    for tree, faster in (("before", 0.0), ("after", 1.0)):
        content = {
            "about": {},
            "engines": {"AUTO": {"start_s": 20 - faster}, "NCCL": {"start_s": 5}},
            "results": [
                row("decode-1", 10 - faster, 0.1, "AUTO"), row("decode-1x16384x512", 13 - faster, 1.5, "AUTO"),
                row("decode-1", 11 - faster, 0.1, "NCCL"), row("decode-1", 12 - faster, 0.1, "NCCL"),
            ],
        }  # fmt: skip
        (tmp_path / f"70b.{tree}.1.json").write_text(json.dumps(content))
    medians = {row["measure"]: (row["before"], row["after"]) for row in two_trees.joined(tmp_path)["medians"]}
    assert medians == {
        "start with no kernels, s": (20, 19),  # not that of the second engine, which finds the first one's kernels
        "decode-1, ms": (10, 9), "decode-1x16384x512, ms": (13, 12), "decode-1x16384x512, s to the first token": (1.5, 1.5),
        "decode-1 by NCCL, ms": (11.5, 10.5),
    }  # fmt: skip


def test_rounds_in_turn(tmp_path, monkeypatch):
    commands: list[tuple[Path, str, list[str]]] = []

    def bench(command: list[str], *, cwd: Path, env: dict[str, str], check: bool) -> None:
        commands.append((cwd, env["HOME"], command))
        Path(command[command.index("--json") + 1]).write_text(json.dumps(report(1, 2, None if "latency" in command else 3)))

    monkeypatch.setattr(subprocess, "run", bench)
    monkeypatch.setattr("benchmarks.harness.about", dict)
    out = tmp_path / "reports"
    arguments = ["--before", f"{tmp_path}/old=aaa", "--after", f"{tmp_path}/new=bbb", "--out", str(out), "--rounds", "2"]
    assert two_trees.main([*arguments, "--", "llama-3-8b", "--dtype", "bf16"]) == 0
    assert [cwd.name for cwd, _, _ in commands] == ["old", "old", "new", "new", "new", "new", "old", "old"]
    assert len({home for _, home, _ in commands}) == 4  # the second start of a round has the kernels of the first
    assert all(command[4:8] in (["all", *rest], ["latency", *rest]) for rest in [["llama-3-8b", "--dtype", "bf16"]]
               for _, _, command in commands)  # fmt: skip
    document = json.loads((tmp_path / "two_trees.json").read_text())
    assert document["commits"] == {"before": "aaa", "after": "bbb"}
    assert len(document["reports"]) == 8
    assert document["about"]["machine"] == {"gpus": ["H200"]}  # of the reports, not of this machine
    commands.clear()
    assert two_trees.main([*arguments, "--", "llama-3-8b"]) == 0  # all of it is there
    assert not commands


def test_a_folder_without_reports_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        two_trees.main(["--before", "aaa", "--after", "bbb", "--out", str(tmp_path / "reports"), "--rounds", "0"])
    assert "holds no report GROUP.TREE.ROUND.json" in capsys.readouterr().err
