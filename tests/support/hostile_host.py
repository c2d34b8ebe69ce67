# SPDX-License-Identifier: Apache-2.0
"""A hostile host beside the hosts of an engine, and a tap on the link of one of them. Each runs as a program in its namespace.

    python -m tests.support.hostile_host attack FOLDER ENGINE_ADDRESS
    python -m tests.support.hostile_host tap FOLDER INTERFACE

Both run until FOLDER/stop exists. `tap` writes FOLDER/recorded: what each client of a TCP connection sent to a host of the engine.
`attack` reads FOLDER/ports, the ports that the hosts listen at now, and FOLDER/recorded; at the end it writes FOLDER/attacks: how
often each attack ran (`counts`), how often the engine ended its connection for it (`refused`), which shows that it arrived, how
many connections the engine held at once (`held`), and all bytes that it got (`got`).
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.engine.messages import RankFacts, RowResult
from phalanx.errors import EngineError
from phalanx.executor import protocol
from phalanx.executor.cluster_keys import ClusterKeys

MASTER_PORT = 29400
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_DEALER_2_0 = b"\x01\x05"  # revision and kind of socket, in the greeting of ZMTP 2.0
_MESSAGE_BIT, _COMMAND_BIT = b"\x02", b"\x06"  # of frames whose length has 8 bytes
_LIMIT = 64 << 10  # bytes of a recorded connection
_MOST_HELD = 200  # connections that are left open at the ports of gloo
_FLOOD = 600  # connections that are left open at the engine's port


def greeting(mechanism: bytes) -> bytes:
    """All 64 bytes of ZMTP 3.0's."""
    return _SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(content)]) + content


def ready(identity: bytes) -> bytes:
    """The command READY of a DEALER."""
    fields = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    return command(b"READY", b"".join(bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in fields))


def frame(content: bytes) -> bytes:
    """A message of one short frame."""
    return b"\x00" + bytes([len(content)]) + content


