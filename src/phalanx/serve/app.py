# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: a port, the OpenAI API, and the engine behind it.

    run: bind the port -> serve HTTP (/live 200, /ready 503) -> start the engine -> accept requests -> drain -> stop, status 0

The port is bound before anything is started, so that a port in use is reported at once. Exit statuses: 0 after a signal, 1 if the
engine could not start or failed, 2 if the options or the port cannot be used, 128 + signal after a second signal.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import resource
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
from phalanx.config.sources import place_process
from phalanx.errors import OptionError, PhalanxError
from phalanx.log import configure, get_logger
from phalanx.metrics import Metrics
from phalanx.plan.auto import planned
from phalanx.serve.admission import AdmissionControl
from phalanx.serve.client import Engine, EngineClient
from phalanx.serve.lifecycle import Lifecycle
from phalanx.serve.openai import chat, completions, status, tokenize
from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.schema.openapi import install_openapi, needs_key
from phalanx.serve.openai.service import Service
from phalanx.version import __version__

logger = get_logger(__name__)

OPEN_FILES = 65536
"""Descriptors that a server may have: each stream takes one."""

SWITCH_INTERVAL_SECONDS = 1e-3
"""Time for which a tokenizing thread may delay the streams, which have a token every few milliseconds. Python's default: 5 ms."""

StartEngine = Callable[[EngineOptions], Awaitable[Engine]]


def run(engine: EngineOptions, serving: ServeOptions, *, start: StartEngine = EngineClient.start) -> int:
    """Serve until a signal or a failure; return the exit status. start: starts the engine (tests pass their own).

    With node_rank > 0, this host only runs ranks for the server on node 0.
    """
    configure("phalanx server")
    try:
        engine, local_rank = place_process(planned(engine))
        if engine.node_rank > 0:
            from phalanx.executor.node import join

            return join(engine, local_rank=local_rank)
        api_key = serving.read_api_key()
        sockets = bind(serving.host, serving.port)
    except OptionError as error:
        logger.error("%s", error)
        return 2
    _name_process()
    raise_open_files()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    service = make_service(engine, serving)
    app = make_app(service, api_key=api_key)
    lifecycle = Lifecycle(app, service, sockets, engine=engine, serving=serving, start=start)
    try:
        import uvloop

        return uvloop.run(lifecycle.run())
    except ImportError:  # uvloop is not available on every system
        return asyncio.run(lifecycle.run())


def raise_open_files() -> None:
    """Raise the soft limit of open files to OPEN_FILES as far as the hard one goes: the usual 1024 refuses the 1000th stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_service(engine: EngineOptions, serving: ServeOptions) -> Service:
    """The state that the routes of one server share, without an engine yet."""
    name = serving.served_model_name or engine.model
    metrics = Metrics(prefix=serving.metrics_prefix, model_name=name, version=__version__)
    admission = AdmissionControl(max_tokens=serving.max_num_queued_tokens, refused=metrics.refused)
    metrics.queued = lambda: (admission.queued, admission.queued_tokens)
    return Service(model_name=name, admission=admission, metrics=metrics)


def make_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """The ASGI application over a service."""
    app = FastAPI(title="Phalanx", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for router in (chat.router, completions.router, tokenize.router, status.router):
        app.include_router(router)

    async def error_response(_: Request, error: Exception) -> Response:
        return service.api_error(error).response()

    for kind in (ApiError, PhalanxError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, error_response)
    if api_key is not None:
        app.add_middleware(KeyCheck, api_key=api_key)
    install_openapi(app, model_name=service.model_name, with_key=api_key is not None)
    return app


class KeyCheck:
    """Rejects requests without the key, in a time that reveals nothing about it. The key is in no message and no log."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app, self._key = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not needs_key(scope["path"]) or self._has_key(scope):
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
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`. With port 0, all use the same free port. Raises OptionError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"host={host!r} cannot be resolved", why=str(error), next="give an address of this host") from None
    sockets: list[socket.socket] = []
    last: OSError | None = None
    for family, kind, protocol, _, address in sorted(set(addresses)):
        bound_port = sockets[0].getsockname()[1] if sockets else port
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], bound_port, *address[2:]))
            listener.listen(2048)  # already here: two sockets can be bound to one port, and only the second `listen` fails
        except OSError as error:
            listener.close()
            last = error
            if error.errno not in _NO_SUCH_ADDRESS:
                break
            continue
        listener.setblocking(False)
        sockets.append(listener)
        last = None
    if last is not None and (not sockets or last.errno not in _NO_SUCH_ADDRESS):
        for one in sockets:
            one.close()
        in_use = last.errno == errno.EADDRINUSE
        raise OptionError(
            f"host={host!r} port={port} cannot be used",
            why="another process listens there" if in_use else str(last),
            next="choose another --port, or end that process" if in_use else "choose another --host or --port",
        )
    return sockets


# A host name may resolve to an IPv6 address on a host without IPv6.
_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def _name_process() -> None:
    import setproctitle

    setproctitle.setproctitle("phalanx server")
