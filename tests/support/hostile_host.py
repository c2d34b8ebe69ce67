# SPDX-License-Identifier: Apache-2.0
"""A hostile host beside the hosts of an engine, and a tap on the link of one of them. Each runs as a program in its namespace.

    python -m tests.support.hostile_host attack FOLDER ENGINE_ADDRESS
    python -m tests.support.hostile_host tap FOLDER INTERFACE

Both run until FOLDER/stop exists. `tap` writes FOLDER/recorded: what each client of a TCP connection sent to a host of the engine.
`attack` reads FOLDER/ports, the ports that the hosts listen at now, and FOLDER/recorded; at the end it writes FOLDER/attacks: how
often each attack ran, and all bytes that it got.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq

from phalanx.engine.messages import RankFacts, RowResult
from phalanx.errors import EngineError
from phalanx.executor import protocol
from phalanx.executor.cluster_keys import ClusterKeys

MASTER_PORT = 29400
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""The beginning of ZMTP 3.0's greeting; the mechanism's name of 20 bytes follows."""
_LIMIT = 64 << 10  # bytes of a recorded connection
_MOST_HELD = 200  # connections that are left open, so that the attacker does not run out first


class Attacker:
    def __init__(self, folder: Path, engine: str) -> None:
        self._folder, self._engine = folder, engine
        self._counts: Counter[str] = Counter()
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

    def _send(self, kind: str, target: tuple[str, int], *blocks: bytes, hold: bool = False) -> None:
        """Connect, send, and keep what comes back. A port that lets no packet in is left alone for a while."""
        if time.monotonic() < self._silent.get(target, 0.0):
            return
        with contextlib.suppress(OSError):
            try:
                connection = socket.create_connection(target, timeout=0.3)
            except TimeoutError:
                self._silent[target] = time.monotonic() + 2.0
                return
            if hold:
                self._open.append(connection)
                if len(self._open) > _MOST_HELD:
                    self._open.pop(0).close()
            with contextlib.nullcontext() if hold else connection:
                with self._lock:
                    self._counts[kind] += 1
                connection.settimeout(0.02)
                for block in blocks:
                    connection.sendall(block)
                    with contextlib.suppress(TimeoutError):
                        self._received.append(connection.recv(65536))

    def junk(self) -> None:
        """At every port of every host: other protocols, broken frames, and the first bytes of gloo's and NCCL's connections."""
        while not self._stopped:
            for target in self._targets():
                self._send("http", target, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                self._send("random", target, self._dice.randbytes(self._dice.randrange(1, 4096)))
                self._send(
                    "no mechanism", target, _GREETING + b"NULL".ljust(20, b"\0") + bytes(32), b"\x04\x26\x05READY" + bytes(31)
                )
                self._send("curve", target, _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32), b"\x04\xc8\x05HELLO" + bytes(194))
                self._send("large frame", target, _GREETING, b"\x02" + struct.pack(">Q", 3 << 30) + bytes(1 << 20))
                # gloo: the number of the pair that the connection is for; every pair of a small engine has one of these.
                for number in range(8):
                    self._send("number of a pair", target, struct.pack("<q", number) + self._dice.randbytes(64), hold=True)
                self._send("nothing", target, hold=True)
            time.sleep(0.05)

    def replay(self) -> None:
        """What real hosts sent, again: in the order of their connections, to the same ports."""
        while not self._stopped:
            for address, port, data in self._recorded():
                self._send("recorded", (address, port), data)
                self._send("recorded, in parts", (address, port), data[:64], data[64:])
            time.sleep(0.1)

    def forge(self) -> None:
        """Every message of the protocol under every name, without a token, with another one, and with a stolen name."""
        wrong, tokens = EngineError("forged").to_wire(), (None, "another token of a stranger, of any length")
        messages: list[protocol.RankToEngine] = [
            protocol.Hello(1, 1, 7), protocol.RankError(1, wrong, consequence=False), protocol.RankExit(1, 1, -9),
            protocol.NodeHello(1, "10.0.0.1"), protocol.NodeHeartbeat(1), protocol.KvCapacity(1, 1),
            protocol.RankReady(1, RankFacts(1, 1, "cpu", (0, 1))), protocol.StepDone(1, 1, bytes(16), 0, [RowResult(5)]),
            protocol.RankHeartbeat(1, 1 << 40, 1 << 40), protocol.StartupProgress(1, "forged"),
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
                    peer.connect(f"tcp://{self._engine}:{MASTER_PORT}")
                    for message in messages:
                        with contextlib.suppress(zmq.Again):
                            peer.send(protocol.encode(message), zmq.NOBLOCK)
                            self._counts[f"forged {type(message).__name__}"] += 1
                    with contextlib.suppress(zmq.Again):
                        peer.send(bytes(1 << 22), zmq.NOBLOCK)
                    sockets.append(peer)
            time.sleep(0.3)
            for peer in sockets:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._received.append(b"MESSAGE " + b" ".join(peer.recv_multipart(zmq.NOBLOCK)))
                peer.close(linger=0)
            context.term()

    def run(self) -> None:
        threads = [threading.Thread(target=work) for work in (self.junk, self.replay, self.forge)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcome = {"counts": dict(self._counts), "got": [data.hex() for data in set(self._received) if data]}
        (self._folder / "attacks").write_text(json.dumps(outcome))


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
        Attacker(Path(target), place).run()