_FORGED = frame(protocol.encode(protocol.RankExit(1, 1, -9)))
_HUGE = struct.pack(">Q", 3 << 30) + bytes(1 << 20)
DOWNGRADES: dict[str, tuple[bytes, ...]] = {
    "http": (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",),
    # ZMTP 1.0 begins with the identity, as a frame of length and flags.
    "zmtp 1.0": (b"\x07\x00node-1", bytes([len(_FORGED) - 1]) + b"\x00" + _FORGED[2:]),
    "zmtp 2.0": (_SIGNATURE + _DEALER_2_0, frame(b"node-1"), _FORGED),
    "no mechanism": (greeting(b"NULL"), ready(b"node-1"), _FORGED),
    "plain": (greeting(b"PLAIN"), command(b"HELLO", b"\x06node-1\x06secret"), ready(b"node-1") + _FORGED),
    "curve": (greeting(b"CURVE"), command(b"HELLO", bytes(194))),
    "no handshake": (greeting(b"CURVE"), _FORGED),
    "large frame": (greeting(b"CURVE"), _MESSAGE_BIT + _HUGE),
    "large command": (greeting(b"CURVE"), _COMMAND_BIT + _HUGE),
}
"""Connections whose bytes the engine must read, and must end then: other protocols, older and weaker versions of its own, and
frames that no handshake has."""


class Attacker:
    def __init__(self, folder: Path, engine: str) -> None:
        self._folder, self._engine = folder, engine
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._most_held = 0
        self._received: list[bytes] = []
        self._lock = threading.Lock()
        self._dice = random.Random(7)
        self._open: list[socket.socket] = []
        self._silent: dict[tuple[str, int], float] = {}

    @property
    def _stopped(self) -> bool:
        return (self._folder / "stop").exists()

    def _targets(self) -> list[tuple[str, int]]:
        with contextlib.suppress(OSError, ValueError):
            return [(address, port) for address, port in json.loads((self._folder / "ports").read_text())]
        return []

    def _recorded(self) -> list[tuple[str, int, bytes]]:
        with contextlib.suppress(OSError, ValueError):
            return [(a, p, bytes.fromhex(data)) for a, p, data in json.loads((self._folder / "recorded").read_text())]
        return []

    def _connect(self, target: tuple[str, int]) -> socket.socket | None:
        """A port that lets no packet in is left alone for a while."""
        if time.monotonic() < self._silent.get(target, 0.0):
            return None
        try:
            return socket.create_connection(target, timeout=0.3)
        except TimeoutError:
            self._silent[target] = time.monotonic() + 2.0
        except OSError:
            pass
        return None

    def _send(self, kind: str, target: tuple[str, int], *blocks: bytes, hold: bool = False, ends: bool = False) -> None:
        """Connect, send, and keep what comes back. ends: see whether the other side ends the connection for it."""
        connection = self._connect(target)
        if connection is None:
            return
        if hold:
            self._open.append(connection)
            if len(self._open) > _MOST_HELD:
                self._open.pop(0).close()
        with contextlib.nullcontext() if hold else connection:
            with self._lock:
                self._counts[kind] += 1
            refused = self._exchange(connection, blocks, 1.0 if ends else 0.0)
            if ends and refused:
                with self._lock:
                    self._refused[kind] += 1

    def _exchange(self, connection: socket.socket, blocks: tuple[bytes, ...], seconds: float) -> bool:
        """Send the blocks. Whether the other side has ended the connection, this number of seconds later at most."""
        connection.settimeout(0.02)
        try:
            for block in blocks:
                connection.sendall(block)
                with contextlib.suppress(TimeoutError):
                    self._received.append(connection.recv(65536))
            if seconds:
                connection.settimeout(seconds)
                while data := connection.recv(65536):
                    self._received.append(data)
            return bool(seconds)
        except TimeoutError:
            return False
        except OSError:
            return True

    def junk(self) -> None:
        """At every port of every host: other protocols, broken frames, and the first bytes of gloo's and NCCL's connections."""
        while not self._stopped:
            for target in self._targets():
                for kind, blocks in DOWNGRADES.items():
                    self._send(kind, target, *blocks, ends=target == (self._engine, MASTER_PORT))
                self._send("random", target, self._dice.randbytes(self._dice.randrange(1, 4096)))
                # gloo: the number of the pair that the connection is for; every pair of a small engine has one of these.
                for number in range(8):
                    self._send("number of a pair", target, struct.pack("<q", number) + self._dice.randbytes(64), hold=True)
                self._send("nothing", target, hold=True)
            time.sleep(0.05)

    def flood(self) -> None:
        """Hold as many connections to the engine as it lets stand, each somewhere within its handshake."""
        target, flood = (self._engine, MASTER_PORT), list[socket.socket]()
        while not self._stopped:
            for number in range(20):
                connection = self._connect(target)
                if connection is not None:
                    with contextlib.suppress(OSError):
                        connection.sendall(greeting(b"CURVE")[: (0, 1, 11, 40, 64)[number % 5]])
                    flood.append(connection)
            still = [connection for connection in flood if _stands(connection)]
            self._most_held = max(self._most_held, len(still))
            for connection in {*flood}.difference(still[-_FLOOD:]):
                connection.close()
            flood = still[-_FLOOD:]
            time.sleep(0.1)

    def replay(self) -> None:
        """What real hosts sent, again: in the order of their connections, to the same ports."""
        while not self._stopped:
            for address, port, data in self._recorded():
                self._send("recorded", (address, port), data)
                self._send("recorded, in parts", (address, port), data[:64], data[64:])
            time.sleep(0.1)

    def forge(self) -> None:
        """Every message of the protocol under every name, without a token and with another one. libzmq keeps them until its
        handshake has succeeded, which "let in" would count."""
        wrong, tokens = EngineError("forged").to_wire(), (None, "another token of a stranger, of any length")
        messages: list[protocol.RankToEngine] = [
            protocol.Hello(1, 1, 7), protocol.RankError(1, wrong, consequence=False), protocol.RankExit(1, 1, -9),
            protocol.NodeHello(1, "10.0.0.1"), protocol.NodeHeartbeat(1), protocol.KvCapacity(1, 1),
            protocol.RankReady(1, RankFacts(1, 1, "cpu", (0, 1))), protocol.StepDone(1, 1, bytes(16), 0, [RowResult(5)]),
            protocol.RankHeartbeat(1, protocol.RankPlace(1 << 40, 1 << 40)), protocol.StartupProgress(1, "forged"),
            protocol.StoreRequest(1, 1, "set", ["agreement/start/0"], [b"forged"]),
            protocol.StoreRequest(0, 2, "get", ["agreement/start/0"], []),
        ]  # fmt: skip
        names = [b"node-1", b"rank-0", b"rank-1", b"heartbeat-rank-1", b"store-rank-0", b"store-rank-1", b"stranger"]
        while not self._stopped:
            context: zmq.Context[Any] = zmq.Context()
            sockets = []
            for name in names:
                for token in tokens:
                    peer = context.socket(zmq.DEALER)
                    if token is not None:
                        ClusterKeys(token).secure_client(peer, name.decode())
                    peer.setsockopt(zmq.IDENTITY, name)
                    peer.setsockopt(zmq.LINGER, 0)
                    monitor = peer.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
                    peer.connect(f"tcp://{self._engine}:{MASTER_PORT}")
                    for message in messages:
                        with contextlib.suppress(zmq.Again):
                            peer.send(protocol.encode(message), zmq.NOBLOCK)
                    with contextlib.suppress(zmq.Again):
                        peer.send(bytes(1 << 22), zmq.NOBLOCK)
                    sockets.append((peer, monitor))
            time.sleep(0.3)
            for peer, monitor in sockets:
                while monitor.poll(0):
                    event = recv_monitor_message(monitor)["event"]
                    self._counts["forger, connected" if event == zmq.EVENT_CONNECTED else "forger, let in"] += 1
                peer.disable_monitor()
                monitor.close(linger=0)
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._received.append(b"MESSAGE " + b" ".join(peer.recv_multipart(zmq.NOBLOCK)))
                peer.close(linger=0)
            context.term()

    def run(self) -> None:
        threads = [threading.Thread(target=work) for work in (self.junk, self.flood, self.replay, self.forge)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        received = [data.hex() for data in set(self._received) if data]
        outcome = {"counts": dict(self._counts), "refused": dict(self._refused), "held": self._most_held, "got": received}
        (self._folder / "attacks").write_text(json.dumps(outcome))


def _stands(connection: socket.socket) -> bool:
    """Whether the other side has not ended this connection."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def tap(folder: Path, interface: str) -> None:
    """Record what clients of TCP connections send on this interface."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    wire.bind((interface, 0))
    wire.settimeout(0.2)
    clients: dict[tuple[bytes, int, bytes, int], bytearray] = {}
    written = time.monotonic()
    while not (folder / "stop").exists():
        with contextlib.suppress(TimeoutError):
            packet = wire.recv(65535)[14:]
            head = (packet[0] & 15) * 4
            if packet[9] == socket.IPPROTO_TCP:
                total = struct.unpack_from(">H", packet, 2)[0]
                segment = packet[head:total] if total else packet[head:]
                ports = struct.unpack_from(">HH", segment)
                key = (packet[12:16], ports[0], packet[16:20], ports[1])
                if segment[13] & 18 == 2:  # SYN without ACK: its sender is the client
                    clients[key] = bytearray()
                elif key in clients and len(clients[key]) < _LIMIT:
                    clients[key] += segment[(segment[12] >> 4) * 4 :]
        if time.monotonic() - written > 0.5:
            written = time.monotonic()
            streams = [[socket.inet_ntoa(key[2]), key[3], bytes(data).hex()] for key, data in clients.items() if data]
            (folder / "part").write_text(json.dumps(streams))
            (folder / "part").rename(folder / "recorded")


if __name__ == "__main__":
    verb, target, place = sys.argv[1:]
    if verb == "tap":
        tap(Path(target), place)
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the attacker does not run out first
        Attacker(Path(target), place).run()
