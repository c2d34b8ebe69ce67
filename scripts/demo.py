# SPDX-License-Identifier: Apache-2.0
"""The whole system on real input: serve the demo model on two ranks, stream answers over HTTP, show metrics, shut down.

Run by `make demo`. Needs no GPU, no download and no particular port. Exits with 0 only if every part worked.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

import httpx

QUESTIONS = ["What is Phalanx?", "What is a rank?", "How do I serve a model on four GPUs?"]
METRICS = (
    "num_requests_running",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "rank_memory_bytes",
    "kv_cache_usage",
)
START_SECONDS, STOP_SECONDS = 180.0, 30.0


def main() -> int:
    port = free_port()
    command = [sys.executable, "-m", "phalanx", "serve", "demo", "--tp_size", "2", "--port", str(port), "--log_level", "warning"]
    print(f"== phalanx {' '.join(command[3:])} (ready in seconds; without --log_level it tells what it does)", flush=True)
    server = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://localhost:{port}", timeout=60.0) as client:
            wait_until_ready(client, server)
            for question in QUESTIONS:
                print(f"\n>> {question}\n<< ", end="", flush=True)
                if not ask(client, question).strip():
                    raise SystemExit("the answer of the model is empty")
            print("\n\n== GET /metrics (an excerpt)")
            show_metrics(client)
        print("\n== SIGTERM: drain and stop", flush=True)
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_SECONDS)
    finally:
        if server.poll() is None:
            server.kill()
    print(f"== the server ended with exit status {status}")
    return status


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit status {server.returncode} before it was ready")
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {START_SECONDS:.0f} s")


def ask(client: httpx.Client, question: str) -> str:
    """Stream one answer to the terminal, and return its text."""
    body: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0, "max_tokens": 120,
    }  # fmt: skip
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"HTTP {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(event["error"]["message"])
            content = event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
            text += content
            print(content, end="", flush=True)
    return text


def show_metrics(client: httpx.Client) -> None:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    shown = [line for line in lines if any(name in line for name in METRICS)]
    if not shown:
        raise SystemExit("/metrics has none of the expected metrics")
    print("\n".join(shown[:16]))


if __name__ == "__main__":
    sys.exit(main())
