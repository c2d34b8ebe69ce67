# SPDX-License-Identifier: Apache-2.0
"""`make test`: told to end it stops what it runs in order, and leaves no process; few failures are tried again, alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts import run_tests
from tests.support.serve_processes import until

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import signal, sys
from scripts.run_tests import run
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run([sys.executable, "-c", sys.argv[1]])
"""
TESTS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({file!r}).write_text(str(child.pid))
try:
    time.sleep(600)
finally:
    child.kill()
    child.wait()
"""


def test_sigterm_leaves_no_orphans(tmp_path):
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", RUN, TESTS.format(file=str(file))], cwd=ROOT)
    until(lambda: file.exists() and file.read_text())
    tree = psutil.Process(process.pid).children(recursive=True)
    assert len(tree) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    _, alive = psutil.wait_procs(tree, timeout=5)
    assert alive == []


FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_once(number):
    file = pathlib.Path(__file__).with_name(f"ran-{{number}}")
    ran_before = file.exists()
    file.touch()
    assert ran_before
def test_right():
    pass
"""
FAILS = """
def test_wrong():
    assert False
"""


@pytest.mark.parametrize(
    ("count", "more", "status", "runs"),
    [(2, "", 0, 2), (1, FAILS, 1, 1), (run_tests.MOST_AGAIN + 1, "", 1, 0)],
)
def test_few_failures_run_again(count, more, status, runs, tmp_path, capfd):
    (tmp_path / "pytest.ini").touch()
    file = tmp_path / "test_it.py"
    file.write_text(FAILS_ONCE.format(count=count) + more)
    lane = run_tests.Lane(["-n", "0", "-c", str(tmp_path / "pytest.ini"), str(file)], tmp_path / "cache")
    lane.status = run_tests.run(lane.command)
    assert lane.status == run_tests.FAILED
    run_tests.run_failed_again([lane])
    assert lane.status == status
    assert capfd.readouterr().out.count("PASSES ALONE") == runs


def test_a_run_that_ended_in_error_is_not_tried_again(tmp_path, capfd):
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name")
    lane = run_tests.Lane(["-n", "0", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)], tmp_path / "cache")
    lane.status = run_tests.run(lane.command)
    assert lane.status not in (0, run_tests.FAILED)
    run_tests.run_failed_again([lane])
    assert lane.status
    assert "== again" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [((0, 0, 0), 0), ((0, 5, 0), 0), ((0, 5, 5), 5), ((0, 0, 1), 1), ((1, 0, 0), 1), ((0, -11, 0), -11), ((0, 5, -9), -9)],
)
def test_nothing_but_success_is_success(statuses, expected):
    """-11: a signal ended the run."""
    assert run_tests.exit_status(*statuses) == expected
