# SPDX-License-Identifier: Apache-2.0
"""`PeerAuthenticator`: which process is at the other end of each connection to the engine, and which connections of them closed.

A thread answers libzmq when it asks whether a key may connect (ZAP, RFC 27), and reads what libzmq reports on connections.
A stranger never comes so far: without the token no handshake begins.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket as sockets
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from phalanx.executor.cluster_keys import ClusterKeys
from phalanx.log import get_logger

log = get_logger(__name__)

HANDSHAKE_SECONDS = 5.0
"""How long a handshake may take; a peer that was let in and sends nothing for as long holds its identity no longer."""
_LOG_SECONDS = 10.0  # between two log lines on refused peers
_UNKNOWN = "an unknown address"  # of a connection that closed before it was asked for
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass
class _Connection:
    """The connection that holds an identity. descriptor: its socket; None until its first message comes, -1 once it is closed."""

    address: str
    since: float
    descriptor: int | None = None


class PeerAuthenticator:
    """For the ROUTER of one engine, which `peers` (identities) may connect to over TCP. Without `keys` nobody is authenticated, and
    only the names are compared.

    The methods are called from the engine's thread. `listen` comes before the ROUTER binds TCP. The thread ends when the context is
    terminated.
    """

    def __init__(self, keys: ClusterKeys | None, peers: Iterable[bytes]) -> None:
        self._keys = keys
        self._peers = {peer.decode() for peer in peers}
        self._names = {} if keys is None else {z85.decode(keys.public_key(name)): name for name in self._peers}
        self._connections: dict[str, _Connection] = {}
        self._lock = threading.Lock()  # around _connections
        self._closed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._dropped: set[str] = set()
        self._addresses: dict[int, str] = {}  # by descriptor, of accepted TCP connections
        self._refusals: list[str] = []  # descriptions of failed handshakes whose connections are about to close
        self._refused, self._last_logs = 0, {True: -_LOG_SECONDS, False: -_LOG_SECONDS}  # by whether the address is known

    def listen(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        """Take the connections of `router` from now on. Raises nothing that a peer could cause."""
        endpoint = f"inproc://connections-{id(self)}"
        router.monitor(endpoint, _EVENTS)
        monitor = context.socket(zmq.PAIR)
        zap = context.socket(zmq.REP)
        for socket in (monitor, zap):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread must not wait for this one
        monitor.connect(endpoint)
        zap.bind(_ZAP_ADDRESS)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        if self._keys is not None:
            self._keys.secure_server(router)
        threading.Thread(target=self._run, args=(monitor, zap), name="peer authentication", daemon=True).start()

    def sender(self, frames: Sequence[zmq.Frame]) -> bytes | None:
        """The identity of the peer that sent these frames (identity, ..., message); None where it is not the peer's own."""
        identity = frames[0].bytes
        name = identity.decode(errors="replace")
        try:
            user = str(frames[-1].get("User-Id"))
        except zmq.ZMQError:  # it came through the private folder, or nobody is authenticated
            user = name
        if user != name or name not in self._peers:
            self.dropped(user, f"it calls itself {name!r}")
            return None
        connection = self._connections.get(name)
        if (connection is None and self._keys is None) or (connection is not None and connection.descriptor is None):
            descriptor = int(frames[-1].get(zmq.SRCFD))
            with self._lock:
                connection = self._connections.setdefault(name, _Connection("", time.monotonic()))
                if connection.descriptor is None:
                    connection.descriptor = descriptor
        return identity

    def dropped(self, name: str, why: str) -> None:
        """A message of this peer is dropped: log the first one."""
        if name not in self._dropped and len(self._dropped) < 1000:
            self._dropped.add(name)
            log.warning("messages of the peer %.40r are dropped: %s", name, why)

    def closed(self) -> list[str]:
        """The peers whose TCP connections closed since the last call."""
        names = []
        with contextlib.suppress(queue.Empty):
            while True:
                names.append(self._closed.get_nowait())
        return names

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self, monitor: zmq.Socket[bytes], zap: zmq.Socket[bytes]) -> None:
        from zmq.utils.monitor import recv_monitor_message  # and asyncio, for which a start does not wait

        poller = zmq.Poller()
        for socket in (monitor, zap):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                poller.poll()
                while monitor.poll(0):
                    event = recv_monitor_message(monitor)
                    if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                        poller.unregister(monitor)
                        break
                    if event["endpoint"].startswith(b"tcp:"):
                        self._connection_event(int(event["event"]), int(event["value"]))
                if zap.poll(0):
                    zap.send_multipart(self._decide(zap.recv_multipart()))
        except zmq.ContextTerminated:
            return
        finally:
            monitor.close()
            zap.close()

    def _connection_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._addresses[value] = _peer_address(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            wrong = "wrong cluster token" if value == _CRYPTOGRAPHIC else "it does not use the cluster token as this engine does"
            self._refusals.append(wrong)
        elif event == zmq.EVENT_DISCONNECTED:
            address = self._addresses.pop(value, _UNKNOWN)
            with self._lock:
                known = any(connection.descriptor == value for connection in self._connections.values())
                for name, connection in self._connections.items():
                    if connection.descriptor is None and not known:
                        connection.since = -HANDSHAKE_SECONDS  # perhaps its own: its next attempt must not be refused
                    elif connection.descriptor == value:
                        connection.descriptor = -1
                        self._closed.put(name)
            if self._refusals:
                self._log_refusal(address, self._refusals.pop(0))

    def _log_refusal(self, address: str, why: str) -> None:
        self._refused += 1
        now = time.monotonic()
        known = address != _UNKNOWN  # a line without an address must not hold back the first one with it
        if now - self._last_logs[known] >= _LOG_SECONDS:
            more = f" ({self._refused} since the last such line)" if self._refused > 1 else ""
            log.warning("a peer at %s was refused: %s%s", address, why, more)
            self._refused, self._last_logs[known] = 0, now

    def _decide(self, request: list[bytes]) -> list[bytes]:
        """The answer to a ZAP request: whether the key that asks belongs to a peer, and no other connection holds its identity."""
        version, number = request[:2]
        address = _without_prefix(request[3].decode(errors="replace"))
        name = self._names.get(request[6]) if len(request) > 6 and request[5] == b"CURVE" else None
        if name is None:
            self._log_refusal(address, "its key belongs to no rank and no node of this engine")
            return [version, number, b"400", b"unknown key", b"", b""]
        now = time.monotonic()
        with self._lock:
            first = self._connections.get(name)
            free = first is None or first.descriptor == -1 or (first.descriptor is None and now - first.since > HANDSHAKE_SECONDS)
            if free:
                self._connections[name] = _Connection(address, now)
        if not free and first is not None:
            log.warning("a second %s, at %s, was refused: the first one is at %s", name, address, first.address)
            return [version, number, b"400", b"identity in use", b"", b""]
        return [version, number, b"200", b"", name.encode(), b""]


def _peer_address(descriptor: int) -> str:
    """The address of the other end; the connection belongs to libzmq and may be closed by now."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            return _without_prefix(str(connection.getpeername()[0]))
    except (OSError, IndexError):
        return _UNKNOWN


def _without_prefix(address: str) -> str:
    """An IPv4 address as such, where a socket for both families writes it as an IPv6 address."""
    return address.removeprefix("::ffff:")
