# SPDX-License-Identifier: Apache-2.0
"""Ranks that start in a moment, for tests that start many: a `Launcher` that forks a process which has imported torch already.

    with forked_ranks() as launcher:
        LLM(folder, tensor_parallel_size=4, device="cpu", launcher=launcher)

A rank is the real one (`phalanx.worker.worker.main`), with its config and death pipe on standard input; only its imports, some
seconds of a core, are done once for all ranks. The engine finds the template process by a socket whose path is in the environment.
For CPU ranks: a process that has opened a GPU cannot be forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from phalanx.config.options import EngineOptions
from phalanx.executor.launcher import EndedRank, HostRanks

ROOT = Path(__file__).resolve().parents[2]
SOCKET = "TESTS_RANK_TEMPLATE"
_LARGEST = 1 << 16


@contextlib.contextmanager
def forked_ranks() -> Iterator[str]:
    """The dotted path of `ForkedLauncher`, while there is a template for it to fork."""
    with tempfile.TemporaryDirectory(prefix="phalanx-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        path = f"{folder}/template"
        patch.setenv(SOCKET, path)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        template = subprocess.Popen([sys.executable, "-P", "-m", __name__, path], stdin=subprocess.PIPE)
        try:
            yield f"{__name__}:ForkedLauncher"
        finally:
            assert template.stdin is not None
            template.stdin.close()
            template.wait(30)


@dataclass(frozen=True)
class ForkedRank:
    pid: int

    @property
    def where(self) -> str:
        return f"pid {self.pid}, node 0"

    def dump_stacks(self) -> None:
        self.signal(signal.SIGUSR1)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class ForkedLauncher:
    """See `phalanx.executor.launcher.Launcher`. In the engine's process."""

    on_this_host = True

    def __init__(self, options: EngineOptions) -> None:
        assert options.device == "cpu", "forked ranks are for CPUs"
        self._template = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks: dict[int, ForkedRank] = {}
        self._running: dict[int, int] = {}
        self._pipes: list[int] = []

    def require_devices(self, ranks: HostRanks) -> None:
        pass

    def start(self, ranks: HostRanks, config: Mapping[str, Any]) -> Mapping[int, ForkedRank]:
        self._connect()
        for index, rank in enumerate(ranks.ranks):
            place = {"rank": rank, "node": ranks.node, "device_index": index, "local_ranks": len(ranks.ranks)}
            line = json.dumps({"title": f"phalanx rank {rank}", "config": {**config, **place}}).encode() + b"\n"
            reading, writing = os.pipe()
            socket.send_fds(self._template, [b"start"], [reading, sys.stderr.fileno()])
            os.close(reading)
            self._pipes.append(writing)
            os.write(writing, line)
            pid = json.loads(self._template.recv(_LARGEST))["pid"]
            self._ranks[rank], self._running[pid] = ForkedRank(pid), rank
        return self._ranks

    def _connect(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                return self._template.connect(os.environ[SOCKET])
            except (FileNotFoundError, ConnectionRefusedError):  # it still imports torch
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def ended(self) -> list[EndedRank]:
        ended = []
        with contextlib.suppress(BlockingIOError):
            while self._running:
                message = self._template.recv(_LARGEST, socket.MSG_DONTWAIT)
                exit = json.loads(message)
                rank = self._running.pop(exit["pid"])
                ended.append(EndedRank(rank, exit["code"], self._ranks[rank].where))
        return ended

    def fileno(self) -> int:
        return self._template.fileno()

    def stop(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        while self._running and time.monotonic() < deadline:
            self.ended()
            time.sleep(0.01)
        while self._running:
            for rank in self._running.values():
                self._ranks[rank].signal(signal.SIGKILL)
            self.ended()
            time.sleep(0.01)
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
        self._template.close()


def serve(path: str) -> None:
    """The template: forks a rank for each request, and reports its end to who asked. Ends with its standard input."""
    import torch
    import torch.distributed

    from phalanx.models import registry, weights  # noqa: F401
    from phalanx.worker import model_runner, worker  # noqa: F401

    torch.set_num_threads(1)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    waking, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    owners: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (sys.stdin, listener, waking):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif key.fileobj is waking:
                    waking.recv(_LARGEST)
                    _report(owners)
                elif not _answer(key.fileobj, owners):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)


def _report(owners: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with contextlib.suppress(OSError):  # the engine is gone
                owners.pop(pid).send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _answer(client: socket.socket, owners: dict[int, socket.socket]) -> bool:
    """Whether the client is still there."""
    message, descriptors, _, _ = socket.recv_fds(client, _LARGEST, 2)
    if not message:
        return False
    pid = os.fork()
    if pid == 0:
        _become_a_rank(*descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    owners[pid] = client
    client.send(json.dumps({"pid": pid}).encode())
    return True


def _become_a_rank(reading: int, log: int) -> NoReturn:
    from phalanx.worker import worker

    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for descriptor, standard in ((reading, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, standard)
        os.closerange(3, 256)
        worker.main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
