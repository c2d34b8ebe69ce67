# SPDX-License-Identifier: Apache-2.0
"""The asker's end of the engine: starts its process, sends requests, streams what comes back, and notices when it is gone.

Engine and client talk over one pair of DEALER sockets in a private folder. The client ends streams with an error in bounded time:
when the engine says that it failed (the error names the rank), when its process ends, and when it has been silent for 25 s.
`serve.fake` has the in-process stand-in for tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from phalanx.comm import launch
from phalanx.config import EngineOptions, SamplingParams
from phalanx.engine.executor import RANK_EXECUTOR
from phalanx.engine.messages import (
    Abort,
    AddRequest,
    EngineFacts,
    EngineToClient,
    Failed,
    GetStats,
    RequestRejected,
    RequestUpdate,
    Shutdown,
    Started,
    Stats,
)
from phalanx.errors import EngineClosed, EngineError, PhalanxError, RequestError
from phalanx.log import get_logger
from phalanx.serve.engine_requests import build_request, check_request
from phalanx.serve.update_stream import UpdateStream

SILENCE = 25.0
"""Seconds without a sign of life from a started engine after which it is given up."""
_LAST_WORDS = 0.5  # seconds that messages of an engine that has ended may take to arrive
_NOBLOCK = int(zmq.NOBLOCK)
_PATH_LIMIT = 80  # bytes of a folder's path; the kernel's limit for the path of a socket is 107

logger = get_logger(__name__)


class Engine(Protocol):
    """What serve needs of an engine: `EngineClient`, and `serve.fake.FakeEngineClient`."""

    facts: EngineFacts
    eos_token_ids: list[int]
    """Tokens that end a completion unless ignore_eos. The model's; a tokenizer may add its own."""
    latest: Stats
    """The last Stats that came."""
    failure: PhalanxError | None
    """Why the engine is of no more use; None while it is."""

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `add` would be refused with, as far as that is known before it is sent: PromptTooLong, RequestError."""

    def add(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, coalesce: bool = False
    ) -> AsyncGenerator[RequestUpdate]:
        """Run one completion (params.n is 1). Ends after the Update with a finish_reason; leaving early aborts the request.

        An Update holds what came since the last one was taken. patient: nobody looks before the end, so that one may hold all.
        Raises what the engine refuses the request with, or EngineError when the engine is lost.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; their streams end with finish_reason "abort". Unknown ids are ignored."""

    async def stats(self) -> Stats: ...

    def on_failure(self, call: Callable[[PhalanxError], None]) -> None:
        """Call back, on the event loop, once the engine is lost (not when it is closed)."""

    async def close(self, timeout: float = 10.0) -> None: ...

    def kill(self) -> None:
        """End the engine now, without an event loop; for when there is none any more."""


class EngineClient:
    """An engine process and its requests. All methods belong to the event loop that started it. See `Engine`."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.facts: EngineFacts = _NO_FACTS
        self.eos_token_ids: list[int] = []
        self.latest = Stats()
        self.failure: PhalanxError | None = None
        self._streams: dict[str, UpdateStream] = {}
        self._stats: list[asyncio.Future[Stats]] = []
        self._calls: list[Callable[[PhalanxError], None]] = []
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._closing = False
        self._heard = False
        self._silent = 0.0  # seconds since the engine was heard
        self._child: launch.Child | None = None
        self._watch = launch.Watch()
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = _private_folder()
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineToClient).decode

    @classmethod
    async def start(cls, options: EngineOptions, *, executor: str = RANK_EXECUTOR) -> EngineClient:
        """Start an engine process and wait until it takes requests. executor: the dotted path of the engine's `Executor`.

        Raises what the engine could not start with (ModelError, LayoutError, CapacityError, EngineError, ...). When it raises, or
        is cancelled, no process is left.
        """
        client = cls(options)
        try:
            client._launch(executor)
            # The engine keeps start_timeout itself; this is for one that stands still.
            async with asyncio.timeout(options.start_timeout + SILENCE):
                await client._started
        except TimeoutError:
            await client.close(timeout=0)
            raise EngineError(
                "the engine was started", held=f"it was not ready after {options.start_timeout + SILENCE:.0f} s"
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
        self._refuse_when_lost()
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} was given", held="a request of this id is running", next="give another")
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
            if not stream.ended and self.failure is None:
                self._send(Abort([request_id]))

    def abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self._streams]
        for request_id in known:
            self._streams.pop(request_id).put(RequestUpdate(request_id, [], finish_reason="abort"))
        if known and self.failure is None:
            self._send(Abort(known))

    async def stats(self) -> Stats:
        self._refuse_when_lost()
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats.append(answer)
        self._send(GetStats())
        return await answer

    def on_failure(self, call: Callable[[PhalanxError], None]) -> None:
        self._calls.append(call)

    async def close(self, timeout: float = 10.0) -> None:
        """End the engine: as asked within `timeout` seconds, else killed. Open streams end with EngineClosed."""
        if not self._closing:
            self._closing = True
            self._lose(EngineClosed("the engine was shut down"))
            if timeout > 0 and self._child is not None and self._child.alive:
                self._send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._ended.wait()
        await self._end()

    def kill(self) -> None:
        """End the engine's process now, without an event loop; for when there is none any more."""
        if self._child is not None:
            launch.stop([self._child], 0.0)
        self._remove_folder()

    # ---- the process -----------------------------------------------------------------------------------------------------

    def _launch(self, executor: str) -> None:
        address = f"ipc://{self._folder}/engine"
        # Nothing is dropped: what is in flight is bounded by the requests.
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        config = {"address": address, "options": self.options.model_dump(), "executor": executor}
        self._child = launch.start("phalanx.engine", config, "phalanx engine")
        self._watch.add(self._child)
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._child_ended)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen_for_silence())]

    def _child_ended(self) -> None:
        for end in self._watch.ended():
            self._ended.set()
            if not self._closing:
                error = EngineError("a request was running", held=f"the engine process {end.words}", next="start it again")
                asyncio.get_running_loop().call_later(_LAST_WORDS, self._lose, error)

    async def _listen_for_silence(self) -> None:
        """Seconds count only while this loop runs: a laptop that slept has not heard an engine that slept with it either."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            self._silent, last = self._silent + min(now - last, 2.0), now
            if self._silent > SILENCE and self._started.done():
                self._lose(
                    EngineError(
                        "a request was running", held=f"the engine process has said nothing for {SILENCE:.0f} s", why=_STILL
                    )
                )
                return

    async def _end(self) -> None:
        """Make sure that the process is gone, then give everything back."""
        if self._child is not None:
            launch.stop([self._child], 0.0)
        loop = asyncio.get_running_loop()
        if not self._socket.closed:
            if self._watch.fileno() >= 0:
                loop.remove_reader(self._watch.fileno())
            self._watch.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._socket.close(linger=0)
            self._context.term()
        self._remove_folder()

    # ---- messages --------------------------------------------------------------------------------------------------------

    def _add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams) -> AddRequest:
        return build_request(request_id, token_ids, params, self.eos_token_ids)

    def _send(self, message: AddRequest | Abort | GetStats | Shutdown) -> None:
        # There is no high-water mark, so it is queued at once and the future is done.
        self._socket.send(self._encode(message))

    async def _read(self) -> None:
        """Each frame is a message of its own. The first is waited for; the others of its step are there with it."""
        decode, streams = self._decode, self._streams
        at_hand: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        while True:
            frame = await self._socket.recv()
            self._silent = 0.0
            if not self._heard:
                # Connected: the path has served. Nothing is left behind then, however this process ends.
                self._heard = True
                self._remove_folder()
            with contextlib.suppress(zmq.Again):
                while True:
                    message = decode(frame)
                    if type(message) is not RequestUpdate:
                        self._take(message)
                    elif (stream := streams.get(message.request_id)) is not None:
                        stream.put(message)
                    frame = at_hand.recv(_NOBLOCK)

    def _take(self, message: Any) -> None:
        """What is said once in a while; not the updates of each step."""
        match message:
            case RequestRejected(request_id=request_id, error=error) if request_id in self._streams:
                self._streams[request_id].fail(PhalanxError.from_wire(error))
            case Stats():
                self.latest = message
                for answer in self._stats:
                    if not answer.done():
                        answer.set_result(message)
                self._stats.clear()
            case Started(facts=facts):
                self.facts, self.eos_token_ids = facts, list(facts.eos_token_ids)
                if not self._started.done():
                    self._started.set_result(None)
            case Failed(error=error):
                self._lose(PhalanxError.from_wire(error))
            case _:
                pass  # a sign of life, a goodbye, or the refusal of a request that nobody waits for any more

    def _refuse_when_lost(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()

    def _lose(self, error: PhalanxError) -> None:
        """Nothing more comes: everybody who waits gets the error. The first one counts."""
        if self.failure is not None:
            return
        self.failure = error
        for stream in self._streams.values():
            stream.fail(error.copy())
        for answer in self._stats:
            if not answer.done():
                answer.set_exception(error.copy())
        self._stats.clear()
        starting = not self._started.done()
        if starting:
            self._started.set_exception(error.copy())
            self._started.exception()  # nobody may be waiting
        if not self._closing:
            if not starting:  # then it is raised to the one who starts it, and need not be said twice
                logger.error("%s", error)
            for call in self._calls:
                call(error)
            self._tasks.append(asyncio.create_task(self._end_lost(5.0 if self._silent < SILENCE else 0.0)))

    async def _end_lost(self, grace: float) -> None:
        """A failed engine ends itself, and its ranks with it; one that stands still does not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._ended.wait()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)


_STILL = "it is stopped, or its machine has no time for it"
_NO_FACTS = EngineFacts("", "", "", 0, (0, 0, 0), 0, 0, 0, 0, 0, 0, [])


def _private_folder() -> str:
    folder = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="phalanx-", dir=folder if len(os.fsencode(folder)) < _PATH_LIMIT else "/tmp")
