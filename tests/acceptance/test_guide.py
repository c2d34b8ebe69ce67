# SPDX-License-Identifier: Apache-2.0
"""The guide's command of the server runs as docs/guide.md has it, and prints what is there. Its rows of Ray and of two nodes are
run by test_ray_hosts.py and test_two_hosts.py, its tables by tests/scripts/test_guide_page.py."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time

import httpx

from phalanx.deploy.ray_serve import free_ports
from tests.support.documents import ROOT, printed_under


def test_the_server(tmp_path, forked_python):
    (serve, ask, metrics), expected = printed_under(ROOT / "docs" / "guide.md", "### The server")
    port = free_ports()
    words = [sys.executable, "-m", *shlex.split(serve), "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"PHALANX_KV_CACHE_BYTES": str(1 << 26)})
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://localhost:{port}/ready", timeout=5).status_code == 200:
                    break
            time.sleep(0.2)
        curl = shlex.split(ask)
        url = next(word for word in curl if word.startswith("http")).replace(":8000", f":{port}")
        body = json.loads(curl[curl.index("-d") + 1])
        answer = httpx.post(url, json=body, timeout=60).raise_for_status().json()["choices"][0]["text"]
        time.sleep(1.0)  # the engine sends its counters twice a second
        lines = httpx.get(f"http://localhost:{port}/metrics").text.splitlines()
        name = metrics.rpartition("^")[2]
        assert f"{answer}\n{next(line for line in lines if line.startswith(name))}\n" == expected
    finally:
        server.terminate()
        server.wait(40)
