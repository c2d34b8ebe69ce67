# SPDX-License-Identifier: Apache-2.0
"""The client of the engine: starts its process, sends requests, streams their updates, and detects its failure.

Engine and client communicate over one pair of DEALER sockets in a private folder. Streams end with an error in bounded time: when
the engine reports a failure (the error names the rank), when its process ends, and when it has sent no heartbeat for 25 s.
`serve.fake_client` has an in-process fake for tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import zmq

from phalanx import launch
from phalanx.config import EngineOptions, SamplingParams
from phalanx.engine.executor import RANK_EXECUTOR
from phalanx.engine.messages import (
    Abort,
    AdapterFacts,
    AdaptersChanged,
    AddRequest,
    ClientToEngine,
    EngineFacts,
    EngineToClient,
    ExpertStats,
    Failed,
    GetExperts,
    GetStats,
    LoadAdapter,
    ModelChange,
    ModelState,
    NextTokens,
    RebalanceExperts,
    RequestRejected,
    RequestUpdate,
    Shutdown,
    Started,
    Stats,
    UnloadAdapter,
    Vocabulary,
)
from phalanx.errors import EngineClosed, EngineError, PhalanxError, RequestError
from phalanx.layout import Layout
from phalanx.log import get_logger
from phalanx.serve.engine_requests import build_request, check_request
from phalanx.serve.update_stream import UpdateStream

SILENCE = 25.0
"""Seconds without a heartbeat after which a started engine counts as failed."""
QUIET = 5.0
"""Seconds without a heartbeat after which it counts as stalled."""
_LAST_MESSAGE_SECONDS = 0.5  # time for the last messages of an ended engine to arrive
_NOBLOCK = int(zmq.NOBLOCK)
_PATH_LIMIT = 80  # bytes of the folder's path; the kernel's limit for the path of a socket is 107

logger = get_logger(__name__)


MakeVocabulary = Callable[[], Vocabulary]
Answer = TypeVar("Answer")


class EngineClient(Protocol):
    """The engine as `serve` uses it. Implemented by `EngineProcessClient` and by `serve.fake_client.FakeEngineClient`."""

    facts: EngineFacts
    eos_token_ids: list[int]
    """Tokens that end a completion, unless ignore_eos is set. The model's; if it has none, the tokenizer's."""
    failure: PhalanxError | None
    """Why the engine cannot be used any more; None while it can."""

    @property
    def alive(self) -> list[int]:
        """The numbers of the engines behind this one that take requests: [0] or none, unless there are replicas."""

    def latest_by_replica(self) -> list[Stats]:
        """The last Stats of each engine behind this one."""

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the error that `add` would be rejected with, as far as it is known beforehand: PromptTooLong, RequestError."""

    def add(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, coalesce: bool = False
    ) -> AsyncGenerator[RequestUpdate]:
        """Run one completion (params.n is 1). Ends after the update with a finish_reason; leaving early aborts the request.

        An update has everything since the previous one. coalesce: the caller needs only the end, so updates may be merged. Raises
        the error that the engine rejects the request with, or EngineError if the engine fails.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort these requests; their streams end with finish_reason "abort". Unknown ids are ignored."""

    async def stats(self) -> Stats: ...

    async def stats_by_replica(self) -> list[Stats]:
        """As `stats`, of each engine behind this one."""

    async def experts_by_replica(self) -> list[ExpertStats]:
        """The load of experts, of each engine behind this one; empty ones for a model without experts."""

    async def rebalance_experts(self) -> list[ExpertStats]:
        """Have each engine move its experts to where their load is even, and return at once, with what it has to do."""

    async def change_model(self, message: ModelChange) -> list[ModelState]:
        """Have each engine sleep, wake up or read other weights, and wait for the end. A state with an `error` did not change."""

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> list[AdapterFacts]:
        """Load the adapter in a folder under a name, and return when requests may give it. Returns all adapters that are loaded.

        replace: as of `LoadAdapter`. Raises AdapterError, and what makes the adapter unusable.
        """

    async def unload_adapter(self, name: str) -> list[AdapterFacts]:
        """Take no more requests for the adapter. Returns those that remain. Raises AdapterNotFound."""

    def on_failure(self, callback: Callable[[PhalanxError], None]) -> None:
        """Register a callback that runs on the event loop when the engine fails (not when it is closed)."""

    async def close(self, timeout: float = 10.0) -> None: ...

    def kill(self) -> None:
        """End the engine at once, without an event loop."""


