# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces with their own addresses; tp 2 inside each, pp 2 across; then the link is cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.root, pytest.mark.skipif(shutil.which("ip") is None, reason="not run: needs iproute2")]

ADDRESSES = ("10.213.7.1", "10.213.7.2")
SMALL = ("--max_seq_len", "512", "--kv_cache_bytes", str(1 << 26))
PORT = 8000
# Runs inside host 0: asks, prints each event as it comes, and how the stream ended.
CLIENT = """
import json, sys, time, httpx
body = {"model": "demo", "prompt": "Phalanx", "max_tokens": int(sys.argv[2]), "ignore_eos": True, "stream": True}
begin = time.monotonic()
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=60) as answer:
    for line in answer.iter_lines():
        if line:
            print(line, flush=True)
"""


@dataclass
class Hosts:
    names: tuple[str, str]
    logs: Path

    def command(self, host: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *words]

    def start(self, host: int) -> subprocess.Popen[str]:
        flags = ["--tp_size", "2", "--pp_size", "2", "--nnodes", "2", "--node_rank", str(host), "--master_addr", ADDRESSES[0]]
        words = [sys.executable, "-m", "phalanx", "serve", "demo", "--host", ADDRESSES[0], "--port", str(PORT), "--device", "cpu"]
        command = self.command(host, *words, *flags, *SMALL)
        with (self.logs / f"host{host}").open("w") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, text=True, env=os.environ | {"PHALANX_CLUSTER_TOKEN": "the token of both hosts"}
            )

    def log(self) -> str:
        return "".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.logs.iterdir()))

    def cut(self) -> None:
        """Both ends fall silent: packets vanish, no reset is sent."""
        for host in (0, 1):
            subprocess.run(self.command(host, "ip", "link", "set", f"ph{host}", "down"), check=True)


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    names = (f"phalanx{os.getpid()}a", f"phalanx{os.getpid()}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "ph0", "netns", names[0], "type", "veth", "peer", "name", "ph1", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "address", "add", f"{ADDRESSES[host]}/24", "dev", f"ph{host}")
            ip("-n", name, "link", "set", f"ph{host}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names, tmp_path)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def _wait_ready(hosts: Hosts, servers: list[subprocess.Popen[str]]) -> None:
    probe = f"import httpx, sys; sys.exit(httpx.get('http://{ADDRESSES[0]}:{PORT}/ready', timeout=5).status_code != 200)"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for server in servers:
            assert server.poll() is None, hosts.log()
        if subprocess.run(hosts.command(0, sys.executable, "-c", probe), capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.5)
    pytest.fail("not ready after 120 s:\n" + hosts.log())


def test_two_hosts_serve_and_a_cut_link_is_named(hosts):
    servers = [hosts.start(0), hosts.start(1)]
    try:
        _wait_ready(hosts, servers)
        children = [child for server in servers for child in _descendants(server)]
        assert sum("rank" in child.name() or "worker" in " ".join(child.cmdline()) for child in children) >= 4
        url = f"http://{ADDRESSES[0]}:{PORT}"
        complete = subprocess.run(
            hosts.command(0, sys.executable, "-c", CLIENT, url, "16"), capture_output=True, text=True, timeout=60, check=True
        )
        assert complete.stdout.strip().endswith("data: [DONE]")

        client = subprocess.Popen(hosts.command(0, sys.executable, "-c", CLIENT, url, "480"), stdout=subprocess.PIPE, text=True)
        assert client.stdout.readline().startswith("data: ")
        hosts.cut()
        cut = time.monotonic()
        rest, _ = client.communicate(timeout=60)
        seconds = time.monotonic() - cut
        last = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")][-1]
        assert "error" in last, f"the stream ended without an error: {last}"
        assert "node 1" in last["error"]["message"], last
        assert seconds < 30, f"the client heard of it after {seconds:.0f} s"
        for server in servers:
            assert server.wait(max(1.0, 45 - (time.monotonic() - cut))) != 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"left behind: {alive}"
    finally:
        for server in servers:
            for child in [*(_descendants(server) if server.poll() is None else []), server]:
                child.kill()
