# SPDX-License-Identifier: Apache-2.0
"""Layouts side by side: what of reports is compared, the best of each column, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.bench import layouts
from phalanx.bench.layouts import Column, MeasuredLayout
from phalanx.cli import every_verb
from phalanx.errors import OptionError

DECODE, BATCH = "decode-1", "batch-512x1000x1000"


def write(path: Path, figures: dict[str, float], strategy: str = "AUTO", gpu: str = "NVIDIA H200", **options: Any) -> Path:
    rows = [
        {"allreduce_strategy": strategy, "workload": name, "output_tok_s": value} | ({} if "batch" in name else {"tpot_ms": value})
        for name, value in figures.items()
    ]
    requested = {"model": "mixtral-8x7b", "dtype": "fp8", "max_num_tokens": 8192, **options}
    about = {"machine": {"cpu": "a CPU", "gpus": [gpu]}}
    engines = {strategy: {"dtype": "fp8", "device": "cuda"}}
    path.write_text(json.dumps({"about": about, "asked": requested, "engines": engines, "results": rows}))
    return path


@pytest.fixture
def reports(tmp_path: Path) -> list[Path]:
    """Three layouts of two GPUs, one of one, and repeated runs of one layout."""
    return [
        write(tmp_path / "tp2.json", {DECODE: 2.5, BATCH: 19000}, tensor_parallel_size=2, expert_traffic=0.0),
        write(tmp_path / "tp2_again.json", {DECODE: 2.7, BATCH: 21000}, tensor_parallel_size=2, expert_traffic=0.0),
        write(tmp_path / "ep2.json", {DECODE: 3.4, BATCH: 20100}, expert_parallel_size=2, expert_traffic=0.0),
        write(tmp_path / "replicas.json", {BATCH: 17000}, replicas=2, expert_traffic=0.0),
        write(tmp_path / "tp1.json", {DECODE: 3.9, BATCH: 11000, "decode-64": 12.0}, expert_traffic=0.0),
    ]


def test_the_best_of_each_column_among_layouts_of_as_many_gpus(reports: list[Path]) -> None:
    comparison = layouts.compare(reports)
    assert [layout.name for layout in comparison.layouts] == ["tp 1 pp 1", "tp 1 pp 1 ep 2", "tp 1 pp 1 x 2 replicas", "tp 2 pp 1"]
    decode, batch = comparison.columns  # decode-64 has one layout alone
    assert (decode, batch) == (Column(DECODE, 0.0), Column(BATCH, 0.0))
    two = MeasuredLayout(2, "tp 2 pp 1")
    assert comparison.figures[two, decode] == 2.6  # the median
    assert comparison.best(decode, 2) == two  # less is better
    assert comparison.best(batch, 2) == MeasuredLayout(2, "tp 1 pp 1 ep 2")  # more is better
    assert comparison.best(batch, 1) is None  # nothing to compare
    lines = [line for line in layouts.tables(comparison) if isinstance(line, str)]
    assert lines == [f"best on 2 GPUs: {DECODE}: tp 2 pp 1 (2.60 ms); {BATCH}: tp 1 pp 1 ep 2 (20,100 tok/s)"]


def test_skewed_routing_is_a_column_of_its_own(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}{traffic}.json", {DECODE: value}, expert_traffic=traffic, tensor_parallel_size=2, **options)
        for name, options, values in (("tp", {}, (2.5, 2.6)), ("moe", {"moe_expert_parallel_size": 2}, (2.4, 3.7)))
        for traffic, value in zip((0.0, 1.2), values, strict=True)
    ]
    comparison = layouts.compare(files)
    assert comparison.column_names() == [f"{DECODE}, uniform", f"{DECODE}, power law 1.2"]
    assert [comparison.best(column, 2) for column in comparison.columns] == [
        MeasuredLayout(2, "tp 2 pp 1 moe_ep 2"),
        MeasuredLayout(2, "tp 2 pp 1"),
    ]


def test_other_strategies_and_exchanges_are_named(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.json", {DECODE: 3.0}, expert_parallel_size=2, expert_exchange="ALL_TO_ALL"),
        write(tmp_path / "b.json", {DECODE: 2.0}, "NCCL", tensor_parallel_size=2, pipeline_parallel_size=2),
    ]
    assert [layout.name for layout in layouts.compare(files).layouts] == ["tp 1 pp 1 ep 2, ALL_TO_ALL", "tp 2 pp 2, NCCL"]


def test_copies_of_experts_are_another_layout(tmp_path: Path) -> None:
    options = {"tensor_parallel_size": 2, "moe_expert_parallel_size": 2}
    files = [write(tmp_path / f"{count}.json", {DECODE: 3.0 - count}, redundant_experts=count, **options) for count in (0, 2)]
    assert [layout.name for layout in layouts.compare(files).layouts] == ["tp 2 pp 1 moe_ep 2", "tp 2 pp 1 moe_ep 2 + 2 copies"]


def test_what_cannot_be_compared(tmp_path: Path, reports: list[Path]) -> None:
    other = write(tmp_path / "other.json", {DECODE: 1.0}, dtype="bf16")
    with pytest.raises(OptionError, match="their dtype differ"):
        layouts.compare([reports[0], other])
    other = write(tmp_path / "other.json", {DECODE: 1.0}, gpu="NVIDIA H100 80GB HBM3")
    with pytest.raises(OptionError, match="their device differ"):
        layouts.compare([reports[0], other])
    other = write(tmp_path / "other.json", {DECODE: 1.0}, cuda_graphs=False)
    with pytest.raises(OptionError, match="their cuda_graphs differ"):
        layouts.compare([reports[0], other])
    with pytest.raises(OptionError, match="no two of them have a workload in common"):
        layouts.compare(reports[:1])
    broken = tmp_path / "broken.json"
    for text in ("{", "[]", "{}", '{"engines": {}, "results": [], "asked": {"model": "x"}}'):
        broken.write_text(text)
        with pytest.raises(OptionError, match="no report of `phalanx bench all`"):
            layouts.compare([broken])
    with pytest.raises(OptionError, match=r"absent\.json"):
        layouts.compare([tmp_path / "absent.json"])


def test_the_command(tmp_path: Path, reports: list[Path]) -> None:
    files = list(map(str, reports))
    plot, out = tmp_path / "layouts.png", tmp_path / "layouts.json"
    result = CliRunner().invoke(every_verb(), ["bench", "layouts", *files, "--plot", str(plot), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "2.60 *" in result.output
    assert "best on 2 GPUs" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    best = [row["layout"] for row in json.loads(out.read_text())["figures"] if row["best"]]
    assert sorted(best) == ["tp 1 pp 1 ep 2", "tp 2 pp 1"]
    result = CliRunner().invoke(every_verb(), ["bench", "layouts", *files, "-w", DECODE])
    assert BATCH not in result.output
    assert DECODE in result.output
