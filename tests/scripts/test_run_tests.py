# SPDX-License-Identifier: Apache-2.0
"""`make test` that is told to end stops what it runs in order, and leaves no process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

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
