# SPDX-License-Identifier: Apache-2.0
"""The engine's socket with peers of every kind, without ranks."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from phalanx.executor import protocol
from phalanx.executor.cluster_keys import ClusterKeys
from phalanx.executor.peer_authentication import PeerAuthenticator
from phalanx.executor.rank_executor import bind_tcp

TOKEN = "a token of sixteen bytes or more"
LARGEST = 100_000
PEERS = [b"node-1", b"rank-0", b"rank-1", b"heartbeat-rank-1"]


class EngineSocket:
    """The socket of an engine: `received` are the (sender, message) that its peers sent."""

    def __init__(self, folder: Path, keys: ClusterKeys | None) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self.folder = f"ipc://{folder}/ranks"
        self.router.bind(self.folder)
        self.peers = PeerAuthenticator(keys, PEERS)
        self.peers.listen(self.context, self.router)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.received: list[tuple[bytes | None, bytes]] = []

    def receive(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            if self.router.poll(10):
                frames = self.router.recv_multipart(copy=False)
                self.received.append((self.peers.sender(frames), frames[-1].bytes))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineSocket]:
    engine = EngineSocket(tmp_path, ClusterKeys(TOKEN))
    yield engine
    engine.router.close()
    engine.context.term()


@pytest.fixture
def connect() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    context: zmq.Context[Any] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def connect(address: str, identity: bytes, token: str | None = TOKEN, name: bytes | None = None) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        if token is not None:
            ClusterKeys(token).secure_client(socket, (name or identity).decode())
        socket.connect(address)
        socket.send(b"hello")
        sockets.append(socket)
        return socket

    yield connect
    for peer in sockets:
        peer.close(linger=0)
    context.term()


Connect = Callable[..., "zmq.Socket[bytes]"]


def test_peers_with_the_token_and_those_of_this_host_are_known(engine: EngineSocket, connect: Connect) -> None:
    connect(engine.address, b"node-1")
    connect(engine.folder, b"rank-0", None)
    engine.receive(10, lambda: len(engine.received) == 2)
    assert sorted(engine.received) == [(b"node-1", b"hello"), (b"rank-0", b"hello")]


@pytest.mark.parametrize(
    ("identity", "token", "name"),
    [(b"node-1", None, None), (b"rank-1", "another token of sixteen bytes", None), (b"rank-1", TOKEN, b"rank-7")],
)
def test_no_message_of_a_stranger_arrives(
    engine: EngineSocket, connect: Connect, identity: bytes, token: str | None, name: bytes | None
) -> None:
    connect(engine.address, identity, token, name)
    engine.receive(1.0)
    assert engine.received == []


def test_a_peer_under_the_name_of_another_is_dropped(
    engine: EngineSocket, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    peer = connect(engine.address, b"rank-1", TOKEN, b"node-1")
    peer.send(b"again")
    engine.receive(10, lambda: len(engine.received) == 2)
    assert engine.received == [(None, b"hello"), (None, b"again")]
    assert caplog.messages == ["messages of the peer 'node-1' are dropped: it calls itself 'rank-1'"]


def test_the_first_holder_of_an_identity_stays(engine: EngineSocket, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    first = connect(engine.address, b"node-1")
    engine.receive(10, lambda: bool(engine.received))
    connect(engine.address, b"node-1")
    engine.receive(0.5)
    first.send(b"again")
    engine.receive(10, lambda: len(engine.received) == 2)
    assert engine.received == [(b"node-1", b"hello"), (b"node-1", b"again")]
    assert caplog.messages == ["a second node-1, at 127.0.0.1, was refused: the first one is at 127.0.0.1"]
    assert engine.peers.closed() == []


def test_only_the_end_of_a_peers_connection_counts(engine: EngineSocket, connect: Connect) -> None:
    peer = connect(engine.address, b"node-1")
    engine.receive(10, lambda: bool(engine.received))
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x01\x7f" + bytes(200)):
        with socket.create_connection(("127.0.0.1", engine.port)) as connection, contextlib.suppress(OSError):
            connection.sendall(junk)
    stranger = connect(engine.address, b"node-1", None)
    engine.receive(0.5)
    stranger.close(linger=0)
    engine.receive(0.5)
    assert engine.peers.closed() == []
    peer.close()
    names: list[str] = []
    engine.receive(5, lambda: bool(names.extend(engine.peers.closed()) or names))
    assert names == ["node-1"]
    connect(engine.address, b"node-1")
    engine.receive(10, lambda: len(engine.received) == 2)
    assert engine.received[1:] == [(b"node-1", b"hello")], "its identity is free again"


def test_a_frame_beyond_the_limit_ends_its_connection_alone(engine: EngineSocket, connect: Connect) -> None:
    large, small = connect(engine.address, b"rank-1"), connect(engine.address, b"node-1")
    engine.receive(10, lambda: len(engine.received) == 2)
    large.send(bytes(LARGEST + 1))
    small.send(bytes(LARGEST - 100))
    engine.receive(2.0)
    assert engine.received[2:] == [(b"node-1", bytes(LARGEST - 100))]


def test_bytes_that_are_sent_again_are_nothing(engine: EngineSocket, connect: Connect) -> None:
    """A relay records what a peer sends, and sends it again in a connection of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", b"node-1")
        inner, outer = listener.accept()[0], socket.create_connection(("127.0.0.1", engine.port))
        recorded = b""
        inner.settimeout(0.05)
        outer.settimeout(0.05)
        deadline = time.monotonic() + 10
        while not engine.received and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                data = inner.recv(65536)
                recorded += data
                outer.sendall(data)
            with contextlib.suppress(TimeoutError):
                inner.sendall(outer.recv(65536))
            engine.receive(0.02)
        assert engine.received == [(b"node-1", b"hello")]
        peer.close(linger=0)
        inner.close()
        outer.close()
    engine.receive(0.5)
    with socket.create_connection(("127.0.0.1", engine.port)) as replay, contextlib.suppress(OSError):
        replay.sendall(recorded)
        engine.receive(1.0)
    assert b"hello" not in recorded
    assert engine.received == [(b"node-1", b"hello")]


def test_the_largest_frame_of_a_step_is_below_the_limit() -> None:
    from phalanx.config.sampling_params import MAX_LOGPROBS
    from phalanx.engine.messages import RowResult, TokenLogprobs

    logprobs = TokenLogprobs(1 << 20, -1.5, 1 << 20, [(1 << 20, -1.5)] * MAX_LOGPROBS)
    rows = [RowResult(1 << 20, logprobs, [logprobs] * 64) for _ in range(16)]
    frame = protocol.encode(protocol.StepDone(1, 1 << 40, bytes(16), 1 << 31, rows))
    limit = protocol.max_frame_to_engine(64 * 16, 16)
    assert len(frame) < limit < (1 << 21)


def test_a_socket_listens_on_every_address_only_aloud(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """192.0.2.1 is the address of no host."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        monkeypatch.setattr("phalanx.executor.rank_executor.address_towards", lambda _: "127.0.0.1")
        bind_tcp(router, "192.0.2.1", 0)
        assert router.getsockopt(zmq.LAST_ENDPOINT).startswith(b"tcp://127.0.0.1:")
        assert caplog.messages == ["master_addr=192.0.2.1 is not an address of this host: listening at 127.0.0.1:0"]

        def no_route(_: str) -> str:
            raise OSError("no route")

        monkeypatch.setattr("phalanx.executor.rank_executor.address_towards", no_route)
        bind_tcp(router, "192.0.2.1", 0)
        assert "listening at ALL addresses" in caplog.messages[1]
