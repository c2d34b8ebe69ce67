# SPDX-License-Identifier: Apache-2.0
"""A rank's line to the engine: steps in, results out, and a pulse from a thread of its own."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from phalanx.engine.messages import Step
from phalanx.executor.protocol import Chain, EngineToRank, RankHeartbeat, RankToEngine, decode_from_engine, encode, rank_name

PULSE_SECONDS = 1.0
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as numbers: enums cost a microsecond each
_GOODBYE_MS = 2000  # how long the last words may take to leave


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes) -> zmq.Socket[bytes]:
    """A socket to the engine's ROUTER; it never blocks on sending."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, _GOODBYE_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
    return socket


class EngineChannel:
    """One per rank process; used from its main thread only."""

    def __init__(self, rank: int, address: str) -> None:
        self.rank = rank
        self.begun = self.finished = 0  # step numbers, read by the pulse
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context, address, rank_name(rank))
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._chain = Chain()

    @property
    def digest(self) -> bytes:
        """The chained digest after the last step received."""
        return self._chain.digest

    def send(self, message: RankToEngine) -> None:
        self._socket.send(encode(message))

    def receive(self, seconds: float | None = None) -> Step | EngineToRank | None:
        """What the engine sends next; waits for it, or so many seconds (then None). Raises StepDiverged for a step out of line.

        The seconds may be fractions of a millisecond, in which zmq does not count.
        """
        if seconds is not None and not self._arrives_within(seconds):
            return None
        frames = self._socket.recv_multipart()
        return self._chain.open(self.rank, frames) if len(frames) == 2 else decode_from_engine(frames[0])

    def _arrives_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            # The descriptor tells that something has happened since the socket was asked, not that it was a message.
            stirred, _, _ = select.select([self._descriptor], [], [], max(deadline - time.monotonic(), 0.0))
            if not stirred:
                return False
        return True

    def start_pulse(self, bytes_now: Callable[[], dict[str, int]], counts: Callable[[], Sequence[dict[str, int]]]) -> None:
        """Give a sign of life each second. `bytes_now`, and `counts` (all-reduce calls, how steps ran): as in Pulse, asked in the
        pulse's thread."""

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        def beat() -> None:
            socket = dealer(context, self._address, b"pulse-" + rank_name(self.rank))
            while True:
                socket.send(encode(RankHeartbeat(self.rank, self.begun, self.finished, bytes_now(), *counts())))
                threading.Event().wait(PULSE_SECONDS)

        threading.Thread(target=beat, name="pulse", daemon=True).start()

    def close(self) -> None:
        """Let the last words leave (a moment at most). The pulse goes on until the process ends."""
        self._socket.close()
        self._context.term()
