# SPDX-License-Identifier: Apache-2.0
"""benchmarks/engine/everything_on_gpu.py on CPU: what it keeps of works that end, that fail, and that there is no time for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.engine import everything_on_gpu as everything
from phalanx.bench.workloads import parse
from tests.support.command_line import require_parsed

pytestmark = pytest.mark.usefixtures("forked_python")

SCRIPT = [sys.executable, "-m", "benchmarks.engine.everything_on_gpu", "--device", "cpu"]


def test_works_on_cpu(tmp_path: Path) -> None:
    """Some beside one another, a server among them, and one for which there is no time; everything in one file."""
    out = tmp_path / "out"
    arguments = ["--out", out, "--kernels", tmp_path / "kernels", "--packed", tmp_path / "all.tgz"]
    result = subprocess.run([*SCRIPT, *arguments], cwd=harness.ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1, result.stdout
    assert "late: not begun, as it may take 100000 s" in result.stdout
    for name in ("python", "pair", "http"):
        assert f"{name}: done" in result.stdout, result.stdout + result.stderr
    assert (out / "python.txt").read_text() == "2\n"
    with tarfile.open(tmp_path / "all.tgz") as packed:
        assert {"pair.json", "pair.txt", "http.json", "http.streams0.json", "http.server.txt"} <= set(packed.getnames())
    streams = json.loads((out / "http.streams0.json").read_text())["results"]
    assert (streams["completed"], streams["failed"]) == (4, 0)
    assert streams["fraction_of_offline"] > 0
    facts = (out / "http.server.txt").read_text()
    assert facts.startswith("ready after ")
    assert "rank_memory_bytes" in facts


def test_the_commands_of_all_works_are_understood() -> None:
    """Those that need GPUs too: options of engine and server, names of workloads, files and modules."""
    for name, work in everything.works().items():
        if work.bench:
            require_parsed(["bench", *work.bench])
            for flag, value in pairwise(work.bench):
                if flag in ("-w", "--decode"):
                    assert parse(value).requests >= 1, name
        if work.served:
            require_parsed(["serve", work.model, *work.served])
        if work.python[:2] == ["-m", "phalanx"]:
            require_parsed(list(work.python[2:]))
        modules = [module for flag, module in pairwise(work.python) if flag == "-m" and "." in module]
        assert all(find_spec(module) for module in modules), name


def test_what_is_packed(tmp_path: Path) -> None:
    """Results of the tuner lie in a folder of their own; the shape that a server was started from is none."""
    for name in ("a.json", "a.log", "tune4/benchmark.tp4.sm90.csv", "tune4/tables/t.json", "shape_a/config.json"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("")
    everything.pack(tmp_path / "out", tmp_path / "all.tgz")
    with tarfile.open(tmp_path / "all.tgz") as packed:
        assert packed.getnames() == ["a.json", "tune4/benchmark.tp4.sm90.csv", "tune4/tables/t.json"]


def test_a_work_that_fails_says_so_and_one_that_is_slow_is_cut_off(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        broken = everything.Work(1, 30, ["all", "demo", "--max_batch_size", "none"])
        assert everything.Run("broken", broken, tmp_path, tmp_path / "kernels", log).all() == 2
        log.seek(0)
        assert b"max_batch_size" in log.read()
        slow = everything.Work(1, 1, ["all", "demo", "--device", "cpu"])
        assert everything.Run("slow", slow, tmp_path, tmp_path / "kernels", log).all() == 124


def test_ended_it_leaves_nothing_behind(tmp_path: Path, new_interpreters: None) -> None:
    """Processes are found by their command lines, of which forks have none."""
    arguments = ["--out", tmp_path / "out", "--kernels", tmp_path / "kernels", "--only", "http"]
    script = subprocess.Popen([*SCRIPT, *arguments], cwd=harness.ROOT, stdout=subprocess.DEVNULL)
    try:
        log, end = tmp_path / "out" / "http.txt", time.monotonic() + 90
        while not (log.exists() and "is served at" in log.read_text()):
            assert script.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 143
    finally:
        script.kill()
    folder = str(tmp_path).encode()
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if folder in _read(path)]
    assert [pid for pid in left if int(pid) != os.getpid()] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_every_work_fits_four_gpus_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    known = everything.works()
    words = [word for work in known.values() for word in work.python if "/" in word and not word.startswith("OUT/")]
    assert all((harness.ROOT / word).exists() for word in words)
    assert all(work.gpus in (1, 2, 4) and (work.bench or work.served or work.python) for work in known.values())
    refused = subprocess.run([*SCRIPT, "--out", tmp_path, "--only", "tp5"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "'tp5'" in refused.stderr
    assert "python, pair, late, http" in refused.stderr
