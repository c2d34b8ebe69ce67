# SPDX-License-Identifier: Apache-2.0
"""Start and reliably end the processes of benchmarks, servers among them."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import IO, Any

import httpx

PATIENCE = 60.0
"""Seconds that a process gets to end after SIGTERM."""


@contextmanager
def server(
    command: Callable[[int], Sequence[str]], *, seconds: float = 120.0, env: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:  # fmt: skip
    """Run the server `command(port)` until the block ends; yields (process, URL) once it is ready.

    log: file for its output; None for that of this process. Raises SystemExit if it ends or is not ready within `seconds`.
    """
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process, end, url = subprocess.Popen(command(port), env=env, stdout=log, stderr=log), time.monotonic() + seconds, ""
    try:
        while not url:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server was not ready after {seconds:.0f} s, or ended")
            with suppress(httpx.TransportError):
                if httpx.get(f"http://localhost:{port}/ready", trust_env=False).status_code == 200:
                    url = f"http://localhost:{port}"
            if not url:
                time.sleep(0.1)  # also while it answers that it is starting: it needs the cores
        yield process, url
    finally:
        ended(process)


def ended(process: subprocess.Popen[Any]) -> None:
    """End a process: SIGTERM, then SIGKILL."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
