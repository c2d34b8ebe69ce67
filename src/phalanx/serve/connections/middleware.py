# SPDX-License-Identifier: Apache-2.0
"""What a request passes before its route: cross-origin requests, the API keys, HEAD, and a shorter way for what streams send."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.schema.openapi import needs_key
from phalanx.serve.openai.stream import SHORT_SEND

PREFLIGHT_SECONDS = 600
"""How long a browser may keep the answer to a preflight request."""


def install_middleware(app: FastAPI, *, api_keys: Sequence[str], open_metrics: bool, cors_origins: Sequence[str]) -> None:
    """Add the middleware. A preflight request carries no key, so cross-origin requests are judged first."""
    app.add_middleware(ShortSend)
    app.add_middleware(HeadAsGet)
    if api_keys:
        app.add_middleware(KeyCheck, api_keys=api_keys, open_metrics=open_metrics)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "HEAD", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=["Retry-After"], max_age=PREFLIGHT_SECONDS,
        )  # fmt: skip


class ShortSend:
    """Puts its `send` into the scope, for the events of a stream: FastAPI wraps it twice more, to see when a response begins.

    The scope is a copy, because the HTTP server's `send` refers to the scope: only the garbage collector would free the two.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "extensions": {**scope.get("extensions", {}), SHORT_SEND: {"send": send}}}, receive, send)


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
            "the API key is missing or wrong; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        equal = [hmac.compare_digest(key.strip(), one) for one in self._keys]  # all are compared, whichever is right
        return any(equal) and scheme.lower() == b"bearer"
