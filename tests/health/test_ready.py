# SPDX-License-Identifier: Apache-2.0
"""The health check of a container finds the server at whatever address and port it has, and asks no proxy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.health.ready import addresses, answers

SERVER = """
import http.server, setproctitle, socket, sys
setproctitle.setproctitle("phalanx server")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2]) if self.path == "/ready" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = Server((sys.argv[1], 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def start():
    processes = []

    def start(host: str, status: int = 200) -> int:
        process = subprocess.Popen([sys.executable, "-c", SERVER, host, str(status)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return int(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::", "::1"), ("::1", "::1")],
)
def test_a_server_is_asked_where_it_listens(start, host, address):
    port = start(host)
    assert (address, port) in addresses()
    assert answers(address, port)


def test_one_that_is_not_ready_or_silent(start):
    assert not answers("127.0.0.1", start("127.0.0.1", 503))
    assert not answers("127.0.0.1", 1)


def test_the_command_asks_no_proxy(start):
    start("127.0.0.1")
    nobody = "http://127.0.0.1:1"
    environment = {**os.environ, "http_proxy": nobody, "HTTP_PROXY": nobody, "no_proxy": "", "NO_PROXY": ""}
    assert subprocess.run([sys.executable, "-m", "phalanx.health.ready"], env=environment, check=False).returncode == 0
