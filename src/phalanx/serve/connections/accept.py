# SPDX-License-Identifier: Apache-2.0
"""Accept connections as long as the limit of open files leaves descriptors for them.

libuv accepts and closes what comes beyond the limit: clients see a reset, and no log says why. Here the connections beyond it stay
in the backlog of the kernel until others have closed. Between the connections that are served and the limit there are some that
are accepted to be refused, with a 503.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp

from phalanx.serve.connections.descriptors import OncePerPeriod, Refusal, max_accepted, max_connections
from phalanx.serve.connections.timed_protocol import TimedProtocol

REFUSAL_SECONDS = 5.0
"""In which the request of a connection that is refused must arrive: others wait for its descriptor."""
_AT_ONCE = 16  # connections that are accepted between two other events of the loop
_RETRY_SECONDS = 0.1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts the connections of `listeners`, which listen already, from now on. make_protocol: for each of them."""

    def __init__(self, listeners: Sequence[socket.socket], make_protocol: Callable[[], TimedProtocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners, self._make_protocol = listeners, make_protocol
        self._served, self._accepted = max_connections(), max_accepted()
        self._refusal: ASGIApp = Refusal(self._served, lambda: self.count)
        self._log = OncePerPeriod()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[TimedProtocol] = set()
        self._paused, self._closed = True, False
        self._resume()

    @property
    def count(self) -> int:
        """Connections that are open."""
        return len(self._open)

    def close(self) -> None:
        """Accept no more. The listeners are closed by their owner."""
        self._pause()
        self._closed = True

    async def wait_closed(self) -> None:
        """For uvicorn, which calls it for each of its servers."""

    def _resume(self) -> None:
        if self._paused and not self._closed and self.count < self._accepted:
            self._paused = False
            for listener in self._listeners:
                self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            for listener in self._listeners:
                self._loop.remove_reader(listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if self._paused:
                return
            if self.count >= self._accepted:
                self._exhausted("connections wait: %d are open, and the limit of open files leaves no more; raise it (ulimit -n)")
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._exhausted(f"connections wait: %d are open, and no more can be accepted: {error.strerror}; see ulimit -n")
                self._loop.call_later(_RETRY_SECONDS, self._resume)
                return
            self._begin(connection)

    def _exhausted(self, text: str) -> None:
        self._pause()
        self._log.warning(text, self.count)

    def _begin(self, connection: socket.socket) -> None:
        protocol = self._make_protocol()
        protocol.lost = self._lost
        self._open.add(protocol)
        if self.count > self._served:
            protocol.app = self._refusal
            protocol.seconds = dict.fromkeys(protocol.seconds, REFUSAL_SECONDS)
        task = self._loop.create_task(self._connect(protocol, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, protocol: TimedProtocol, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client is gone
            connection.close()
            self._lost(protocol)

    def _lost(self, protocol: TimedProtocol) -> None:
        self._open.discard(protocol)
        if self._paused:
            self._loop.call_soon(self._resume)  # its descriptor is closed after this
