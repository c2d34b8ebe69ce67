# SPDX-License-Identifier: Apache-2.0
"""Responses that stop working when the client disconnects: a JSON body, or server-sent events that are written as they are made.

`CancellableResponse` and `EventStream` run the work and watch the connection. When the client disconnects, the work is cancelled,
and the engine aborts the requests behind it. Nothing is sent before the first event is there, so that a request that is rejected
late (the queue is full, the prompt is too long) still gets its own status; a later error becomes an event. A slow reader delays
only its own events: a write waits until the connection takes more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.serve.openai.api_errors import ApiError

ErrorToResponse = Callable[[BaseException], ApiError]
encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: Any) -> bytes:
    """One server-sent event with a JSON body."""
    return b"data: " + encode_json(data) + b"\n\n"


def chunks(head: dict[str, Any]) -> Callable[[dict[str, Any]], bytes]:
    """A function equal to event({**head, "choices": [choice]}) that encodes the common part only once."""
    before = b"data: " + encode_json(head)[:-1] + b',"choices":['
    return lambda choice: b"%b%b]}\n\n" % (before, encode_json(choice))


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
            response = Response(encode_json(await self._work), media_type="application/json")
        except Exception as error:
            response = self._error_to_response(error).response()
        await response(scope, receive, send)


class EventStream(Response):
    """Server-sent events: those of `events`, then an error event if they fail. `events` itself ends with DONE."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], error_to_response: ErrorToResponse) -> None:
        super().__init__(headers=_HEADERS)
        # Without a content-length the body is sent in chunks.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events, self._error_to_response = events, error_to_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            api_error = self._error_to_response(error)
            if not started:
                await api_error.response()(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": event(api_error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`. If the client disconnects first, cancel it and wait until it has ended."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        with suppress(asyncio.CancelledError):
            await working


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
