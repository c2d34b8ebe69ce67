# SPDX-License-Identifier: Apache-2.0
"""Responses that stop working when the client disconnects: a JSON body, or server-sent events that are written as they are made.

`CancellableResponse` and `EventStream` run the work and watch the connection. When the client disconnects, the work is cancelled,
and the engine aborts the requests behind it. Nothing is sent before the first event is there, so that a request that is rejected
late (the queue is full, the prompt is too long) still gets its own status; a later error becomes an event. While a stream waits
long for an event, also for the first one, it gets comments that keep the connection alive. A slow reader delays only its own
events: a write waits until the connection takes more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.long_answers import PART, discard, encode_json, encode_parts, encode_small, entries_of, off_loop
from phalanx.serve.openai.schema.fields import StreamOptions

ErrorToResponse = Callable[[BaseException], ApiError]
SEND_BYTES = 2**17
"""Bytes of a body that are written at once. A connection takes megabytes at once, and the event loop would copy all of them."""
KEEP_ALIVE_SECONDS = 15.0
"""A stream without an event for so long gets a comment, before a proxy takes it for dead. Every client ignores comments."""
KEEP_ALIVE = b": ping\n\n"
Event = bytes | list[bytes | memoryview]
"""A server-sent event, or the parts of a long one."""

DONE = b"data: [DONE]\n\n"
SHORT_SEND = "phalanx.short_send"
"""The extension of the ASGI scope with a `send` that fewer layers wrap (`connections.middleware`), for a response that began."""
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class LastEvent:
    """Holds back the event in which the last choice of a response ends: nothing follows but the end, which is written with it.

    choices: of the response."""

    def __init__(self, choices: int) -> None:
        self._data: Event = b""
        self._running = choices

    def holds(self, choice: Mapping[str, Any], data: Event) -> bool:
        """Whether `data`, the event of `choice`, is kept rather than to be written now."""
        if choice["finish_reason"] is not None:
            self._running -= 1
        if self._running:
            return False
        self._data = data
        return True

    def with_end(self, usage: bytes) -> Event:
        """That event, then the one of the usage, if any, and the end."""
        end = usage + DONE
        return self._data + end if isinstance(self._data, bytes) else [*self._data, end]


def event(data: Any) -> bytes:
    """One server-sent event with a JSON body."""
    return b"data: " + encode_json(data) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    """The last event of a stream that an error ends; where the API's errors have a type, as its events have."""
    body = error.body()
    return (b"event: %b\n" % body["type"].encode() if "type" in body else b"") + event(body)


