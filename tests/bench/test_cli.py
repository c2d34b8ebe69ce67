# SPDX-License-Identifier: Apache-2.0
"""The verbs at the command line: flags of the engine, reports in files, one line for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import bench, cli


def test_latency(tiny_shape, tmp_path, capfd):
    file = tmp_path / "l.json"
    flags = ["--load-format", "dummy", "--device", "cpu", "--kv_cache_bytes", "4194304", "--max_batch_size", "4"]
    assert cli.main(["bench", "latency", str(tiny_shape), *flags, "-w", "decode-1x8x8", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert [row["workload"] for row in document["results"]] == ["decode-1x8x8"]
    assert document["engine"]["max_batch_size"] == 4
    assert document["roof"]["best_GBps"] > 0
    shown = capfd.readouterr().out
    assert "decode-1x8x8" in shown
    assert "of roofline" in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["latency", "x", "-w", "fast"], "workload 'fast' is unknown; use decode-1, "),
        (["throughput", "x", "--workload", "decode-1"], "workload 'decode-1' is not a batch workload; use batch-512x1000x1000"),
        (["throughput"], "option model is missing"),
        (
            ["scaling", "llama-3-8b", "--tp_size", "2"],
            "tensor_parallel_size=2 cannot be combined with --sizes; it comes from --tensor_parallel_size; give --sizes",
        ),
        (["scaling", "llama-3-8b", "--sizes", "two"], "a size is TP or TPxPP"),
        (["latency", "llama-3-8b", "--max_seq_len", "100"], "requests of 257 tokens do not fit max_seq_len=100"),
        (["serve", "http://localhost:1", "--rate", "1", "--concurrency", "1"], "exactly one of them is needed"),
        (["shape", "llama-9", "new"], "shape 'llama-9' is unknown"),
        (["shape", "llama-3-8b", "/proc/x"], "shape 'llama-3-8b' cannot be written to /proc/x; "),
        (["scaling", "x", "--plot", "x.foo"], "the suffix '.foo' names no image format"),
        (
            ["all", "x", "--json", "/proc/x.json"],
            "the report cannot be written to '/proc/x.json'; No such file or directory; name a file",
        ),
        (
            ["latency", "x", "--json", "/proc/x.json"],
            "the report cannot be written to '/proc/x.json'; No such file or directory; name a file",
        ),
        (["throughput", "x", "--json", "new/"], "the report cannot be written to 'new/'; that is a folder; name a file in it"),
        (["scaling", "x", "--json", "."], "the report cannot be written to '.'; that is a folder"),
        (
            ["serve", "http://localhost:1", "--rate", "1", "--json", "/proc/x.json"],
            "the report cannot be written to '/proc/x.json'",
        ),
    ],
)
def test_what_is_wrong_is_one_line(line, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *line]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "latency MODEL", "throughput MODEL", "serve http://localhost:1 --rate 1", "all MODEL -w decode-1x8x8",
        "scaling MODEL -w batch-4x8x4 --decode decode-1x8x8",
    ],
)  # fmt: skip
def test_a_file_of_something_else_stays(line, tmp_path, capsys, tiny_shape):
    file = tmp_path / "mine.json"
    file.write_text('{"mine": 1}')
    line = [str(tiny_shape) if word == "MODEL" else word for word in line.split()]
    assert cli.main(["bench", *line, "--json", str(file)]) == 2
    shown = capsys.readouterr()
    assert "name a new file" in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert file.read_text() == '{"mine": 1}'


def test_help_without_a_verb(capsys):
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in ("latency", "throughput", "scaling", "serve", "shape"))


def test_nothing_waits_for_torch():
    modules = sorted(path.stem for path in Path(bench.__path__[0]).glob("*.py") if path.stem != "__init__")
    assert len(modules) > 8
    code = (
        f"import sys; from phalanx.bench import {', '.join(modules)}; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
