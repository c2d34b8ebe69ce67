# SPDX-License-Identifier: Apache-2.0
"""From the first signal of life of a server to its last: start, serve, drain, stop; and what to do when the engine is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from phalanx.config.locate import locate_tokenizer
from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.errors import OptionError, PhalanxError
from phalanx.log import get_logger
from phalanx.serve.client import Engine
from phalanx.serve.openai.service import Service, ServingEngine
from phalanx.serve.openai.tools import detect
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

LAST_WORDS = 2.0
"""Seconds that streams have to say what went wrong, once they are to end."""
CLOSE_SECONDS = 5.0
"""Seconds that the engine may take to end as asked, before it is killed."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Lifecycle:
    """One server's life. `live` returns the status to exit with."""

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        sockets: list[socket.socket],
        *,
        engine: EngineOptions,
        serving: ServeOptions,
        start: Callable[[EngineOptions], Awaitable[Engine]],
    ) -> None:
        self._service, self._sockets, self._engine, self._serving, self._start = service, sockets, engine, serving, start
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none", http="httptools",
            timeout_keep_alive=75, timeout_graceful_shutdown=int(LAST_WORDS), proxy_headers=False,
        )  # fmt: skip
        self._http = HttpServer(config)
        self._client: Engine | None = None
        self._asked: asyncio.Event = asyncio.Event()
        self._lost: asyncio.Event = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None

    async def live(self) -> int:
        """Serve until a signal or a failure."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        http = asyncio.create_task(self._http.serve(sockets=self._sockets))
        try:
            status = await self._until_done(http)
        finally:
            self._http.should_exit = True
            await asyncio.wait([http], timeout=LAST_WORDS * 2)
            if self._client is not None:
                await self._client.close(0.0 if self._lost.is_set() else CLOSE_SECONDS)
            self._service.close()
        return status

    async def _until_done(self, http: asyncio.Task[None]) -> int:
        began = time.monotonic()
        self._starting = asyncio.create_task(self._start_engine())
        await _first(self._starting, self._asked.wait(), http)
        if not self._starting.done():
            logger.info("stopped while starting")
            self._starting.cancel()
            await asyncio.wait([self._starting])
            return 0
        try:
            self._starting.result()
        except PhalanxError as error:
            logger.error("%s", error)
            return 2 if isinstance(error, OptionError) else 1
        logger.info("%s is served at %s, %.1f s after the start", self._service.model_name, self._url(), time.monotonic() - began)
        gc.collect()
        gc.freeze()  # what is here now stays; a collection that walks over it would hold up every stream
        await _first(self._lost.wait(), self._asked.wait(), http)
        if http.done() and not self._asked.is_set():
            logger.error("the HTTP server has ended by itself: %s", http.exception())
            return 1
        if not self._lost.is_set():
            await self._drain()
        if self._lost.is_set():
            await _within(LAST_WORDS, self._service.admission.emptied())
            return 1
        return 0

    async def _start_engine(self) -> None:
        """Tokenizer first: a model that is not there, or cannot be spoken to, is known in milliseconds."""
        service, asked = self._service, self._engine
        if asked.skip_tokenizer_init:
            raise OptionError("skip_tokenizer_init was asked for", why="a server reads and writes text", next="leave it out")
        tokenizer = await asyncio.to_thread(self._load_tokenizer)
        tool_format = await asyncio.to_thread(detect, tokenizer) if tokenizer.has_chat_template else None
        client = self._client = await self._start(asked)
        if not client.eos_token_ids and tokenizer.eos_token_id is not None:
            client.eos_token_ids = [tokenizer.eos_token_id]
        facts, metrics = client.facts, service.metrics
        service.admission.begin(batch=facts.max_batch_size, max_reqs=self._serving.max_num_queued_reqs)
        metrics.startup_phases = dict(facts.phases)
        metrics.rank_bytes = {rank.rank: rank.bytes for rank in facts.ranks}
        metrics.engine = client.latest
        metrics.queue_limits = {"requests": service.admission.max_reqs}
        if service.admission.max_tokens is not None:
            metrics.queue_limits["tokens"] = service.admission.max_tokens
        service.engine = ServingEngine(client, tokenizer, tool_format)
        if facts.device != "cpu":
            self._warming = asyncio.create_task(service.warm(service.engine))
        else:  # a CPU has no cores to spare for it, and its server may never be asked
            logger.info("structured output: its compiler starts with the first request for it, which then waits some seconds")
        client.on_failure(self._engine_lost)
        if client.failure is not None:
            self._engine_lost(client.failure)

    def _load_tokenizer(self) -> Tokenizer:
        asked, template = self._engine, self._serving.chat_template
        tokenizer = Tokenizer.load(locate_tokenizer(asked.tokenizer, asked.model, asked.revision))
        if template is not None:
            source, origin = _template(template)
            tokenizer.set_chat_template(source, origin=origin)
        return tokenizer

    async def _drain(self) -> None:
        """Nobody comes in; who is in may finish, for a while; the rest hears that it ends."""
        admission, seconds = self._service.admission, self._serving.shutdown_timeout
        admission.drain()
        logger.info("shutting down: %d completions may finish within %g s; once more to stop at once", admission.open, seconds)
        await _within(seconds, _first(admission.emptied(), self._lost.wait()))
        if admission.open and not self._lost.is_set() and self._client is not None:
            logger.warning("%d completions did not finish in %g s and end now", admission.open, seconds)
            await self._client.close(CLOSE_SECONDS)
            await _within(LAST_WORDS, admission.emptied())

    def _engine_lost(self, error: PhalanxError) -> None:
        self._service.admission.fail(error)
        self._lost.set()

    def _signalled(self, number: signal.Signals) -> None:
        if not self._asked.is_set():
            self._asked.set()
            return
        logger.warning("stopped at once")
        # The engine's processes hold death pipes to this one, and would end with it; its folder would stay.
        if self._client is not None:
            self._client.kill()
        os._exit(128 + number)

    def _url(self) -> str:
        host, port = self._serving.host, self._sockets[0].getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn without its own handling of signals: a server drains before it closes its port."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _template(given: str) -> tuple[str, str]:
    """The chat template that was asked for, and where it came from."""
    try:
        path = Path(given)
        if path.is_file():
            return path.read_text(encoding="utf-8"), path.name
    except (OSError, ValueError) as error:
        if "{" not in given:
            raise OptionError(f"chat_template={given!r} was asked for", why=str(error)) from None
    if "{" not in given:
        raise OptionError(f"chat_template={given!r} was asked for", why="there is no such file, and it is no template")
    return given, "--chat_template"


async def _first(*awaited: Awaitable[object]) -> None:
    """Wait for the first of several; the others go on if they are tasks, and are dropped if not."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, one in zip(tasks, awaited, strict=True):
            if task is not one:
                task.cancel()


async def _within(seconds: float, awaited: Awaitable[object]) -> None:
    """Wait, but not for longer than this."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(awaited, seconds)
