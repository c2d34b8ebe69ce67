# SPDX-License-Identifier: Apache-2.0
"""What a host without the API server answers over HTTP: `/live`, `/ready` and `/version`, so that probes see a dead host.

/live is 200 as long as the process runs; /ready is 200 once this host has joined the engine, and 503 before.
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.errors import OptionError
from phalanx.executor.late_names import wait_for_name
from phalanx.executor.node import join, own_address_towards
from phalanx.log import get_logger
from phalanx.serve.connections.listen import bind
from phalanx.version import __version__

logger = get_logger(__name__)


class FollowerStatus:
    """Answers for node `node` on `sockets` (which listen), from threads of its own, until the process ends."""

    def __init__(self, node: int, sockets: list[socket.socket]) -> None:
        self._node = node
        self.joined = threading.Event()
        self._servers = [_Server(self, listener) for listener in sockets]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()

    def answer(self, path: str) -> tuple[int, dict[str, object]]:
        """The status code and the body for a GET of `path`."""
        match path.partition("?")[0]:
            case "/live":
                return 200, {"status": "live", "reason": None, "node": self._node}
            case "/ready" | "/health" if self.joined.is_set():
                return 200, {"status": "ready", "reason": None, "node": self._node}
            case "/ready" | "/health":
                return 503, {"status": "starting", "reason": "this host has not joined the engine", "node": self._node}
            case "/version":
                return 200, {"version": __version__}
            case _:
                message = f"{path} is not here: this is node {self._node}; the API server runs on node 0"
                return 404, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}}

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, status: FollowerStatus, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        listener.setblocking(True)
        self.socket, self.status = listener, status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a request: a thread waits for it
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        code, body = self.server.status.answer(self.path)
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Probes come every few seconds: none is logged."""


def run_follower(options: EngineOptions, serving: ServeOptions, local_rank: int) -> int:
    """Host this node's ranks until the engine ends, and answer probes meanwhile; returns the exit status.

    Under torchrun only the first process of a host answers them. `host` may be the address of host 0, as the same command on every
    host has it: this host then answers at its own address on the way there. Raises OptionError where the port is taken, and where
    master_addr does not resolve in time or no route leads there.
    """
    if local_rank > 0:
        return join(options, local_rank=local_rank)
    if serving.host == options.master_addr:  # a name that is not known yet is waited for
        wait_for_name(options.master_addr, options.master_addr_timeout)
    try:
        sockets = bind(serving.host, serving.port)
    except OptionError as error:
        if "another process listens" in error.why:
            raise
        wait_for_name(options.master_addr, options.master_addr_timeout)
        own = own_address_towards(options.master_addr)
        logger.warning("host=%s is not an address of this host: probes are answered at %s:%d", serving.host, own, serving.port)
        sockets = bind(own, serving.port)
    status = FollowerStatus(options.node_rank, sockets)
    try:
        return join(options, local_rank=local_rank, joined=status.joined.set)
    finally:
        status.close()