class EngineProcessClient:
    """An engine process and its requests. Its methods must run on the event loop that started it. See `EngineClient`."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.facts: EngineFacts = _NO_FACTS
        self.eos_token_ids: list[int] = []
        self.latest = Stats()
        self.failure: PhalanxError | None = None
        self._streams: dict[str, UpdateStream] = {}
        self._stats_futures: list[asyncio.Future[Stats]] = []
        self._expert_futures: deque[asyncio.Future[ExpertStats]] = deque()
        self._change_futures: deque[asyncio.Future[ModelState]] = deque()
        self._adapter_calls = itertools.count()
        self._adapter_futures: dict[int, asyncio.Future[list[AdapterFacts]]] = {}
        self._failure_callbacks: list[Callable[[PhalanxError], None]] = []
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._connected, self._ended = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._silent = 0.0  # seconds since the last message of the engine
        self._child: launch.Child | None = None
        self._watch = launch.Watch()
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = _private_folder()
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineToClient).decode

    @classmethod
    async def start(
        cls, options: EngineOptions, *, executor: str = RANK_EXECUTOR, title: str = "phalanx engine",
        environment: Mapping[str, str] | None = None, vocabulary: MakeVocabulary | None = None,
    ) -> EngineProcessClient:  # fmt: skip
        """Start an engine process and wait until it accepts requests. executor: the dotted path of the engine's `Executor`. title:
        of the process; environment: variables that it has besides those of this process. vocabulary: what structured output needs
        of the tokenizer; made on a thread while the engine starts.

        Raises the error of a failed start (ModelError, LayoutError, CapacityError, EngineError, ...). When it raises, or is
        cancelled, no process is left.
        """
        client = cls(options)
        try:
            client._launch(executor, title, environment, vocabulary)
            # The engine observes start_timeout itself; this limit is for an engine that hangs.
            async with asyncio.timeout(options.start_timeout + SILENCE):
                await client._started
        except TimeoutError:
            await client.close(timeout=0)
            raise EngineError(
                f"the engine did not start within {options.start_timeout + SILENCE:.0f} s", next="raise start_timeout"
            ) from None
        except BaseException:
            await client.close(timeout=0)
            raise
        return client

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        check_request(self._add("", token_ids, params), self.facts, chunked_prefill=self.options.enable_chunked_prefill)

    async def add(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, coalesce: bool = False
    ) -> AsyncGenerator[RequestUpdate]:
        self._raise_if_failed()
        if request_id in self._streams:
            raise RequestError(
                f"request id {request_id!r} is in use", held="a request with this id is running", next="use another id"
            )
        stream = self._streams[request_id] = UpdateStream(coalesce=coalesce)
        try:
            self._send(self._add(request_id, token_ids, params))
            while True:
                update = await stream.next()
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            self._streams.pop(request_id, None)
            stream.discard()
            if not stream.ended and self.failure is None:
                self._send(Abort([request_id]))

    def abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self._streams]
        for request_id in known:
            self._streams.pop(request_id).put(RequestUpdate(request_id, [], finish_reason="abort"))
        if known and self.failure is None:
            self._send(Abort(known))

    async def stats(self) -> Stats:
        self._raise_if_failed()
        answer: asyncio.Future[Stats] = self._loop.create_future()
        self._stats_futures.append(answer)
        self._send(GetStats())
        return await answer

    @property
    def alive(self) -> list[int]:
        return [] if self.failure is not None else [0]

    def latest_by_replica(self) -> list[Stats]:
        if self._silent > QUIET:
            why = f"the engine process has sent nothing for {self._silent:.0f} s"
            return [msgspec.structs.replace(self.latest, stalled=why)]
        return [self.latest]

    async def stats_by_replica(self) -> list[Stats]:
        return [await self.stats()]

    async def experts_by_replica(self) -> list[ExpertStats]:
        return [await self._ask_experts(GetExperts())]

    async def rebalance_experts(self) -> list[ExpertStats]:
        return [await self._ask_experts(RebalanceExperts())]

    async def change_model(self, message: ModelChange) -> list[ModelState]:
        self._raise_if_failed()
        answer: asyncio.Future[ModelState] = self._loop.create_future()
        self._change_futures.append(answer)
        self._send(message)
        return [await answer]

    async def _ask_experts(self, message: GetExperts | RebalanceExperts) -> ExpertStats:
        self._raise_if_failed()
        answer: asyncio.Future[ExpertStats] = self._loop.create_future()
        self._expert_futures.append(answer)
        self._send(message)
        return await answer

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> list[AdapterFacts]:
        return await self._ask_adapters(LoadAdapter(next(self._adapter_calls), name, folder, replace))

    async def unload_adapter(self, name: str) -> list[AdapterFacts]:
        return await self._ask_adapters(UnloadAdapter(next(self._adapter_calls), name))

    async def _ask_adapters(self, message: LoadAdapter | UnloadAdapter) -> list[AdapterFacts]:
        self._raise_if_failed()
        answer: asyncio.Future[list[AdapterFacts]] = self._loop.create_future()
        self._adapter_futures[message.call] = answer
        self._send(message)
        return await answer

    def on_failure(self, callback: Callable[[PhalanxError], None]) -> None:
        self._failure_callbacks.append(callback)

    async def close(self, timeout: float = 10.0) -> None:
        """Shut the engine down; kill it after `timeout` seconds, or at once when cancelled. Open streams end with EngineClosed."""
        try:
            if not self._closing:
                self._closing = True
                self._fail(EngineClosed("the engine was shut down"))
                if timeout > 0 and self._child is not None and self._child.alive:
                    self._send(Shutdown())
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(timeout):
                            await self._ended.wait()
        finally:  # a second interrupt cancels the wait
            await self._end()

    def kill(self) -> None:
        """End the process of the engine at once, without an event loop."""
        if self._child is not None:
            launch.stop([self._child], 0.0)
        self._remove_folder()

    # ---- the process -----------------------------------------------------------------------------------------------------

    def _launch(self, executor: str, title: str, environment: Mapping[str, str] | None, vocabulary: MakeVocabulary | None) -> None:
        address = f"ipc://{self._folder}/engine"
        # No message is dropped: the requests bound what is in flight.
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        config: dict[str, Any] = {"address": address, "options": self.options.model_dump(), "executor": executor}
        config["vocabulary"] = vocabulary is not None
        self._child = launch.start("phalanx.engine", config, title, environment=environment)
        self._watch.add(self._child)
        self._loop.add_reader(self._watch.fileno(), self._child_ended)
        self._loop.add_reader(self._descriptor, self._receive)
        self._tasks = [asyncio.create_task(self._watch_heartbeat())]
        if vocabulary is not None:
            self._tasks.append(asyncio.create_task(self._send_vocabulary(vocabulary)))

    async def _send_vocabulary(self, vocabulary: MakeVocabulary) -> None:
        try:
            message = await asyncio.to_thread(vocabulary)
            await self._connected.wait()  # a message would be lost before
            self._send(message)
        except Exception as error:
            logger.warning("structured output will not be possible: the vocabulary cannot be read: %r", error)

    def _child_ended(self) -> None:
        for end in self._watch.ended():
            self._ended.set()
            if not self._closing:
                error = EngineError(f"the engine process {end.words}", next="start it again")
                self._loop.call_later(_LAST_MESSAGE_SECONDS, self._fail, error)

    async def _watch_heartbeat(self) -> None:
        """Count seconds only while this loop runs: on a laptop that was suspended, the engine was suspended, too."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            self._silent, last = self._silent + min(now - last, 2.0), now
            if self._silent > SILENCE and self._started.done():
                self._fail(EngineError(f"the engine process has sent no heartbeat for {SILENCE:.0f} s", why=_STALLED_WHY))
                return

    async def _end(self) -> None:
        """Make sure that the process has ended, then release all resources."""
        if self._child is not None:
            launch.stop([self._child], 0.0)
        if not self._socket.closed:
            if self._watch.fileno() >= 0:
                self._loop.remove_reader(self._watch.fileno())
            self._watch.close()
            self._loop.remove_reader(self._descriptor)
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            finally:  # this may be cancelled, too, as by another replica that failed
                self._socket.close(linger=0)
                self._context.term()
                self._remove_folder()

    # ---- messages --------------------------------------------------------------------------------------------------------

    def _add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams) -> AddRequest:
        return build_request(request_id, token_ids, params, self.eos_token_ids)

    def _send(self, message: ClientToEngine) -> None:
        with contextlib.suppress(zmq.Again):  # nobody is connected any more: the end of the engine will be noticed
            self._socket.send(self._encode(message), _NOBLOCK)  # without a high-water mark it is queued at once
        self._loop.call_soon(self._receive)  # zmq may have seen while it sent that a message came, and signals nothing then

    def _receive(self) -> None:
        """Handle what has arrived. The engine counts as failed where a message cannot be read."""
        if self._socket.closed:
            return
        try:
            self._handle_arrived()
        except Exception as error:
            logger.exception("a message of the engine cannot be read")
            self._fail(EngineError("the engine sent what cannot be read", why=repr(error), next="report this with the log"))

    def _handle_arrived(self) -> None:
        """One message per frame. zmq's descriptor signals a change, so everything is read that is there."""
        receive, decode, streams = self._socket.recv, self._decode, self._streams
        with contextlib.suppress(zmq.Again):
            while True:
                message = decode(receive(_NOBLOCK))
                self._silent = 0.0
                if type(message) is NextTokens:
                    for id, token in zip(message.request_ids, message.tokens, strict=True):
                        if (stream := streams.get(id)) is not None:
                            stream.put(RequestUpdate(id, [token]))
                elif type(message) is not RequestUpdate:
                    self._handle(message)
                elif (stream := streams.get(message.request_id)) is not None:
                    stream.put(message)
                    if message.prompt_logprobs is not None:
                        self._loop.call_soon(self._receive)  # a part of many: other streams go on between two
                        return

    def _handle(self, message: Any) -> None:
        """Handle the rare messages: all but the updates of each step."""
        self._connected.set()
        self._remove_folder()  # the engine is connected: nothing is left behind, however this process ends
        match message:
            case RequestRejected(request_id=request_id, error=error) if request_id in self._streams:
                self._streams[request_id].fail(PhalanxError.from_wire(error))
            case Stats():
                self.latest = message
                for answer in self._stats_futures:
                    if not answer.done():
                        answer.set_result(message)
                self._stats_futures.clear()
            case ExpertStats():
                _answer(self._expert_futures, message)
            case ModelState():
                _answer(self._change_futures, message)
            case AdaptersChanged(call=call, error=error, adapters=adapters):
                changed = self._adapter_futures.pop(call, None)
                if changed is not None and not changed.done():
                    if error is None:
                        changed.set_result(adapters)
                    else:
                        changed.set_exception(PhalanxError.from_wire(error))
            case Started(facts=facts):
                self.facts, self.eos_token_ids = facts, list(facts.eos_token_ids)
                if not self._started.done():
                    self._started.set_result(None)
            case Failed(error=error):
                self._fail(PhalanxError.from_wire(error))
            case _:
                pass  # a heartbeat, a goodbye, or the rejection of a request that has no stream any more

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()

    def _fail(self, error: PhalanxError) -> None:
        """The engine has failed: every waiter gets the error. Only the first error counts."""
        if self.failure is not None:
            return
        self.failure = error
        for stream in self._streams.values():
            stream.fail(error.copy())
        futures: list[asyncio.Future[Any]] = [*self._stats_futures, *self._expert_futures, *self._change_futures]
        futures += self._adapter_futures.values()
        for answer in futures:
            if not answer.done():
                answer.set_exception(error.copy())
        self._stats_futures.clear()
        self._expert_futures.clear()
        self._change_futures.clear()
        self._adapter_futures.clear()
        starting = not self._started.done()
        if starting:
            self._started.set_exception(error.copy())
            self._started.exception()  # so that asyncio does not complain if nobody awaits it
        if not self._closing:
            if not starting:  # an error of the start is raised by `start`, so it is not logged, too
                logger.error("%s", error)
            for callback in self._failure_callbacks:
                callback(error)
            self._tasks.append(asyncio.create_task(self._end_failed(5.0 if self._silent < SILENCE else 0.0)))

    async def _end_failed(self, grace: float) -> None:
        """A failed engine ends itself and its ranks; an engine that hangs does not, and is killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._ended.wait()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)


def _answer(futures: deque[asyncio.Future[Answer]], message: Answer) -> None:
    """Answers come in the order of the questions; those that come after a failure have no question any more."""
    waiter = futures.popleft() if futures else None
    if waiter is not None and not waiter.done():
        waiter.set_result(message)


_STALLED_WHY = "it is stopped, or its machine is overloaded"
_NO_FACTS = EngineFacts("", "", "", Layout(), 0, 0, 0, 0, 0, 0, 0, [])


def _private_folder() -> str:
    folder = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="phalanx-", dir=folder if len(os.fsencode(folder)) < _PATH_LIMIT else "/tmp")
