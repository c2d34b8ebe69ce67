# SPDX-License-Identifier: Apache-2.0
"""A proxy before a server that records what a client asks: method, path, body and the status of the answer."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_KEPT_HEADERS = ("content-type", "authorization", "accept")


@dataclass
class Recording:
    """url: of the proxy. requests: what was asked, in order; `shapes` drops those of a shape that came before."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)

    def shapes(self) -> list[dict[str, Any]]:
        """The first request of each shape: path, status, and the names of all fields."""
        kept: dict[str, dict[str, Any]] = {}
        for request in self.requests:
            if request["method"] == "POST":
                kept.setdefault(json.dumps([request["path"], request["status"], _names(request["body"])]), request)
        return list(kept.values())


@contextmanager
def recording(target: str) -> Iterator[Recording]:
    """Record requests to `target`, a base URL, until the context ends."""
    client = httpx.Client(base_url=target, timeout=300, trust_env=False)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value.strip() for name, value in self.headers.items() if name.lower() in _KEPT_HEADERS}
            with client.stream(self.command, self.path, content=body, headers=headers) as answer:
                parsed = json.loads(body) if body else None
                log.requests.append({"method": self.command, "path": self.path, "status": answer.status_code, "body": parsed})
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers.get("content-type", "application/json"))
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_DELETE = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the recording has it."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # the client has gone
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Proxy)
    log = Recording(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield log
    finally:
        server.shutdown()
        client.close()


def _names(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _names(item) for name, item in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(_names(item), sort_keys=True) for item in value})
    return type(value).__name__
