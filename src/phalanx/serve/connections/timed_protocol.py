# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol with a time for the head of a request and a time for its body, and a limit on the bytes of the head.

uvicorn closes a connection that is idle after a response, but waits forever for the first request and for the rest of any request.
Here the head of a request must arrive within `header_seconds` of the connection (or of its first byte, on a connection that is kept
alive), and the body within `body_seconds` of the head; bytes that trickle in do not extend either. The answer is a 408, and the
connection is closed. While a response is computed or streamed, no time runs; nor while the server does not read a body that it
will read later (`large_bodies.gate`).

The parser has no limit: 60 MB of one header held up every stream for 3 s, and 40 MB of short ones took 540 MB of memory. A head of
more than MAX_HEAD_BYTES, or as much around a body (trailers, extensions of chunks), is answered by a 431, and the connection is
closed. Nor has uvicorn's queue of pipelined requests: 8000 that came at once held up every stream for 1.6 s. Here MAX_PIPELINED are
answered, then the connection is closed; and when the client goes, all of them are told.

A connection that is closed while the client sends is reset by the kernel, and asynchronous clients then drop the answer that they
have received. So after an answer to a request that has not arrived as a whole, only the direction to the client is closed at first;
what still comes is read and dropped, until the client closes, or for LINGER_SECONDS, or up to LINGER_BYTES.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from phalanx.serve.openai.api_errors import ApiError

MAX_HEAD_BYTES = 2**16
MAX_PIPELINED = 64
"""Requests of one connection that wait for the responses to those before them."""
FRAMING = 16
"""Bytes around each byte of a body: chunks may be short."""
MIN_EXTENSION_SECONDS = 0.01
LINGER_SECONDS = 2.0
"""For the rest of a request that is answered already: a body of 32 MiB over 150 Mbit/s. The connection keeps its descriptor
meanwhile, so a slow sender must not extend this time."""
LINGER_BYTES = 2**26
"""Eight times the largest body that is accepted. To drop so much takes tens of milliseconds of the event loop."""
_WHAT = {"head": "the head of the request", "body": "the body of the request"}


class TimedFlow(FlowControl):
    """Flow control that knows for how long the server has not read."""

    _paused_at: float | None = None
    _paused_before = 0.0

    def pause_reading(self) -> None:
        super().pause_reading()
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume_reading(self) -> None:
        super().resume_reading()
        self._paused_before, self._paused_at = self.paused_seconds, None

    @property
    def paused_seconds(self) -> float:
        return self._paused_before + (0.0 if self._paused_at is None else time.monotonic() - self._paused_at)


