# SPDX-License-Identifier: Apache-2.0
"""The server: a port, the OpenAI API behind it, an engine behind that, and what happens when one of them goes.

    run: bind the port -> serve HTTP (/live 200, /ready 503) -> start the engine -> take requests -> drain -> stop, 0

The port is taken before anything is started, so that a port in use costs nothing. Statuses of exit: 0 stopped as asked, 1 the
engine could not start or failed, 2 the options or the port cannot be used, 128 + signal stopped at once.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import socket
import sys
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import placed
from phalanx.errors import OptionError, PhalanxError
from phalanx.log import configure, get_logger
from phalanx.metrics import Metrics
from phalanx.plan.auto import planned
from phalanx.serve.admission import Admission
from phalanx.serve.client import Engine, EngineClient
from phalanx.serve.lifecycle import Lifecycle
from phalanx.serve.openai import chat, completions, status, texts
from phalanx.serve.openai.errors import ApiError
from phalanx.serve.openai.schema.description import describe, needs_key
from phalanx.serve.openai.service import Service
from phalanx.version import __version__

logger = get_logger(__name__)

TURN_SECONDS = 1e-3
"""How long a thread that tokenizes may hold up the streams, each with a token every few milliseconds. Python's own: 5 ms."""

StartEngine = Callable[[EngineOptions], Awaitable[Engine]]


def run(engine: EngineOptions, serving: ServeOptions, *, start: StartEngine = EngineClient.start) -> int:
    """Serve until a signal or a failure; returns the status to exit with. start: makes the engine (tests bring their own).

    With node_rank > 0 this host only lends its ranks to the server on node 0.
    """
    configure("phalanx server")
    try:
        engine, local_rank = placed(planned(engine))
        if engine.node_rank > 0:
            from phalanx.engine.executor import join

            return join(engine, local_rank=local_rank)
        sockets = bind(serving.host, serving.port)
    except OptionError as error:
        logger.error("%s", error)
        return 2
    _name_process()
    sys.setswitchinterval(TURN_SECONDS)
    service = make_service(engine, serving)
    app = make_app(service, api_key=serving.api_key)
    lifecycle = Lifecycle(app, service, sockets, engine=engine, serving=serving, start=start)
    try:
        import uvloop

        return uvloop.run(lifecycle.live())
    except ImportError:  # on systems that uvloop does not know
        return asyncio.run(lifecycle.live())


def make_service(engine: EngineOptions, serving: ServeOptions) -> Service:
    """The state that the routes of one server share; no engine yet."""
    name = serving.served_model_name or engine.model
    metrics = Metrics(prefix=serving.metrics_prefix, model_name=name, version=__version__)
    admission = Admission(max_tokens=serving.max_num_queued_tokens, refused=metrics.refused)
    metrics.queued = lambda: (admission.queued, admission.queued_tokens)
    return Service(model_name=name, admission=admission, metrics=metrics)


def make_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """The ASGI application over a service."""
    app = FastAPI(title="Phalanx", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for router in (chat.router, completions.router, texts.router, status.router):
        app.include_router(router)

    async def answer(_: Request, error: Exception) -> Response:
        return service.answer(error).response()

    for kind in (ApiError, PhalanxError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
    if api_key is not None:
        app.add_middleware(KeyCheck, api_key=api_key)
    describe(app, model_name=service.model_name, with_key=api_key is not None)
    return app


class KeyCheck:
    """Turns away whoever does not bring the key, in a time that tells nothing about it. The key is in no message and no log."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app, self._key = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not needs_key(scope["path"]) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "this server asks for a key: Authorization: Bearer KEY; the one that came is missing or wrong",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`; with port 0 all have the same free port. Raises OptionError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"host={host!r} was asked for", why=str(error), next="name an address of this host") from None
    sockets: list[socket.socket] = []
    last: OSError | None = None
    for family, kind, protocol, _, address in sorted(set(found)):
        taken = sockets[0].getsockname()[1] if sockets else port
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((address[0], taken, *address[2:]))
            made.listen(2048)  # now: two sockets may be bound to one port, and only the second `listen` fails
        except OSError as error:
            made.close()
            last = error
            if error.errno not in _NO_SUCH_ADDRESS:
                break
            continue
        made.setblocking(False)
        sockets.append(made)
        last = None
    if last is not None and (not sockets or last.errno not in _NO_SUCH_ADDRESS):
        for one in sockets:
            one.close()
        used = last.errno == errno.EADDRINUSE
        raise OptionError(
            f"host={host!r} port={port} was asked for",
            why="another process listens there" if used else str(last),
            next="choose another --port, or end that process" if used else "choose another --host or --port",
        )
    return sockets


# A name may stand for an IPv6 address on a host that has none.
_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def _name_process() -> None:
    import setproctitle

    setproctitle.setproctitle("phalanx server")