class Chunks:
    """The events of a response's choices. head: what they have in common, which is encoded only once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._before = b"data: " + encode_json(head)[:-1] + b',"choices":['

    def of(self, choice: dict[str, Any], usage: Mapping[str, Any] | None = None) -> bytes:
        """The event of a choice with at most PART entries. usage: that so far, if each event has it."""
        if usage is None:
            return b"%b%b]}\n\n" % (self._before, encode_small(choice))
        return b"%b%b%b" % (self._before, encode_small(choice), _after(usage))

    async def of_any(self, choice: dict[str, Any], usage: Mapping[str, Any] | None = None) -> Event:
        """The same of any choice, which nobody uses any more."""
        entries = entries_of(choice)
        if entries <= PART:
            return self.of(choice, usage)
        parts = await off_loop(encode_parts, choice, entries=entries)
        discard(choice)
        return [self._before, *parts, _after(usage)]


def _after(usage: Mapping[str, Any] | None) -> bytes:
    return b"]}\n\n" if usage is None else b'],"usage":%b}\n\n' % encode_small(usage)


async def choice_events(
    head: dict[str, Any], choices: AsyncGenerator[dict[str, Any], None], count: int, options: StreamOptions | None,
    usage_body: Callable[[], Any], is_short: Callable[[dict[str, Any]], bool],
) -> AsyncGenerator[Event, None]:  # fmt: skip
    """The events of the deltas of `count` choices, with their usage as the options want it.

    is_short: whether a delta has no logprobs: to count the entries of its few short lists takes longer than to encode them."""
    with_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    chunks, last = Chunks({**head, "usage": None} if with_usage and not continuous else head), LastEvent(count)
    async with aclosing(choices) as deltas:
        async for choice in deltas:
            so_far = usage_body() if continuous else None
            data = chunks.of(choice, so_far) if is_short(choice) else await chunks.of_any(choice, so_far)
            if not last.holds(choice, data):
                yield data
    yield last.with_end(event({**head, "choices": [], "usage": usage_body()}) if with_usage else b"")


class JsonBody(Response):
    """A JSON body in parts, which are sent one after the other."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, parts)))})
        self._parts = parts

    @classmethod
    async def of(cls, value: Any) -> JsonBody:
        """The body of a value, encoded off the event loop if it has many entries."""
        return cls(await off_loop(encode_parts, value, entries=entries_of(value)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _write_parts(send, self._parts, more=False)


async def _write_parts(send: Send, parts: Sequence[bytes | memoryview], *, more: bool = True) -> None:
    """Write parts of a body. After SEND_BYTES other streams go on: a connection that takes all of them at once never pauses."""
    unbroken = 0
    for number, part in enumerate(parts, 1):
        unbroken += len(part)
        if unbroken > SEND_BYTES:
            unbroken = len(part)
            await asyncio.sleep(0)
        await _write(send, part, more=more or number < len(parts))


async def _write(send: Send, data: bytes | memoryview, *, more: bool = True) -> None:
    """Write a part of a body; a long one in several, between which other streams go on. more: whether another part follows."""
    start = 0
    while len(data) - start > SEND_BYTES:
        await send({"type": "http.response.body", "body": bytes(data[start : start + SEND_BYTES]), "more_body": True})
        start += SEND_BYTES
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": bytes(data[start:] if start else data), "more_body": more})


class CancellableResponse(Response):
    """A JSON body that `work` returns, and that nobody else uses any more."""

    def __init__(self, work: Coroutine[Any, Any, Any], error_to_response: ErrorToResponse) -> None:
        super().__init__()
        self._work, self._error_to_response = work, error_to_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            body = await self._work
            response = await JsonBody.of(body)
            discard(body)
        except Exception as error:
            response = self._error_to_response(error).response()
        await response(scope, receive, send)


class EventStream(Response):
    """Server-sent events: those of `events`, then an error event if they fail.

    Several events may come as one text, and a long one in parts. One that ends with DONE is the last, and is written together with
    the end of the body.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], error_to_response: ErrorToResponse) -> None:
        super().__init__()
        self._events, self._error_to_response = events, error_to_response

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """The headers of every stream. Without a content-length the body is sent in chunks."""
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        write: Send = scope.get("extensions", {}).get(SHORT_SEND, {"send": send})["send"]
        started = False

        async def begin() -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def keep_alive() -> None:
            await begin()
            await write({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

        idle = _IdleTimer(keep_alive)
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    if idle.pause():
                        await idle.acted()
                    if not started:
                        await begin()
                    if not isinstance(data, bytes):
                        await _write_parts(write, data[:-1])
                        data = bytes(data[-1])
                    last = data.endswith(DONE)
                    if len(data) <= SEND_BYTES:
                        await write({"type": "http.response.body", "body": data, "more_body": not last})
                    else:
                        await _write(write, data, more=not last)
                    if last:
                        return
                    idle.go_on()
            if idle.pause():
                await idle.acted()
        except Exception as error:
            if idle.pause():
                await idle.acted()
            api_error = self._error_to_response(error)
            if not started:
                await api_error.response()(scope, receive, send)
                return
            await write({"type": "http.response.body", "body": _error_event(api_error), "more_body": False})
            return
        finally:
            idle.close()
        await write({"type": "http.response.body", "body": b"", "more_body": False})


class _IdleTimer:
    """Runs `act` whenever nothing has happened for KEEP_ALIVE_SECONDS."""

    def __init__(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._act, self._loop = act, asyncio.get_running_loop()
        self._acting: asyncio.Task[None] | None = None
        self.go_on()
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._look)

    def go_on(self) -> None:
        """Wait again, from now on."""
        self._since = self._loop.time()

    def pause(self) -> bool:
        """Not to act until `go_on`. Returns whether an act has begun, which must end first (`acted`)."""
        self._since = math.inf
        return self._acting is not None

    async def acted(self) -> None:
        acting, self._acting = self._acting, None
        if acting is not None:
            with contextlib.suppress(Exception):  # the connection is gone: the next write says so
                await acting

    def _look(self) -> None:
        left = self._since + KEEP_ALIVE_SECONDS - self._loop.time()
        if left <= 0 and (self._acting is None or self._acting.done()):
            self._acting = self._loop.create_task(self._act())
            self._since = self._loop.time()
        self._timer = self._loop.call_later(left if 0 < left < KEEP_ALIVE_SECONDS else KEEP_ALIVE_SECONDS, self._look)

    def close(self) -> None:
        self._timer.cancel()
        if self._acting is not None:
            self._acting.cancel()


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
