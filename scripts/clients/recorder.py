# SPDX-License-Identifier: Apache-2.0
"""A proxy before a server that records what a client sends (method, path, body), and the status of the answer."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_KEPT_HEADERS = ("content-type", "authorization", "accept")
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")


@dataclass
class Recording:
    """url: of the proxy. requests: in order, each with method, path, body, status, and the id of the response that it created, or
    None; `shapes` drops those of a shape that came before."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)

    def shapes(self) -> list[dict[str, Any]]:
        """The first request of each shape (method, path, status, and the names of all fields), and those that created a response
        which one of these names."""
        first: dict[str, dict[str, Any]] = {}
        for request in self.requests:
            path = _RESPONSE_ID.sub("ID", request["path"])
            first.setdefault(json.dumps([request["method"], path, request["status"], _names(request["body"])]), request)
        kept = list(first.values())
        by_id = {request["id"]: request for request in self.requests if request["id"] is not None}
        for request in kept:  # it grows
            named = _RESPONSE_ID.findall(json.dumps([request["path"], request["body"]]))
            kept += [by_id[name] for name in named if name in by_id and not any(by_id[name] is one for one in kept)]
        return [request for request in self.requests if any(request is one for one in kept)]


@contextmanager
def recording(target: str) -> Iterator[Recording]:
    """Record requests to `target`, a base URL, until the context ends."""
    client = httpx.Client(base_url=target, timeout=300, trust_env=False)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value.strip() for name, value in self.headers.items() if name.lower() in _KEPT_HEADERS}
            creates = self.command == "POST" and self.path == "/v1/responses"
            with client.stream(self.command, self.path, content=body, headers=headers) as answer:
                request = {
                    "method": self.command, "path": self.path, "status": answer.status_code,
                    "body": json.loads(body) if body else None, "id": None,
                }  # fmt: skip
                log.requests.append(request)
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers.get("content-type", "application/json"))
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for part in answer.iter_raw():
                    if creates and request["id"] is None and (match := _RESPONSE_ID.search(part.decode(errors="replace"))):
                        request["id"] = match.group()
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