class ResponseTransport(asyncio.Transport):
    """What the responses of a connection are written to. close_connection: None once it is lost. ended: nothing may follow."""

    ended = False

    def __init__(self, transport: asyncio.Transport, close_connection: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self.close_connection: Callable[[], None] | None = close_connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self.ended or self._transport.is_closing()

    def close(self) -> None:
        if self.close_connection is not None:
            self.close_connection()


class TimedProtocol(HttpToolsProtocol):
    """One connection. `timed_protocol` makes a class with the two times. lost: called with this object once it is closed."""

    seconds: dict[str, float] = {}  # noqa: RUF012 (replaced by a subclass)
    lost: Callable[[TimedProtocol], None] = staticmethod(lambda _: None)

    _awaited: str | None = None  # "head", "body", or "rest": of a request that is answered already, to be dropped
    _timed: str | None = None  # what the timer waits for
    _timer: asyncio.TimerHandle | None = None
    _paused_seconds = 0.0  # until the timer began, or was extended
    _received = _body_bytes = 0  # of the request that arrives
    _refused = False  # nothing of what arrives is read any more
    _running: RequestResponseCycle | None = None  # the request that is being answered; `cycle` is the latest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: TimedFlow = TimedFlow(transport)
        self._responses = ResponseTransport(transport, self._close)
        self._awaited = "head"
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._awaited == "rest":
            self._received += len(data)
            if self._received > LINGER_BYTES:
                self.transport.close()
            return
        if self._awaited is None and (self.cycle is None or self.cycle.response_complete):
            self._awaited = "head"
        if self._refused:
            return
        self._received += len(data)
        super().data_received(data)
        if self._awaited is not None and self._received - self._body_bytes > MAX_HEAD_BYTES + FRAMING * self._body_bytes:
            self._refuse_head()
        self._watch()

    def on_message_begin(self) -> None:
        if self._refused:
            return
        self._received = self._body_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refused = True
            self.cycle.keep_alive = False  # of the last one that is queued: its response closes the connection
            raise ValueError("too many pipelined requests")  # ends the parser
        super().on_message_begin()

    def send_400_response(self, msg: str) -> None:
        """The parser has failed, and reads no more."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self._may_answer():
            self._answer(ApiError(400, "what was sent is not a valid HTTP request", code="invalid_http"))
        elif self._awaited != "body":  # requests before it are being answered; the response to the last one closes the connection
            self.cycle.keep_alive = False
            return
        self._close()

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        self._awaited = "body"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._awaited = None
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._awaited == "rest":
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.pipeline:  # what is queued comes first
            self.flow.pause_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running, cycle.transport = cycle, self._responses
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._awaited = None
        self._watch()
        super().connection_lost(exc)
        self._responses.close_connection = None
        self._tell_requests()
        self.lost(self)

    def _tell_requests(self) -> None:
        """Nobody reads the responses any more."""
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _close(self) -> None:
        """Close the connection, and read first what the client is still sending: the module says why."""
        partial = self._awaited == "body" or (self._awaited == "head" and self.scope is not None)
        if self._awaited == "rest":
            return
        if self.transport.is_closing() or not (partial or self._refused or self.pipeline) or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._awaited, self._refused, self._received = "rest", True, 0
        self._responses.ended = True
        self._tell_requests()
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client is gone, and `connection_lost` follows
            self.transport.write_eof()
        self._watch()

    def _watch(self) -> None:
        """Let the timer wait for what is awaited now."""
        if self._timed == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = self._awaited
        if self._awaited is not None:
            self._paused_seconds = self.flow.paused_seconds
            self._timer = self.loop.call_later(self.seconds.get(self._awaited, LINGER_SECONDS), self._late)

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        if self._timed == "rest":
            self.transport.close()
            return
        paused = self.flow.paused_seconds
        if self._timed == "body" and paused > self._paused_seconds:
            self._timer = self.loop.call_later(max(paused - self._paused_seconds, MIN_EXTENSION_SECONDS), self._late)
            self._paused_seconds = paused
            return
        began = self._timed == "body" or self.scope is not None
        if began and self._may_answer():
            what = self._timed or ""
            self._answer(ApiError(408, f"{_WHAT[what]} did not arrive within {self.seconds[what]:g} s", code="request_timeout"))
        self._close()

    def _refuse_head(self) -> None:
        """The request is too large beside its body."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self._may_answer():
            message = f"the head of the request, or what is sent around its body, has more than {MAX_HEAD_BYTES} bytes"
            self._answer(ApiError(431, message, code="request_header_too_large"))
        self._close()

    def _may_answer(self) -> bool:
        """Whether an error is the response to the request that arrives: no other is in progress, nor its own."""
        if self._awaited == "body":
            return self._running is self.cycle and not self.cycle.response_started
        return self.cycle is None or self.cycle.response_complete

    def _answer(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(status + head + body)


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The application for a client of HTTP/1.0, which knows no chunks: the end of the connection ends a body."""
    cycle.chunked_encoding = False

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_as_it_is(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body":  # uvicorn compares each part with what it expects
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_as_it_is)

    return answer


def timed_protocol(*, header_seconds: float, body_seconds: float) -> type[TimedProtocol]:
    """The protocol with these times."""
    return type("TimedProtocol", (TimedProtocol,), {"seconds": {"head": header_seconds, "body": body_seconds}})
