# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: a port, the OpenAI API, and the engine behind it.

    run: bind the port -> serve HTTP (/live 200, /ready 503) -> start the engine -> accept requests -> drain -> stop, status 0

The port is bound before anything is started, so that a port in use is reported at once. Exit statuses: 0 after a signal, 1 if the
engine could not start or failed, 2 if the options or the port cannot be used, 128 + signal after a second signal.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import place_process
from phalanx.errors import OptionError, PhalanxError
from phalanx.log import choose, configure, get_logger
from phalanx.metrics import Metrics
from phalanx.serve.admission import AdmissionControl
from phalanx.serve.anthropic import routes as messages
from phalanx.serve.client import EngineClient, MakeVocabulary
from phalanx.serve.connections.listen import bind
from phalanx.serve.connections.middleware import install_middleware
from phalanx.serve.lifecycle import Lifecycle
from phalanx.serve.openai import adapters, chat, completions, embeddings, experts, model_changes, status, tokenize
from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.responses import routes as responses
from phalanx.serve.openai.responses.store import ResponseStore
from phalanx.serve.openai.schema.openapi import install_openapi
from phalanx.serve.openai.service import Service
from phalanx.serve.replicas import start_engine
from phalanx.serve.telemetry.request_report import EndOfRequest, always_log_requests, log_request
from phalanx.serve.telemetry.tracing import Tracer
from phalanx.version import __version__

logger = get_logger(__name__)

OPEN_FILES = 65536
"""Descriptors that a server may have: each stream takes one."""

SWITCH_INTERVAL_SECONDS = 1e-4
"""Time for which another thread keeps the interpreter lock from the event loop, each time that the loop wants it (Python's default:
5 ms). The loop gives it up in calls into libraries, several times for each token: with 16 streams and 1 ms, a thread that encodes a
long answer held up every stream for 45 to 90 ms."""

ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    embeddings.router,
    tokenize.router,
    status.router,
    experts.router,
    model_changes.router,
    adapters.router,
)

StartEngine = Callable[[EngineOptions, MakeVocabulary | None], Awaitable[EngineClient]]


def run(engine: EngineOptions, serving: ServeOptions, *, start: StartEngine = start_engine) -> int:
    """Serve until a signal or a failure; return the exit status. start: starts the engine (tests pass their own).

    With node_rank > 0, this host only runs ranks for the server on node 0, and answers probes.
    """
    choose(form=serving.log_format, level=serving.log_level)
    configure("phalanx server")
    try:
        if engine.plan == "auto":
            from phalanx.planner.auto import planned

            engine = planned(engine)
        engine, local_rank = place_process(engine)
        if engine.node_rank > 0:
            from phalanx.serve.follower import run_follower

            return run_follower(engine, serving, local_rank)
        serving.require_possible(deterministic=engine.deterministic)
        api_keys = serving.read_api_keys()
        tracer = None if serving.otlp_traces_endpoint is None else Tracer(serving.otlp_traces_endpoint)
        sockets = bind(serving.host, serving.port)
    except OptionError as error:
        logger.error("%s", error)
        return 2
    _name_process()
    raise_open_files()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    service = make_service(engine, serving)
    app = make_app(service, serving, api_keys=api_keys, tracer=tracer)
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
    name = serving.served_model_name or public_name(engine.model)
    metrics = Metrics(prefix=serving.metrics_prefix, model_name=name, version=__version__)
    metrics.each_expert = serving.expert_metrics
    admission = AdmissionControl(max_tokens=serving.max_num_queued_tokens, refused=metrics.refused)
    metrics.queued = lambda: (admission.queued, admission.queued_tokens)
    store = ResponseStore(count=serving.max_stored_responses, seconds=serving.stored_response_ttl)
    alias = engine.model if serving.served_model_name is None else name
    service = Service(model_name=name, model_alias=alias, admission=admission, metrics=metrics, responses=store)
    service.pooling, service.sleep_mode = serving.pooling, serving.enable_sleep_mode
    service.changes_adapters = serving.allow_runtime_lora_updating
    return service


def public_name(model: str) -> str:
    """The name of a model without a path of this host: the folder's name, or the Hub id of a folder in the Hub's cache."""
    path = Path(model).expanduser()
    if model == "demo" or not path.is_dir():
        return model
    path = path.resolve()
    for folder in path.parents:
        if folder.name.startswith("models--"):  # models--org--name/snapshots/<commit>
            return folder.name.removeprefix("models--").replace("--", "/")
    return path.name or model


def make_app(service: Service, serving: ServeOptions, *, api_keys: Sequence[str] = (), tracer: Tracer | None = None) -> FastAPI:
    """The ASGI application over a service. api_keys: those of `serving`, read. tracer: that of `serving`; the service closes it."""
    # Not by include_router, whose routers look for the route of a request twice.
    routes = [route for router in ROUTERS for route in router.routes]
    app = FastAPI(title="Phalanx", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, routes=routes)
    app.state.service = service

    async def error_response(request: Request, error: Exception) -> Response:
        api_error = service.api_error_at(request.url.path)(error)
        if api_error.status == 405:
            api_error.headers["Allow"] = ", ".join(sorted(_methods_of(request.url.path)))
        return api_error.response()

    for kind in (ApiError, PhalanxError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, error_response)
    ends: list[EndOfRequest] = []
    if serving.log_requests:
        always_log_requests()
        ends.append(log_request)
    if tracer is not None:
        service.at_close.append(tracer.close)
        ends.append(tracer.end)
    install_openapi(app, model_name=service.model_name, with_key=bool(api_keys), open_metrics=serving.open_metrics)
    install_middleware(
        app, api_keys=api_keys, open_metrics=serving.open_metrics, cors_origins=serving.read_cors_origins(), ends=ends
    )
    return app


def _methods_of(path: str) -> set[str]:
    """The methods that any route of this path has."""
    methods: set[str] = set()
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, Route) and route.path_regex.match(path):
                methods |= route.methods or set()
    return methods | ({"HEAD"} if "GET" in methods else set())


def _name_process() -> None:
    import setproctitle

    setproctitle.setproctitle("phalanx server")
