# SPDX-License-Identifier: Apache-2.0
"""Connections beyond the limit wait, or are refused; none is dropped."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.serve.connections import accept
from phalanx.serve.connections.accept import Acceptor
from phalanx.serve.connections.listen import bind


class Echo(asyncio.Protocol):
    """What `Acceptor` knows of a TimedProtocol."""

    seconds: dict[str, float] = {}  # noqa: RUF012 (as of TimedProtocol)
    app: Any = None
    transport: Any = None
    lost: Callable[[Any], None]

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data if self.app is None else b"refused")

    def connection_lost(self, error: Exception | None) -> None:
        self.lost(self)


class Exhausted(socket.socket):
    """A listener whose process has no descriptors for the first connections."""

    failures = 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"x")
    return await asyncio.wait_for(reader.read(100), 10)


def test_connections_beyond_the_limit_wait_until_others_close(monkeypatch, caplog):
    monkeypatch.setattr(accept, "max_connections", lambda: 2)
    monkeypatch.setattr(accept, "max_accepted", lambda: 3)
    (listener,) = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]

    async def scenario() -> None:
        acceptor = Acceptor([listener], Echo)
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        assert [await says(*client) for client in clients[:3]] == [b"x", b"x", b"refused"]
        clients[3][1].write(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(clients[3][0].read(1), 0.2)
        assert acceptor.count == 3
        clients[2][1].close()
        assert await asyncio.wait_for(clients[3][0].read(7), 10) == b"refused"
        for client in clients[:2]:
            client[1].close()
        assert await says(*clients[4]) == b"x"
        acceptor.close()
        for client in clients:
            client[1].close()

    asyncio.run(scenario())
    listener.close()
    assert "connections wait: 3 are open" in caplog.text


def test_a_process_without_descriptors_tries_again(caplog):
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)

    async def scenario() -> None:
        acceptor = Acceptor([listener], Echo)
        client = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        assert await says(*client) == b"x"
        client[1].close()
        acceptor.close()

    asyncio.run(scenario())
    listener.close()
    assert listener.failures == 0
    assert "no more can be accepted: Too many open files" in caplog.text


def test_a_connection_that_is_closed_is_freed_without_the_garbage_collector():
    (listener,) = bind("127.0.0.1", 0)
    protocols: list[weakref.ref[Echo]] = []

    def make() -> Echo:
        protocol = Echo()
        protocols.append(weakref.ref(protocol))
        return protocol

    async def scenario() -> None:
        acceptor = Acceptor([listener], make)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        assert await says(reader, writer) == b"x"
        writer.close()
        while acceptor.count:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [protocol() for protocol in protocols] == [None]
        acceptor.close()

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
        listener.close()
