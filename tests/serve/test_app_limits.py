# SPDX-License-Identifier: Apache-2.0
"""Descriptors: the soft limit of open files is raised as far as it may be, requests beyond it get a 503, closed ones are opened."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support.serve_processes import fake_server, until

CODE = """
import resource
from phalanx.serve.app import raise_open_files
raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("before", "after"), [((256, 4096), (4096, 4096)), ((3000, 3000), (3000, 3000)), ((1024, 19000), (19000, 19000))]
)
def test_open_files(before, after):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < before[1]:
        pytest.skip(f"not run: the hard limit here is {hard}")
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)  # noqa: E731
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, preexec_fn=limits)
    assert tuple(map(int, done.stdout.split())) == after


def test_too_many_connections(tmp_path, tiny_model):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = 192
    limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))"
    code = f"import resource, os, sys; {limit}; os.execv(sys.argv[1], sys.argv[1:])"
    assert limits[1] == resource.RLIM_INFINITY or limits[1] >= hard
    before = [sys.executable, "-c", code]
    with ExitStack() as open_connections, fake_server(tmp_path, tiny_model, before=before) as served:
        served.wait_ready()
        request = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
        connections = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(hard - 64)]
        for connection in connections:
            open_connections.enter_context(connection)
        for connection in connections:
            connection.sendall(request)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as extra:
            extra.sendall(request)
            answer = b"".join(iter(lambda: extra.recv(4096), b""))  # to the end: the server closes it
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"too_many_connections" in answer
        assert "requests are refused: 129 connections are open" in served.log
        for connection in connections:
            connection.close()
        with served.http() as http:
            until(lambda: http.get("/live").status_code == 200)


def test_closed_standard_descriptors(tmp_path, tiny_model):
    code = "import os, sys; os.closerange(0, 3); os.execv(sys.argv[1], sys.argv[1:])"
    with fake_server(tmp_path, tiny_model, before=[sys.executable, "-c", code]) as served:
        served.wait_ready()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
