# SPDX-License-Identifier: Apache-2.0
"""Subjects for tests of checks, a real HTTP server that answers as a server of ours, and the doctor in a process of its own."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.bench.shapes import SHAPES
from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.engine.messages import Stats
from phalanx.health.host import Host
from phalanx.health.registry import named
from phalanx.health.subject import Subject
from phalanx.metrics import Metrics
from tests.support.health_nvml import RecordedNvml

ROOT = Path(__file__).resolve().parents[2]


def no_gpu() -> RecordedNvml:
    return RecordedNvml([]).fail(12, "NVMLError_LibraryNotFound: NVML Shared Library Not Found")


def subject(
    model: str | None = None, *, nvml: Any = None, environment: dict[str, str] | None = None, root: Path = Path("/"), **options: Any
) -> Subject:
    """A subject without GPUs unless `nvml` brings some. model: "demo", a folder, or a shape's name. options: serve's."""
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), **(environment or {})}
    serving = ServeOptions.of(**{name: value for name, value in options.items() if name in ServeOptions.model_fields})
    engine = {name: value for name, value in options.items() if name in EngineOptions.model_fields}
    chosen = None if model is None else EngineOptions.of(model=model, **engine)
    return Subject(Host(root, variables), nvml or no_gpu(), chosen, serving, SHAPES.get(model or ""))


def findings(name: str, examined: Subject) -> list:
    """What one check finds. A check that raises fails the test."""
    check = named(name)
    lacking = [str(need) for need in check.needs if examined.lacks(need)]
    assert not lacking, f"{name} would be skipped: {lacking}"
    return list(check.findings(examined))


def only(name: str, examined: Subject):
    """The single finding of a check."""
    entries = findings(name, examined)
    assert len(entries) == 1, [entry.summary for entry in entries]
    return entries[0]


def doctor(
    *arguments: str, environment: dict[str, str] | None = None, before: str = "", limits: Callable[[], None] | None = None
) -> tuple[int, dict]:
    """`phalanx doctor ... --json -` as a process: its exit status and report. before: shell commands, in its own namespaces."""
    command = [sys.executable, "-m", "phalanx", "doctor", *arguments, "--json", "-"]
    if before:
        words = " ".join(f"'{word}'" for word in command)
        command = ["unshare", "--mount", "--uts", "sh", "-ec", f"{before}\nexec {words}"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=variables, preexec_fn=limits)
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def finding_of(report: dict, name: str) -> dict:
    """The first finding of a check in a report."""
    return next(check for check in report["checks"] if check["name"] == name)["findings"][0]


def metrics_text(model: str = "demo", **fields: Any) -> str:
    """An exposition as a server makes it. fields: of the engine's Stats, and queued, queue_limit, refused, ttft, tpot."""
    metrics = Metrics(prefix="phalanx", model_name=model, version="1.0")
    queued, limit, refused = fields.pop("queued", 0), fields.pop("queue_limit", 16), fields.pop("refused", 0)
    for seconds in fields.pop("ttft", []):
        metrics.first_token(seconds)
    for seconds in fields.pop("tpot", []):
        metrics.next_tokens(seconds, 1)
    for _ in range(refused):
        metrics.refused("queue_full")
    metrics.engines = [Stats(**{"blocks_total": 100, **fields})]
    metrics.queued, metrics.queue_limits = lambda: (queued, 10 * queued), {"requests": limit}
    return metrics.exposition().decode()


@contextlib.contextmanager
def served(
    *texts: str, metrics: int = 200, status: int = 200, phase: str = "ready", reason: str | None = None, version: str = "1.0",
    skew: float = 0.0,
) -> Iterator[str]:  # fmt: skip
    """A server at a URL of this host. texts: successive answers of /metrics, the last one again and again.
    metrics, status: of their answers."""
    remaining = list(texts) or [metrics_text()]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                body = (remaining.pop(0) if len(remaining) > 1 else remaining[0]).encode()
                self.answer(metrics, body, "text/plain")
            elif self.path == "/version":
                self.answer(200, json.dumps({"version": version}).encode())
            else:
                self.answer(status, json.dumps({"status": phase, "reason": reason}).encode())

        def answer(self, code: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            import time

            return super().date_time_string(time.time() + skew)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
