# SPDX-License-Identifier: Apache-2.0
"""`LargeBodies`: the processes that read the large bodies of a server (see `worker`), and what they made of each.

The event loop and what parses a body in a thread beside it take turns at one interpreter lock, and at the cores of a loaded
machine: eight megabytes of token ids held up every stream for 0.2 to 1.5 s. A process of a lower priority takes only what the
streams leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from phalanx.comm import launch
from phalanx.errors import EngineClosed, EngineError
from phalanx.log import get_logger
from phalanx.serve.openai.body import parse
from phalanx.serve.openai.large_bodies import messages
from phalanx.serve.openai.large_bodies.messages import (
    ApiErrorMessage,
    Job,
    Prepared,
    ResponseBody,
    Setup,
    Stored,
    TextCount,
    WantedConversation,
    WantedItem,
)
from phalanx.serve.openai.prepare import PreparedChat, PreparedCompletion, PreparedResponse
from phalanx.serve.openai.prompt_context import PromptContext
from phalanx.serve.openai.request_params import StructuredOutputField
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.responses_request import ResponsesRequest
from phalanx.serve.openai.threads import Threads

logger = get_logger(__name__)
T = TypeVar("T")

FEW_CORES = 4
PROCESSES = 1 if (os.cpu_count() or 1) <= FEW_CORES else 2
"""The second starts when a body comes while the first one reads another. On few cores it would take the streams' time."""
MAX_WAITING = 64
"""Bodies that are read or wait for it; each has up to 8 MiB."""
NICE = 10
"""How much lower their priority is than the server's, from their start on: importing takes a second of a core."""
_START_SECONDS = 120.0
_ASK_SECONDS = 0.5
"""How often a thread that waits for the event loop looks whether the server has ended."""
_READ_SECONDS = 120.0
"""Of one body. The largest takes a second of a core, and a machine may be busy."""

Accepted = Callable[[str], None]
StoredLookup = Callable[[WantedItem | WantedConversation], Stored]


