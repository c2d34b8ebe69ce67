# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol with a time for the head of a request and a time for its body.

uvicorn closes a connection that is idle after a response, but waits forever for the first request and for the rest of any request.
Here the head of a request must arrive within `header_seconds` of the connection (or of its first byte, on a connection that is kept
alive), and the body within `body_seconds` of the head; bytes that trickle in do not extend either. The answer is a 408, and the
connection is closed. While a response is computed or streamed, no time runs; nor while the server does not read a body that it
will read later (`large_bodies.gate`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx.serve.openai.api_errors import ApiError

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: TimedFlow = TimedFlow(transport)
        self._awaited = "head"
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._awaited is None and (self.cycle is None or self.cycle.response_complete):
            self._awaited = "head"
        super().data_received(data)
        self._watch()

    def on_headers_complete(self) -> None:
        self._awaited = "body"
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaited = None
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._awaited = None
        self._watch()
        super().connection_lost(exc)
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
            error = ApiError(408, f"{_WHAT[what]} did not arrive within {self.seconds[what]:g} s", code="request_timeout")
            body = msgspec.json.encode(error.body())
            head = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


def timed_protocol(*, header_seconds: float, body_seconds: float) -> type[TimedProtocol]:
    """The protocol with these times."""
    return type("TimedProtocol", (TimedProtocol,), {"seconds": {"head": header_seconds, "body": body_seconds}})
