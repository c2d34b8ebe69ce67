# SPDX-License-Identifier: Apache-2.0
"""Descriptors: the soft limit of open files is raised as far as it may be, requests beyond it get a 503, closed ones are opened."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.support.serve_processes import MODEL, Served, fake_server, rank_server, until

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


def limited_to(count: int) -> list[str]:
    """The beginning of a command that may have so many open files."""
    limits = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, {count}))"
    return [sys.executable, "-c", f"import resource, os, sys; {limits}; os.execv(sys.argv[1], sys.argv[1:])"]


def test_too_many_connections(tmp_path, tiny_model):
    hard = 192
    with ExitStack() as open_connections, fake_server(tmp_path, tiny_model, before=limited_to(hard)) as served:
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


async def streams(served: Served, count: int) -> list[bytes]:
    """The answers to so many streams that begin at once, each read to its end."""
    fields = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"

    async def stream() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head % len(body) + body)
        answer = await reader.read(-1)  # raises ConnectionResetError where the server has dropped the connection
        writer.close()
        return answer

    return await asyncio.wait_for(asyncio.gather(*(stream() for _ in range(count))), 120)


def test_twice_as_many_streams_at_once_as_there_are_descriptors(tmp_path, tiny_model):
    """Each is served or refused: none is dropped."""
    settings = {"before": limited_to(128), "max_num_queued_reqs": 200, "fake": {"latency": 0.005}}
    with fake_server(tmp_path, tiny_model, **settings) as served:
        served.wait_ready()
        answers = asyncio.run(streams(served, 200))
        statuses = Counter(answer[:12] for answer in answers)
        print(f"STATUSES {statuses}")
        assert statuses.keys() == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        assert statuses[b"HTTP/1.1 200"] >= 64
        assert all(b"data: [DONE]" in answer or b"too_many_connections" in answer for answer in answers)
        assert "requests are refused" in served.log
        assert "connections wait: 80 are open" in served.log
        assert asyncio.run(streams(served, 1))[0].startswith(b"HTTP/1.1 200")


def test_closed_standard_descriptors(tmp_path, tiny_model):
    """Through the command as users run it: what is opened next would get the numbers of standard input, output and error."""
    code = "import os, sys; os.closerange(0, 3); os.execv(sys.argv[1], sys.argv[1:])"
    with rank_server(tmp_path, tiny_model, "--load_format", "dummy", before=[sys.executable, "-c", code]) as served:
        served.wait_ready()
        assert asyncio.run(streams(served, 1))[0].startswith(b"HTTP/1.1 200")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
