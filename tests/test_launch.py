# SPDX-License-Identifier: Apache-2.0
"""Children end with their parent, whatever ends it, and their end is noticed and named."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx import launch
from phalanx.errors import EngineError
from tests.support.serve_processes import session_nice

CHILD = """
import os, sys, time
from phalanx.launch import read_config
config = read_config()
open(config["mark"], "w").write(open("/proc/self/cmdline").read().strip("\\0") + "|" + str(os.getpid()) + "|" + str(os.getsid(0)))
if config["does"] == "exit":
    sys.exit(config["status"])
if config["does"] == "hold the interpreter":
    import ctypes
    ctypes.PyDLL(None).sleep(60)
time.sleep(60)
"""

PARENT = """
import sys, time
from phalanx import launch
child = launch.start("launch_child", {"mark": sys.argv[1], "does": sys.argv[2]}, "phalanx rank 7")
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launch_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def wait_for(path: Path, seconds: float = 60.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path.name} did not appear in {seconds} s")


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_child_has_its_config_its_title_and_its_own_session(tmp_path: Path) -> None:
    child = launch.start("launch_child", {"mark": str(tmp_path / "mark"), "does": "wait"}, "phalanx rank 7")
    title, pid, session = wait_for(tmp_path / "mark").split("|")
    assert title == "phalanx rank 7"
    assert int(pid) == int(session) == child.pid
    launch.stop([child], grace=10)
    assert child.process.returncode == -signal.SIGTERM


def test_a_nice_value_counts_against_other_sessions(tmp_path: Path) -> None:
    """Linux may group processes by session: then that of the process says nothing beyond its own."""
    child = launch.start("launch_child", {"mark": str(tmp_path / "mark"), "does": "wait"}, "phalanx rank 7")
    try:
        launch.set_nice(child.pid, 7)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 7
        assert session_nice(child.pid) in (None, 7)
        idle = os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        assert idle == launch.sessions_are_groups(child.pid)
    finally:
        launch.stop([child], grace=0)
    launch.set_nice(child.pid, 7)


def test_the_watch_names_exit_status_and_signal(tmp_path: Path) -> None:
    first = launch.start("launch_child", {"mark": str(tmp_path / "a"), "does": "exit", "status": 3}, "first")
    second = launch.start("launch_child", {"mark": str(tmp_path / "b"), "does": "wait"}, "second")
    watch = launch.Watch([first, second])
    assert select.select([watch], [], [], 60)[0]
    (exit_of_first,) = watch.ended()
    assert (exit_of_first.child, exit_of_first.words) == (first, "exited with status 3")
    assert watch.ended() == []
    wait_for(tmp_path / "b")
    second.signal(signal.SIGKILL)
    assert select.select([watch], [], [], 60)[0]
    assert [e.words for e in watch.ended()] == ["was killed by SIGKILL"]
    watch.close()
    launch.stop([first, second], grace=0)


def test_a_stopped_child_can_be_ended(tmp_path: Path) -> None:
    child = launch.start("launch_child", {"mark": str(tmp_path / "mark"), "does": "wait"}, "stands still")
    wait_for(tmp_path / "mark")
    os.kill(child.pid, signal.SIGSTOP)
    begin = time.monotonic()
    launch.stop([child], grace=0.2)
    assert not child.alive
    assert time.monotonic() - begin < 8


@pytest.mark.parametrize("does", ["wait", "hold the interpreter"])
def test_a_killed_parent_takes_its_child_along(tmp_path: Path, does: str) -> None:
    """Also while the child's main thread sits in C code and never lets go of the interpreter."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "mark"), does], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(tmp_path / "mark")
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


def test_a_parent_that_returns_takes_its_child_along(tmp_path: Path) -> None:
    code = PARENT.replace("time.sleep(60)", "while not __import__('os').path.exists(sys.argv[1]): time.sleep(0.02)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "mark"), "wait"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert gone(int(done.stdout))


@pytest.mark.parametrize("value", [None, "FASTEST_FIRST"])
def test_gpus_are_numbered_as_nvidia_smi_does_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", value)
    code = "import os, phalanx.launch as l; open(l.read_config()['mark'], 'w').write(os.environ['CUDA_DEVICE_ORDER'])"
    (tmp_path / "order_child.py").write_text(code)
    child = launch.start("order_child", {"mark": str(tmp_path / "mark")}, "phalanx rank 7")
    try:
        assert wait_for(tmp_path / "mark") == (value or "PCI_BUS_ID")
    finally:
        launch.stop([child], grace=0)


def test_a_module_that_is_not_there_is_an_end_not_a_hang() -> None:
    with pytest.raises(EngineError, match=r"nobody.*exited with status 1"):
        launch.start("no_such_module_here", {"longer than a pipe holds": "y" * 200_000}, "nobody")


def test_a_child_module_run_by_hand_says_what_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch_child"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "only an engine starts this module" in done.stderr


def test_launching_needs_no_torch() -> None:
    code = "import sys, phalanx.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_garbage_is_collected_again_once_modules_are_imported_or_cannot_be():
    code = """
import gc
from phalanx.launch import importing
with importing():
    assert not gc.isenabled()
    import decimal
assert gc.isenabled()
assert gc.get_freeze_count() > 1000
try:
    with importing():
        import no_such_module
except ModuleNotFoundError:
    assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
