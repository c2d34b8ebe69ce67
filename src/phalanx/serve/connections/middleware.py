# SPDX-License-Identifier: Apache-2.0
"""What a request passes before its route: its id and its report, cross-origin requests, the API keys, HEAD, and a shorter way for
what streams send."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.log import request_id
from phalanx.serve.openai.api_errors import ApiError, with_fields_of
from phalanx.serve.openai.schema.openapi import needs_key
from phalanx.serve.openai.stream import SHORT_SEND
from phalanx.serve.telemetry.request_report import EndOfRequest, RequestReport, current_report

PREFLIGHT_SECONDS = 600
"""How long a browser may keep the answer to a preflight request."""
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_READS = {"GET", "HEAD", "OPTIONS"}


def install_middleware(
    app: FastAPI, *, api_keys: Sequence[str], open_metrics: bool, cors_origins: Sequence[str], ends: Sequence[EndOfRequest] = ()
) -> None:
    """Build the middleware of an app whose routes and handlers of errors are there. A preflight request carries no key, so
    cross-origin requests are judged first. ends: as of `RequestContext`."""
    app.add_middleware(HeadAsGet)
    if api_keys:
        app.add_middleware(KeyCheck, api_keys=api_keys, open_metrics=open_metrics)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "HEAD", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"], max_age=PREFLIGHT_SECONDS,
        )  # fmt: skip
    app.middleware_stack = RequestContext(app.build_middleware_stack(), ends)  # outside of starlette's own layer for errors, too


class RequestContext:
    """The outermost layer. It names the request: by the header X-Request-Id, else by an id of its own, which the answer and what is
    logged have, too. Where somebody wants to know of requests that have ended, it reports them.

    It puts the HTTP server's `send` into the scope, for the events of a stream: the layers below wrap it, to see when a response
    begins. The scope is a copy, because that `send` refers to the scope: only the garbage collector would free the two.
    """

    def __init__(self, app: ASGIApp, ends: Sequence[EndOfRequest] = ()) -> None:
        """ends: told of each request that may change something or generate, once it has been answered."""
        self._app, self._ends = app, ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name = header if _REQUEST_ID.fullmatch(header) else secrets.token_hex(16).encode()
        request_id.set(name.decode())
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            await send(message)

        inside = {**scope, "extensions": {**scope.get("extensions", {}), SHORT_SEND: {"send": send}}}
        if not self._ends or scope["method"] in _READS:
            await self._app(inside, receive, send_named)
            return
        report = RequestReport(name.decode(), scope["method"], scope["path"])
        current_report.set(report)
        try:
            await self._app(inside, receive, send_named)
        finally:
            report.status, report.ended = status, time.monotonic()
            for end in self._ends:
                end(report, scope["headers"])


class HeadAsGet:
    """Answers HEAD as GET. The HTTP server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class KeyCheck:
    """Rejects requests without one of the keys, in a time that reveals nothing about them. No key is in a message or log."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], open_metrics: bool) -> None:
        self._app, self._keys, self._open_metrics = app, [key.encode() for key in api_keys], open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not needs_key(scope["path"], open_metrics=self._open_metrics) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "the API key is missing or wrong; send the header Authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await with_fields_of(scope["path"], refusal).response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        if not headers:  # Anthropic's clients send the key alone
            own: list[bytes] = [value for name, value in scope["headers"] if name == b"x-api-key"]
            scheme, key = (b"bearer", own[0]) if len(own) == 1 else (b"", b"")
        equal = [hmac.compare_digest(key.strip(), one) for one in self._keys]  # all are compared, whichever is right
        return any(equal) and scheme.lower() == b"bearer"
