# SPDX-License-Identifier: Apache-2.0
"""A process has forks do tasks. It is started again where it was killed, and its forks end with it. Limits: test_compiler.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from phalanx import launch
from phalanx.errors import EngineClosed, EngineError
from phalanx.serve.forks.server import ForkServer
from tests.support.serve_processes import session_nice, until

NICE = 3


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    limits = {"at_once": 2, "nice": NICE, "seconds": 2, "memory": 1 << 30}
    forks = ForkServer("tests", "tests.support.fork_task:make_task", **limits, setup=lambda: b"set up")
    yield forks
    forks.close()


def ask(forks: ForkServer, text: bytes) -> list[bytes]:
    with forks.task() as fork:
        fork.send_bytes(text)
        return fork.recv_bytes().split(b" ", 3)


def test_tasks_share_a_fork_that_keeps_nothing(forks):
    answers = [ask(forks, b"x" * size) for size in (1, 2, 3, 4, 1 << 20)]
    assert [len(answer[3]) for answer in answers] == [1, 2, 3, 4, 1 << 20]
    assert {tuple(answer[:2]) for answer in answers} == {(b"set", b"up")}
    assert len({answer[2] for answer in answers}) <= 2
    lower = os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert session_nice(forks._child.pid) in (None, lower), "it has its full weight"
    assert os.getpriority(os.PRIO_PROCESS, int(answers[0][2])) == lower, "it began after its process had that"


def test_a_fork_that_keeps_memory_is_replaced(forks):
    keeping = {ask(forks, b"k" * 50_000)[2] for _ in range(3)}
    assert len(keeping) == 3
    assert ask(forks, b"x")[2] not in keeping


def test_a_process_that_was_killed_is_started_again(forks):
    ask(forks, b"a")
    first = forks._child
    os.kill(first.pid, signal.SIGKILL)
    first.process.wait()
    assert ask(forks, b"b")[3] == b"b"
    assert forks._child is not first


def test_a_close_ends_a_fork_that_works_and_a_thread_that_waits_for_it(forks):
    """Stopped, as if its task took long: the interpreter's exit waits for threads."""
    forks.start()
    main = psutil.Process(forks._child.pid)
    until(lambda: len(main.children()) == 2)
    forked = main.children()
    for each in forked:
        each.suspend()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            ask(forks, b"x" * (1 << 22))
        except (OSError, EOFError) as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    forks.close()
    thread.join(10)
    assert not thread.is_alive()
    assert errors
    until(lambda: all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in forked))
    with pytest.raises(EngineClosed):
        forks.start()


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    forks = ForkServer("tests", "phalanx.serve.forks.worker:nothing", at_once=1, nice=0, seconds=1, memory=1 << 30)
    with pytest.raises(EngineError, match="the process for tests does not start"):
        forks.start()
    assert not forks._child.alive
    monkeypatch.setattr(launch, "start", lambda *_, **__: pytest.fail("it is closed"))
    forks.close()
    with pytest.raises(EngineClosed):
        forks.start()


def test_the_forks_end_with_the_server(forks):
    ask(forks, b"a")
    forks._control.close()
    assert forks._child.process.wait(30) == 0
