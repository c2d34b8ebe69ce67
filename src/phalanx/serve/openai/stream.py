# SPDX-License-Identifier: Apache-2.0
"""Responses that stop working when the client disconnects: a JSON body, or server-sent events that are written as they are made.

`CancellableResponse` and `EventStream` run the work and watch the connection. When the client disconnects, the work is cancelled,
and the engine aborts the requests behind it. Nothing is sent before the first event is there, so that a request that is rejected
late (the queue is full, the prompt is too long) still gets its own status; a later error becomes an event. A slow reader delays
only its own events: a write waits until the connection takes more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.serve.openai.api_errors import ApiError

ErrorToResponse = Callable[[BaseException], ApiError]
PART = 256
"""Entries of a list (tokens with logprobs) that are encoded, or made, at once: a few milliseconds, in which no stream goes on."""
_DEPTH = 6  # how deep the lists of an answer lie

Result = TypeVar("Result")

encode_small = msgspec.json.Encoder().encode
# One thread: several would take the interpreter lock from each other before the event loop gets it.
_long_answers = ThreadPoolExecutor(1, thread_name_prefix="long answers")

DONE = b"data: [DONE]\n\n"
SHORT_SEND = "phalanx.short_send"
"""The extension of the ASGI scope with a `send` that fewer layers wrap (`connections.door`), for a response that has begun."""
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class LastEvent:
    """Holds back the event in which the last choice of a response ends: nothing follows but the end, which is written with it.

    data: that event; empty before. choices: of the response."""

    def __init__(self, choices: int) -> None:
        self.data, self._running = b"", choices

    def holds(self, choice: Mapping[str, Any], data: bytes) -> bool:
        """Whether `data`, the event of `choice`, is kept rather than to be written now."""
        if choice["finish_reason"] is not None:
            self._running -= 1
        if self._running:
            return False
        self.data = data
        return True


async def off_loop(work: Callable[..., Result], *args: Any, entries: int) -> Result:
    """`work(*args)`, on a thread if it is about many entries."""
    if entries <= PART:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_long_answers, partial(work, *args))


def encode_json(value: Any) -> bytes:
    """JSON. A long answer is encoded in parts, between which another thread may take the interpreter lock."""
    return encode_small(value) if entries_of(value) <= PART else b"".join(_parts(value))


def entries_of(value: Any, depth: int = _DEPTH) -> int:
    """The entries of all lists in an answer; it stops counting where there are more than PART."""
    count = 0
    if isinstance(value, dict) and depth > 0:
        for inner in value.values():
            if isinstance(inner, (dict, list)):  # every event of a stream comes here, and most have nothing but texts
                count += entries_of(inner, depth - 1)
                if count > PART:
                    break
    elif isinstance(value, list):
        count = len(value)
        for inner in value:
            if count > PART or depth <= 0 or not isinstance(inner, (dict, list)):
                break
            count += entries_of(inner, depth - 1)
    return count


def _parts(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """The JSON of a value in pieces, each of which has few entries."""
    if entries_of(value, depth) <= PART:
        yield encode_small(value)
    elif isinstance(value, dict):
        for number, (name, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + encode_small(name) + b":"
            yield from _parts(inner, depth - 1)
        yield b"}"
    elif isinstance(value[0], dict) and entries_of(value[0], depth - 1) > PART // 2:
        for number, inner in enumerate(value):
            yield b"," if number else b"["
            yield from _parts(inner, depth - 1)
        yield b"]"
    else:
        for start in range(0, len(value), PART):
            yield (b"," if start else b"[") + encode_small(value[start : start + PART])[1:-1]
        yield b"]"


def event(data: Any) -> bytes:
    """One server-sent event with a JSON body."""
    return b"data: " + encode_json(data) + b"\n\n"


def chunks(head: dict[str, Any]) -> Callable[..., bytes]:
    """A function equal to event({**head, "choices": [choice]}) that encodes the common part only once.

    Its second argument encodes the choice: `encode_small` where the caller has counted at most PART entries already."""
    before = b"data: " + encode_json(head)[:-1] + b',"choices":['

    def chunk(choice: dict[str, Any], encode: Callable[[Any], bytes] = encode_json) -> bytes:
        return b"%b%b]}\n\n" % (before, encode(choice))

    return chunk


class CancellableResponse(Response):
    """A JSON body that `work` returns."""

    media_type = "application/json"

    def __init__(self, work: Coroutine[Any, Any, Any], error_to_response: ErrorToResponse) -> None:
        super().__init__()
        self._work, self._error_to_response = work, error_to_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._work
            content = await off_loop(encode_json, body, entries=entries_of(body))
            response = Response(content, media_type="application/json")
        except Exception as error:
            response = self._error_to_response(error).response()
        await response(scope, receive, send)


class EventStream(Response):
    """Server-sent events: those of `events`, then an error event if they fail.

    Several events may come as one text. One that ends with DONE is the last, and is written together with the end of the body.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], error_to_response: ErrorToResponse) -> None:
        super().__init__()
        self._events, self._error_to_response = events, error_to_response

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """The headers of every stream. Without a content-length the body is sent in chunks."""
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        write: Send = scope.get("extensions", {}).get(SHORT_SEND, {"send": send})["send"]
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    if data.endswith(DONE):
                        await write({"type": "http.response.body", "body": data, "more_body": False})
                        return
                    await write({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            api_error = self._error_to_response(error)
            if not started:
                await api_error.response()(scope, receive, send)
                return
            await write({"type": "http.response.body", "body": event(api_error.body()), "more_body": False})
            return
        await write({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in this task. If the client disconnects first, cancel it as asyncio.timeout does, and return when it has ended."""
    task = asyncio.current_task()
    assert task is not None
    disconnected = ended = False

    def cancel(watching: asyncio.Task[None]) -> None:
        nonlocal disconnected
        if not ended and not watching.cancelled():
            disconnected = task.cancel()

    watching = asyncio.create_task(_disconnected(receive))
    watching.add_done_callback(cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not disconnected or task.cancelling() > 1:
            raise
    finally:
        ended = True
        watching.cancel()
        if disconnected:
            task.uncancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
