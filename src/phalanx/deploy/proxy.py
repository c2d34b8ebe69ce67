# SPDX-License-Identifier: Apache-2.0
"""`Proxy`: an ASGI application that hands each request to another HTTP server, and streams the answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# RFC 9110, section 7.6.1: they belong to one connection. The length of the body may change with its coding.
_OF_THE_CONNECTION = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host",
    b"content-length",
}  # fmt: skip


class Proxy:
    """In front of the server at `url`. Requests run as long as they take; a client that goes away ends its request there, too."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(None, connect=5.0), limits=limits, trust_env=False
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await _body(receive)
        if body is None:
            return
        path = scope.get("raw_path") or str(scope["path"]).encode()
        if root := str(scope.get("root_path", "")).encode():
            path = path.removeprefix(root) or b"/"
        query = scope.get("query_string", b"")
        request = self._client.build_request(
            scope["method"], httpx.URL(self._client.base_url).copy_with(raw_path=path + (b"?" + query if query else b"")),
            headers=[(name, value) for name, value in scope["headers"] if name.lower() not in _OF_THE_CONNECTION],
            content=body,
        )  # fmt: skip
        answering = asyncio.create_task(self._answer(request, send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _answer(self, request: httpx.Request, send: Send) -> None:
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            await _unavailable(send, f"the server behind this proxy does not answer: {error!r}")
            return
        try:
            headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _OF_THE_CONNECTION]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await response.aclose()

    async def close(self) -> None:
        await self._client.aclose()


async def _body(receive: Receive) -> bytes | None:
    """The request's body; None where the client has gone before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unavailable(send: Send, message: str) -> None:
    error = {"message": message, "type": "server_error", "param": None, "code": "engine_unavailable"}
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode(), "more_body": False})
