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
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from phalanx.serve.openai.api_errors import ApiError

MAX_HEAD_BYTES = 2**16
MAX_PIPELINED = 64
"""Requests of one connection that wait for the responses to those before them."""
FRAMING = 16
"""Bytes around each byte of a body: chunks may be short."""
MIN_EXTENSION_SECONDS = 0.01
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


class TimedProtocol(HttpToolsProtocol):
    """One connection. `timed_protocol` makes a class with the two times. lost: called with this object once it is closed."""

    seconds: dict[str, float] = {}  # noqa: RUF012 (replaced by a subclass)
    lost: Callable[[TimedProtocol], None] = staticmethod(lambda _: None)

    _awaited: str | None = None  # "head" or "body"
    _timed: str | None = None  # what the timer waits for
    _timer: asyncio.TimerHandle | None = None
    _paused_seconds = 0.0  # until the timer began, or was extended
    _received = _body_bytes = 0  # of the request that arrives
    _refused = False  # nothing of what arrives is read any more
    _running: RequestResponseCycle | None = None  # the request that is being answered; `cycle` is the latest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: TimedFlow = TimedFlow(transport)
        self._awaited = "head"
        self._watch()

    def data_received(self, data: bytes) -> None:
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
        self._received = self._body_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refused = True
            self.cycle.keep_alive = False  # of the last one that is queued: its response closes the connection
            raise ValueError("too many pipelined requests")  # ends the parser
        super().on_message_begin()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
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
        self._awaited = None
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:  # what is queued comes first
            self.flow.pause_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._awaited = None
        self._watch()
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.lost(self)

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
            self._timer = self.loop.call_later(self.seconds[self._awaited], self._late)

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        paused = self.flow.paused_seconds
        if self._timed == "body" and paused > self._paused_seconds:
            self._timer = self.loop.call_later(max(paused - self._paused_seconds, MIN_EXTENSION_SECONDS), self._late)
            self._paused_seconds = paused
            return
        began = self._timed == "body" or self.scope is not None
        responds = self._timed == "body" and self.cycle is not None and self.cycle.response_started
        if began and not responds:
            what = self._timed or ""
            self._answer(ApiError(408, f"{_WHAT[what]} did not arrive within {self.seconds[what]:g} s", code="request_timeout"))
        self.transport.close()

    def _refuse_head(self) -> None:
        """The request is too large beside its body."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is None or self.cycle.response_complete or (self._awaited == "body" and not self.cycle.response_started):
            message = f"the head of the request, or what is sent around its body, has more than {MAX_HEAD_BYTES} bytes"
            self._answer(ApiError(431, message, code="request_header_too_large"))
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(status + head + body)


def timed_protocol(*, header_seconds: float, body_seconds: float) -> type[TimedProtocol]:
    """The protocol with these times."""
    return type("TimedProtocol", (TimedProtocol,), {"seconds": {"head": header_seconds, "body": body_seconds}})