class LargeBodies:
    """The processes of one server, started when they are needed. setup: describes its engine; refused: counts a refusal."""

    def __init__(self, setup: Callable[[], Setup], *, refused: Callable[[str], None], accepted: Accepted) -> None:
        self._setup, self._accepted = setup, accepted
        self._threads = Threads("large bodies", PROCESSES, max_tasks=MAX_WAITING, refused=refused)
        self._idle: list[_ReaderProcess] = []
        self._busy: set[_ReaderProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def completion(self, body: Sequence[bytes]) -> PreparedCompletion:
        """A request of /v1/completions. body: its parts. This and the others raise ApiError and Overloaded."""
        return await self._run("completion", body, lambda reply: completion_of(_prepared(reply)))

    async def chat(self, body: Sequence[bytes]) -> PreparedChat:
        """A request of /v1/chat/completions."""
        return await self._run("chat", body, lambda reply: chat_of(_prepared(reply), _prepared(reply).request))

    async def response(self, body: Sequence[bytes], lookup: StoredLookup) -> PreparedResponse:
        """A request of /v1/responses. lookup: finds what is stored; called on the event loop."""
        return await self._run("response", body, lambda reply: response_of(_prepared(reply)), lookup)

    async def answer(self, route: str, body: Sequence[bytes]) -> memoryview:
        """The body of the answer of /tokenize or /detokenize (its name without the slash)."""
        return await self._run(route, body, _content)

    async def warm_up(self, count: int = PROCESSES) -> None:
        """Start processes before a large body needs one: on a busy machine, starting a program holds up the streams, too."""
        await asyncio.gather(*(self._threads.run(self._start) for _ in range(count)))

    def _start(self) -> None:
        self._keep(_ReaderProcess(messages.encode(self._setup())))

    def close(self) -> None:
        """End the processes. Threads that wait for one of them end with it, or the interpreter would wait for these."""
        self._threads.close()
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
            for process in self._busy:
                process.kill()
        for process in idle:
            process.end()

    async def _run(
        self, route: str, body: Sequence[bytes], convert: Callable[[ResponseBody | Prepared], T], lookup: StoredLookup | None = None
    ) -> T:  # fmt: skip
        loop = asyncio.get_running_loop()

        async def look(wanted: WantedItem | WantedConversation) -> Stored:
            assert lookup is not None
            return lookup(wanted)

        def ask(wanted: WantedItem | WantedConversation) -> Stored:
            answer = asyncio.run_coroutine_threadsafe(look(wanted), loop)
            while not self._closed:  # a loop that has ended answers nothing
                with contextlib.suppress(TimeoutError):
                    return answer.result(_ASK_SECONDS)
            raise EngineClosed("the server was shut down")

        accepted, result = await self._threads.run(partial(self._read, route, body, convert, ask))
        for field in accepted:
            self._accepted(field)
        return result

    def _read(
        self, route: str, body: Sequence[bytes], convert: Callable[[ResponseBody | Prepared], T], ask: StoredLookup
    ) -> tuple[list[str], T]:  # fmt: skip
        process = self._process()
        with self._lock:
            self._busy.add(process)
            closed = self._closed
        try:
            if closed:
                raise EngineClosed("the server was shut down")
            reply = process.read(route, body, ask)
        except BaseException:
            process.end()
            raise
        finally:
            with self._lock:
                self._busy.discard(process)
        self._keep(process)
        if isinstance(reply, ApiErrorMessage):
            raise reply.error()
        return reply.accepted, convert(reply)

    def _process(self) -> _ReaderProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                process.end()
        return _ReaderProcess(messages.encode(self._setup()))

    def _keep(self, process: _ReaderProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.end()


class _ReaderProcess:
    """One process. setup: what it is told first."""

    def __init__(self, setup: bytes) -> None:
        begin = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="phalanx-bodies-"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "socket"))
                listener.listen(1)
                listener.settimeout(0.2)
                config = {"socket": str(folder / "socket")}
                self._child = launch.start("phalanx.serve.openai.large_bodies.worker", config, "phalanx large bodies")
                launch.set_nice(self._child.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
                self._connection = self._accept(listener, begin)
            self._connection.settimeout(_READ_SECONDS)
            messages.send(self._connection, setup)
        except BaseException:
            if hasattr(self, "_connection"):
                self._connection.close()
            if hasattr(self, "_child"):
                self.kill()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        logger.info("a process for large bodies is ready, %.1f s after its start", time.monotonic() - begin)

    def _accept(self, listener: socket.socket, begin: float) -> socket.socket:
        while True:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            if not self._child.alive or time.monotonic() > begin + _START_SECONDS:
                problem = "ended" if not self._child.alive else f"did not connect within {_START_SECONDS:g} s"
                raise EngineError(f"the process for large bodies {problem} at its start", next="see its log above")

    @property
    def alive(self) -> bool:
        return self._child.alive

    def read(self, route: str, body: Sequence[bytes], ask: StoredLookup) -> ResponseBody | Prepared | ApiErrorMessage:
        """What it makes of a body. Raises EngineError if it ends, or takes too long; then it must be ended."""
        problem = "failed"
        try:
            messages.send(self._connection, messages.encode(Job(route)))
            messages.send(self._connection, *body)
            while (frame := messages.receive(self._connection)) is not None:
                reply = messages.decode_reply(frame)
                if not isinstance(reply, (WantedItem, WantedConversation)):
                    return reply
                stored = ask(reply)
                messages.send(self._connection, messages.encode(TextCount(len(stored.texts), stored.refused)))
                for text in stored.texts:
                    messages.send(self._connection, text)
        except TimeoutError:
            problem = f"took longer than {_READ_SECONDS:g} s"
        except OSError:
            pass
        raise EngineError(f"the process that reads large requests {problem} on this one", next="send a smaller request")

    def end(self) -> None:
        """End it at once."""
        self._connection.close()
        self.kill()

    def kill(self) -> None:
        """The same while a thread reads from it, which then closes the connection. From any thread."""
        launch.stop([self._child], 0.0)


def setup_of(context: PromptContext, names: Sequence[str]) -> Setup:
    """What a process is told of an engine."""
    tokenizer, output = context.tokenizer, context.output
    return Setup(
        names=list(names), facts=context.facts, tokenizer=tokenizer.text, special=tokenizer.special,
        templates=tokenizer.chat_templates, origin=tokenizer.origin, reasoning=output.reasoning, tools=output.tools,
        markers=output.markers.special, escape_special_tokens=context.escape_special_tokens,
    )  # fmt: skip


def completion_of(reply: Prepared) -> PreparedCompletion:
    token_ids = [messages.unpacked(one) for one in reply.token_ids]
    request = parse(reply.request, CompletionRequest)
    return PreparedCompletion(request, reply.params, _field(reply), reply.texts or token_ids, token_ids)


def chat_of(reply: Prepared, request: bytes) -> PreparedChat:
    return PreparedChat(parse(request, ChatRequest), reply.params, _field(reply), messages.unpacked(reply.token_ids[0]))


def response_of(reply: Prepared) -> PreparedResponse:
    assert reply.items is not None
    return PreparedResponse(parse(reply.request, ResponsesRequest), reply.items, chat_of(reply, reply.chat))


def _prepared(reply: ResponseBody | Prepared) -> Prepared:
    assert isinstance(reply, Prepared)
    return reply


def _content(reply: ResponseBody | Prepared) -> memoryview:
    assert isinstance(reply, ResponseBody)
    return reply.content


def _field(reply: Prepared) -> StructuredOutputField | None:
    if reply.structured_output is None:
        return None
    return StructuredOutputField(reply.structured_output, str(reply.param))
