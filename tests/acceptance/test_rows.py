# SPDX-License-Identifier: Apache-2.0
"""benchmarks/serve/rows.py on CPU: what it keeps of rows that end, that fail, and that there is no time for; and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.serve import rows

SCRIPT = [sys.executable, str(record.ROOT / "benchmarks" / "serve" / "rows.py"), "--device", "cpu"]


def test_rows_on_cpu(tmp_path: Path) -> None:
    """Two rows beside one another, a server among them, and one for which there is no time; everything in one file."""
    out = tmp_path / "out"
    asked = ["--out", out, "--kernels", tmp_path / "kernels", "--packed", tmp_path / "all.tgz"]
    done = subprocess.run([*SCRIPT, *asked], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout
    assert "late: not begun" in done.stdout
    assert "python: done, on [0]" in done.stdout
    assert "pair: done, on [1, 2]" in done.stdout
    assert "http: done, on [3]" in done.stdout
    assert (out / "python.txt").read_text() == "2\n"
    with tarfile.open(tmp_path / "all.tgz") as packed:
        assert {"pair.json", "pair.txt", "http.json", "http.streams0.json", "http.server.txt"} <= set(packed.getnames())
    streams = json.loads((out / "http.streams0.json").read_text())["results"]
    assert (streams["completed"], streams["failed"]) == (4, 0)
    assert streams["fraction_of_offline"] > 0
    facts = (out / "http.server.txt").read_text()
    assert facts.startswith("ready after ")
    assert "rank_memory_bytes" in facts


def test_a_row_that_fails_says_so_and_one_that_is_slow_is_cut_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = rows.Row(1, 30, ["all", "demo", "--max_batch_size", "none"])
    assert rows.run_row("broken", broken, tmp_path, tmp_path / "kernels") == 2
    assert "max_batch_size" in capfd.readouterr().err
    slow = rows.Row(1, 1, ["all", "demo", "--device", "cpu"])
    assert rows.run_row("slow", slow, tmp_path, tmp_path / "kernels") == 124
    assert "cut off" in capfd.readouterr().out


def test_ended_it_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    script = subprocess.Popen(
        [*SCRIPT, "--out", tmp_path / "out", "--kernels", tmp_path / "kernels", "--only", "http"], stdout=subprocess.DEVNULL
    )
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
    mine = str(tmp_path).encode()
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if mine in _read(path)]
    assert [pid for pid in left if int(pid) != os.getpid()] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_every_row_fits_four_gpus_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    known = rows.rows()
    assert all((record.ROOT / word).exists() for row in known.values() for word in row.python if "/" in word)
    assert all(row.gpus in (1, 2, 4) and (row.bench or row.served or row.python) for row in known.values())
    asked = subprocess.run([*SCRIPT, "--out", tmp_path, "--only", "tp5"], capture_output=True, text=True, timeout=60)
    assert asked.returncode == 2
    assert "'tp5'" in asked.stderr
    assert "python, pair, late, http" in asked.stderr
