# SPDX-License-Identifier: Apache-2.0
"""Two hosts that serve the demo model as one, in network namespaces: their commands, logs, ports and processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.namespaces import Namespaces

RUNNING = 3
"""Requests that run at a time: a further one is queued."""
SMALL = ("--max_seq_len", "2048", "--kv_cache_bytes", str(1 << 26), "--max_batch_size", str(RUNNING))
PORT, MASTER_PORT = 8000, 29400
PROMPT = "Phalanx"
# Runs inside host 0: asks, prints each event as it comes, and how the stream ended.
CLIENT = """
import json, sys, httpx
body = {"model": "demo", "prompt": sys.argv[2], "max_tokens": int(sys.argv[3]), "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}}
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=60) as answer:
    for line in answer.iter_lines():
        if line:
            print(line, flush=True)
"""


@dataclass
class Hosts:
    """The commands of two hosts, which run in namespaces, and what is left of them."""

    spaces: Namespaces
    logs: Path
    folders: Path
    """Of each host one for temporary files, "0" and "1". Its path must be short: sockets lie there."""

    @property
    def url(self) -> str:
        return f"http://{self.spaces.addresses[0]}:{PORT}"

    def start_words(self, host: int, tp: int, port: int = PORT) -> list[str]:
        first = self.spaces.addresses[0]
        flags = ["--tp_size", str(tp), "--pp_size", "2", "--nnodes", "2", "--node_rank", str(host), "--master_addr", first]
        return ["serve", "demo", "--host", first, "--port", str(port), "--device", "cpu", *flags, *SMALL]

    def start(self, host: int, tp: int = 2, port: int = PORT) -> subprocess.Popen[str]:
        command = self.spaces.command(host, sys.executable, "-m", "phalanx", *self.start_words(host, tp, port))
        (self.folders / str(host)).mkdir(exist_ok=True)
        environment = {"PHALANX_CLUSTER_TOKEN": "the token of both hosts", "TMPDIR": str(self.folders / str(host))}
        with self.log_of(host, port).open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=os.environ | environment)

    def log_of(self, host: int, port: int = PORT) -> Path:
        return self.logs / f"host{host}-{port}"

    def require_clean(self, host: int, deadline: float) -> None:
        """Wait until nothing of the server is left on a host: no process, no port, no temporary file."""
        while True:
            processes, ports = self.spaces.processes(host), self.spaces.listening(host)
            files = [path.name for path in (self.folders / str(host)).iterdir()]
            if not processes and not ports and not files:
                return
            assert time.monotonic() < deadline, f"left on host {host}: {processes}, {ports}, {files}\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        return "".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.logs.iterdir()))

    def stream(self, tokens: int, prompt: str = PROMPT) -> subprocess.Popen[str]:
        command = self.spaces.command(0, sys.executable, "-c", CLIENT, self.url, prompt, str(tokens))
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def status(self, host: int, path: str) -> tuple[int, str]:
        """The answer of a host to a GET, asked on that host; 0 where none comes."""
        return self.spaces.get(host, PORT, path)

    @contextlib.contextmanager
    def serving(self, tp: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
        """Both hosts' commands, until they are ready and after; whatever is left of them is killed."""
        servers = [self.start(0, tp), self.start(1, tp)]
        try:
            deadline = time.monotonic() + 120
            while self.status(0, "/ready")[0] != 200:
                assert all(server.poll() is None for server in servers), self.log()
                assert time.monotonic() < deadline, "not ready after 120 s:\n" + self.log()
                time.sleep(0.5)
            yield servers
        finally:
            self.kill(0)
            self.kill(1)
            for server in servers:
                server.wait(10)

    def kill(self, host: int) -> None:
        for process in self.spaces.processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def text_of(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


def one_host(prompt: str, tokens: int) -> str:
    """What `phalanx generate` prints for this prompt on one host, of the model and with the limits of `Hosts`."""
    words = [sys.executable, "-m", "phalanx", "generate", "demo", "--device", "cpu", "--prompt", prompt]
    limits = ["--max_tokens", str(tokens), *SMALL]
    return subprocess.run([*words, *limits], capture_output=True, text=True, check=True, timeout=100).stdout
