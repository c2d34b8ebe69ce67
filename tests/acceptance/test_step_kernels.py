# SPDX-License-Identifier: Apache-2.0
"""The benchmark of long steps by kernels: what it makes of a trace, and ranks that record one."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest

from benchmarks.engine import step_kernels


def event(name: str, begin: float, us: float, kind: str = "kernel", grid: tuple[int, ...] = (2, 1, 1)) -> dict[str, object]:
    return {"cat": kind, "name": name, "ts": begin, "dur": us, "args": {"grid": list(grid)}}


def write(folder: Path, events: list[dict[str, object]]) -> Path:
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_trace_by_kernels(tmp_path: Path) -> None:
    events = [
        event("gemm", 3000.0, 500.0), event("gemm", 1000.0, 700.0), event("gemm", 2000.0, 900.0, grid=(4, 1, 1)),
        event("copy", 1100.0, 9.0, "gpu_memcpy"), event("aten::mm", 900.0, 50.0, "cpu_op"),
    ]  # fmt: skip
    figure = step_kernels.summary(step_kernels.read(write(tmp_path, events)), steps=2)
    assert figure["step_ms"] == 1.25
    assert figure["kernels_ms"] == 1.05
    assert figure["idle_ms"] == 0.2
    assert figure["kernels"] == [
        {"name": "gemm", "grid": "2x1x1", "ms": 0.6, "alone_ms": 0.6, "calls": 1.0, "median_us": 600.0, "alone_us": 600.0},
        {"name": "gemm", "grid": "4x1x1", "ms": 0.45, "alone_ms": 0.45, "calls": 0.5, "median_us": 900.0, "alone_us": 900.0},
    ]


def test_a_kernel_that_waits_for_others_has_the_rest_alone(tmp_path: Path) -> None:
    """One that was launched 300 us before the first ended, one within another, and a pause."""
    events = [event("a", 0.0, 500.0), event("b", 200.0, 400.0), event("c", 250.0, 100.0), event("a", 700.0, 100.0)]
    figure = step_kernels.summary(step_kernels.read(write(tmp_path, events)), steps=1)
    assert {row["name"]: row["alone_ms"] for row in figure["kernels"]} == {"a": 0.6, "b": 0.1, "c": 0.0}
    assert (figure["step_ms"], figure["idle_ms"]) == (0.8, 0.1)


def test_without_kernels_operators_that_no_other_one_called(tmp_path: Path) -> None:
    events = [event("outer", 0.0, 10.0, "cpu_op"), event("inner", 0.0, 4.0, "cpu_op"), event("inner", 12.0, 3.0, "cpu_op")]
    assert [each["name"] for each in step_kernels.read(write(tmp_path, events))] == ["outer", "inner"]


def test_ranks_record_long_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "--device cpu --requests 12 --input_len 60 --output_len 4 --tokens 64 --first 1 --steps 2 --max_num_tokens 128"
    monkeypatch.setattr("sys.argv", ["step_kernels", *few.split(), "--out", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "")  # and what is set in the process is undone
    monkeypatch.setenv(step_kernels.VARIABLE, "")
    assert step_kernels.main() == 0
    report = json.loads((tmp_path / "step_kernels.json").read_text())
    names = {row["name"] for row in report["demo bf16 tp1"]["kernels"]}
    assert {"aten::linear", "aten::scaled_dot_product_attention"} & names
    assert report["demo bf16 tp1"]["kernels_ms"] > 0


def test_several_numbers_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "--device cpu --requests 1,3 --input_len 8 --output_len 6 --first 2 --steps 2 --max_num_tokens 128"
    monkeypatch.setattr("sys.argv", ["step_kernels", *few.split(), "--out", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv(step_kernels.VARIABLE, "")
    assert step_kernels.main() == 0
    report = json.loads((tmp_path / "step_kernels.json").read_text())
    assert {"demo bf16 tp1 1 requests", "demo bf16 tp1 3 requests"} < set(report)


def test_numbers_of_requests_rise() -> None:
    assert step_kernels.numbers("1,64") == [1, 64]
    with pytest.raises(argparse.ArgumentTypeError, match="does not rise"):
        step_kernels.numbers("64,1")
