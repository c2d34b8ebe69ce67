# SPDX-License-Identifier: Apache-2.0
"""A server as its users have it: a process with children, a port and a log. For tests that stop it and see what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from phalanx.deploy.ray_serve import free_ports

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"


def until(condition: Callable[[], Any], seconds: float = 20.0, *, every: float = 0.02) -> Any:
    """The first true value of a condition; an error when there is none in time."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"did not come about in {seconds:g} s"
        time.sleep(every)
    return value


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    port: int
    log_file: Path
    tree: list[psutil.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def http(self, timeout: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def wait_ready(self, seconds: float = 120.0) -> Served:
        with self.http(timeout=5) as http:

            def ready() -> bool:
                assert self.process.poll() is None, self.log
                with contextlib.suppress(httpx.TransportError):
                    return http.get("/ready").status_code == 200
                return False

            until(ready, seconds, every=0.1)
        self.tree = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return self

    def child(self, title: str) -> psutil.Process:
        """The process of this title, for example "phalanx rank 1"."""
        return next(process for process in self.tree if process.cmdline()[0].strip() == title)

    def metric(self, stem: str) -> float:
        """The sum over the series of a metric, under either prefix."""
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines()
        begins = (f"phalanx:{stem}{{", f"vllm:{stem}{{", f"{stem} ")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begins))

    def gone(self, seconds: float = 10.0) -> None:
        """All processes have ended and the port is closed, in this time."""
        end = time.monotonic() + seconds
        self.process.wait(max(0.1, end - time.monotonic()))
        until(lambda: not any(_lives(process) for process in self.tree), max(0.1, end - time.monotonic()))
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            raise AssertionError("the port is still open")


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a child that imports these folders, `tests`, and what this process was told to import."""
    return os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def session_nice(pid: int) -> int | None:
    """The nice value of a process's session; None where the kernel does not group processes by session."""
    file = Path(f"/proc/{pid}/autogroup")
    words = file.read_text(encoding="ascii").split() if file.exists() else []
    return int(words[-1]) if words else None


@contextlib.contextmanager
def started(
    command: list[str], port: int, folder: Path, *, cwd: Path | None = None, environment: dict[str, str | None] | None = None
) -> Iterator[Served]:
    """Run a command that serves on this port, until the context ends; nothing of it is left then. environment: variables that are
    added; None removes one."""
    log_file = folder / f"server-{port}.log"
    changed: dict[str, str | None] = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **(environment or {})}
    variables = {name: value for name, value in changed.items() if value is not None}
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=cwd or folder, start_new_session=True)
    served = Served(process, port, log_file)
    try:
        yield served
    finally:
        if process.poll() is None:
            for _ in range(2):  # the second stops it at once
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                    break
            else:
                process.kill()
                process.wait()
        for left in served.tree:
            if _lives(left):
                left.kill()


def fake_server(
    folder: Path, model: Path, *, fake: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **serving: Any
):
    """The server over the fake executor, with the tokenizer and shape of a checkpoint. before: a command that executes it.
    delays: a folder for the delays of its loops (`tests.support.loop_delays`)."""
    before = serving.pop("before", [])
    port = serving.pop("port", None) or free_ports()
    surroundings = {name: serving.pop(name) for name in ("cwd", "environment") if name in serving}
    delays = serving.pop("delays", None)
    options = {
        "engine": {"model": str(model), "device": "cpu", "max_batch_size": 8, **(engine or {})},
        "serving": {"host": "127.0.0.1", "port": port, "served_model_name": MODEL, **serving},
        "fake": fake or {},
        "delays": None if delays is None else str(delays),
    }
    command = [*before, sys.executable, "-m", "tests.support.serve_fake_server", json.dumps(options)]
    return started(command, port, folder, **surroundings)


def rank_server(folder: Path, model: Path, *flags: str, **surroundings: Any):
    """`phalanx serve` as it is, with real ranks. Their KV cache is small: filling the default of 1 GiB takes seconds of each.
    before: as of `fake_server`."""
    port, flags = free_ports(), ("--kv_cache_bytes", str(1 << 26), *flags)
    command = [
        *surroundings.pop("before", []),
        sys.executable,
        "-m",
        "phalanx",
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    return started([*command, "--device", "cpu", "--served_model_name", MODEL, *flags], port, folder, **surroundings)
