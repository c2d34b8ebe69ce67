# SPDX-License-Identifier: Apache-2.0
"""The life of a server: start, serve, drain, stop; and the reaction to a failure of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from phalanx.config.generation import defaults_line
from phalanx.config.locate import locate_tokenizer
from phalanx.config.model import known_eos_ids
from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.errors import OptionError, PhalanxError
from phalanx.log import get_logger
from phalanx.serve import allocator
from phalanx.serve.client import EngineClient, MakeVocabulary
from phalanx.serve.connections.accept import Acceptor
from phalanx.serve.connections.timed_protocol import TimedProtocol, timed_protocol
from phalanx.serve.openai.adapters import load, require_loadable
from phalanx.serve.openai.service import Service, ServingEngine
from phalanx.serve.openai.yes_no import YesNo
from phalanx.serve.output_parsing import OutputFormat
from phalanx.serve.structured_output.vocabulary import vocabulary_of
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

LAST_EVENT_SECONDS = 2.0
"""Seconds that streams get to send a last error when the server ends."""
CLOSE_SECONDS = 5.0
"""Seconds that the engine gets to shut down before it is killed."""
FULL_COLLECTION = 100_000
"""Collections of the middle generation before one of all objects (Python's default: 10), which stops every stream: 0.15 s beside a
few long answers. With 1000, a minute of large bodies brought one. A request leaves no cycles, and what other code leaves is
collected when the server is idle (`allocator`)."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They end the server in order. SIGHUP comes when the terminal is closed; if it was ignored from the start (nohup), it stays so."""


class Lifecycle:
    """Runs one server. `run` returns the exit status."""

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        sockets: list[socket.socket],
        *,
        engine: EngineOptions,
        serving: ServeOptions,
        start: Callable[[EngineOptions, MakeVocabulary | None], Awaitable[EngineClient]],
    ) -> None:
        self._app = app
        self._service, self._sockets, self._engine, self._serving, self._start = service, sockets, engine, serving, start
        protocol = timed_protocol(header_seconds=serving.header_timeout, body_seconds=serving.body_timeout)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none", http=protocol,
            timeout_keep_alive=75, timeout_graceful_shutdown=int(LAST_EVENT_SECONDS), proxy_headers=False,
        )  # fmt: skip
        self._http = HttpServer(config)
        self._client: EngineClient | None = None
        self._shutdown: asyncio.Event = asyncio.Event()
        self._failed: asyncio.Event = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal or a failure."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        allocator.configure()
        http = asyncio.create_task(self._http.serve(sockets=self._sockets))
        try:
            status = await self._until_done(http)
        finally:
            self._http.should_exit = True
            if self._trimming is not None:
                self._trimming.cancel()
            await asyncio.wait([http], timeout=LAST_EVENT_SECONDS * 2)
            if self._client is not None:
                await self._client.close(0.0 if self._failed.is_set() else CLOSE_SECONDS)
            self._service.close()
        return status

    async def _until_done(self, http: asyncio.Task[None]) -> int:
        start_time = time.monotonic()
        self._starting = asyncio.create_task(self._start_engine())
        await _first(self._starting, self._shutdown.wait(), http)
        if not self._starting.done():
            logger.info("stopped during the start")
            self._starting.cancel()
            await asyncio.wait([self._starting])
            return 0
        try:
            self._starting.result()
        except PhalanxError as error:
            logger.error("%s", error)
            return 2 if isinstance(error, OptionError) else 1
        logger.info(
            "%s is served at %s, %.1f s after the start", self._service.model_name, self._url(), time.monotonic() - start_time
        )
        gc.collect()
        gc.freeze()  # these objects live as long as the server; collections that scan them would delay every stream
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
        self._trimming = asyncio.create_task(allocator.trim_when_idle(lambda: not self._service.admission.open))
        await _first(self._failed.wait(), self._shutdown.wait(), http)
        if http.done() and not self._shutdown.is_set():
            logger.error("the HTTP server ended unexpectedly: %s", http.exception())
            return 1
        if not self._failed.is_set():
            await self._drain()
        if self._failed.is_set():
            await _within(LAST_EVENT_SECONDS, self._service.admission.emptied())
            return 1
        return 0

    async def _start_engine(self) -> None:
        """Load the tokenizer first, so that a missing model or tokenizer is an error within milliseconds; then start the engine."""
        service, options = self._service, self._engine
        if options.skip_tokenizer_init:
            raise OptionError("skip_tokenizer_init is not possible here", why="a server reads and writes text", next="remove it")
        if self._serving.lora_modules is not None and not options.max_loras:
            raise OptionError("lora_modules needs room for adapters", held="max_loras is 0", next="set max_loras to 1 or more")
        modules = self._serving.read_lora_modules()
        require_loadable(service, modules)
        tokenizer = await asyncio.to_thread(self._load_tokenizer)
        output = await asyncio.to_thread(self._detect_output, tokenizer)
        yes_no = YesNo.detect(self._serving.rerank_by, options.model, tokenizer)
        describing = asyncio.create_task(asyncio.to_thread(self._app.openapi))  # it takes 0.3 s: the first who asks would wait
        try:
            client = self._client = await self._start(options, partial(vocabulary_of, tokenizer))
        finally:
            await describing
        if not client.eos_token_ids and tokenizer.eos_token_id is not None:
            client.eos_token_ids = list(known_eos_ids([tokenizer.eos_token_id], client.facts.vocab_size, "the tokenizer"))
        for name, folder in modules.items():
            await load(service, client, name, folder)
        facts, metrics = client.facts, service.metrics
        logger.info("%s", defaults_line(facts.sampling_defaults))
        service.admission.begin(batch=facts.max_batch_size, max_reqs=self._serving.max_num_queued_reqs)
        metrics.startup_phases = dict(facts.phases)
        metrics.rank_bytes = {rank.rank: rank.bytes for rank in facts.ranks}
        metrics.engines, metrics.engines_up = client.latest_by_replica(), client.alive
        metrics.cache_config = {"block_size": facts.block_size, "num_gpu_blocks": facts.num_blocks // facts.layout.replicas}
        metrics.queue_limits = {"requests": service.admission.max_reqs}
        if service.admission.max_tokens is not None:
            metrics.queue_limits["tokens"] = service.admission.max_tokens
        escape = self._serving.escape_special_tokens
        service.engine = ServingEngine(client, tokenizer, output, escape_special_tokens=escape, yes_no=yes_no)
        if facts.device != "cpu":
            self._warming = asyncio.create_task(service.warm_up(service.engine))
        else:  # a CPU has no spare cores for it, and structured output may never be requested
            logger.info("structured output is prepared by the first request that needs it; that request waits for a second")
        client.on_failure(self._engine_failed)
        if client.failure is not None:
            self._engine_failed(client.failure)

    def _load_tokenizer(self) -> Tokenizer:
        options, template = self._engine, self._serving.chat_template
        tokenizer = Tokenizer.load(locate_tokenizer(options.tokenizer, options.model, options.revision))
        if template is not None:
            source, origin = _template(template)
            tokenizer.set_chat_template(source, origin=origin)
        _ = tokenizer.text  # written now, for the processes of large bodies: it would hold up the streams
        return tokenizer

    def _detect_output(self, tokenizer: Tokenizer) -> OutputFormat:
        serving = self._serving
        output = OutputFormat.detect(tokenizer, reasoning=serving.reasoning_parser, tools=serving.tool_call_parser)
        logger.info("reasoning format: %s; tool call format: %s", output.reasoning or "none", output.tools or "none")
        return output

    async def _drain(self) -> None:
        """Reject new requests, let accepted ones finish for shutdown_timeout seconds, and end the rest with an error."""
        admission, seconds = self._service.admission, self._serving.shutdown_timeout
        admission.drain()
        logger.info("shutting down: %d completions get %g s to finish; signal again to stop at once", admission.open, seconds)
        await _within(seconds, _first(admission.emptied(), self._failed.wait()))
        if admission.open and not self._failed.is_set() and self._client is not None:
            logger.warning("%d completions did not finish within %g s and are ended", admission.open, seconds)
            await self._client.close(CLOSE_SECONDS)
            await _within(LAST_EVENT_SECONDS, admission.emptied())

    def _engine_failed(self, error: PhalanxError) -> None:
        self._service.admission.fail(error)
        self._failed.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._shutdown.is_set():
            self._shutdown.set()
            return
        logger.warning("stopped at once")
        # The engine's processes would end with this one (death pipes), but its folder would stay.
        if self._client is not None:
            self._client.kill()
        os._exit(128 + number)

    def _url(self) -> str:
        host, port = self._serving.host, self._sockets[0].getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, since this server drains before it closes its port, and with an `Acceptor`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await super().startup(sockets=[])
        self.servers = [Acceptor(sockets, self._make_protocol)]  # type: ignore[list-item]  # it closes in the same way

    def _make_protocol(self) -> TimedProtocol:
        protocol: TimedProtocol = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


def _template(value: str) -> tuple[str, str]:
    """The source of a chat template, given as a file or as text, and where it comes from."""
    try:
        path = Path(value)
        if path.is_file():
            return path.read_text(encoding="utf-8-sig"), path.name
    except (OSError, ValueError) as error:
        if "{" not in value:
            raise OptionError(f"chat_template={value!r} cannot be read", why=str(error)) from None
    if "{" not in value:
        raise OptionError(f"chat_template={value!r} is neither a file nor a template", next="give a path, or a Jinja template")
    return value, "--chat_template"


async def _first(*awaited: Awaitable[object]) -> None:
    """Wait for the first of several awaitables. The others are cancelled, except tasks, which go on."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, one in zip(tasks, awaited, strict=True):
            if task is not one:
                task.cancel()


async def _within(seconds: float, awaited: Awaitable[object]) -> None:
    """Wait for at most this number of seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(awaited, seconds)
