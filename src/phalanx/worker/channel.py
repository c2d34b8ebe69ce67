# SPDX-License-Identifier: Apache-2.0
"""`EngineChannel`: a rank's connection to the engine. Steps come in, results go out, and a thread of its own sends heartbeats."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from phalanx.engine.messages import Step
from phalanx.executor.protocol import (
    HEARTBEAT_SECONDS,
    MAX_FRAME_TO_RANK,
    Chain,
    EngineToRank,
    RankHeartbeat,
    RankPlace,
    RankToEngine,
    dealer,
    decode_to_rank,
    encode,
    heartbeat_identity,
    rank_identity,
)
from phalanx.layout.rank_progress import RankProgress

_MAX_HEARTBEAT_ANSWER = 4096  # bytes: nothing comes back but the handshake
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as numbers: enums cost a microsecond each


class EngineChannel:
    """One per rank process; used from its main thread only. `cluster_token`: authenticates both ends of a TCP connection."""

    def __init__(self, rank: int, address: str, cluster_token: str | None = None) -> None:
        self.rank = rank
        self.progress = RankProgress()  # which the heartbeat's thread reads
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._cluster_token = cluster_token
        self._socket = dealer(self._context, address, rank_identity(rank), cluster_token, max_frame=MAX_FRAME_TO_RANK)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._chain = Chain()

    @property
    def place(self) -> RankPlace:
        """Where this rank is now."""
        return RankPlace(*self.progress.place)

    @property
    def digest(self) -> bytes:
        """The chained digest after the last step received."""
        return self._chain.digest

    def send(self, message: RankToEngine) -> None:
        self._socket.send(encode(message))

    def receive(self, seconds: float | None = None) -> Step | EngineToRank | None:
        """The engine's next message. Waits for it, at most `seconds` where given, and returns None when none came in that time.
        Raises StepDiverged for a step out of order.

        The seconds may be fractions of a millisecond, which zmq cannot express.
        """
        if seconds is not None and not self._arrives_within(seconds):
            return None
        frames = self._socket.recv_multipart()
        return self._chain.open(self.rank, frames) if len(frames) == 2 else decode_to_rank(frames[0])

    def _arrives_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            # The descriptor tells that something has happened since the socket was asked, not that it was a message.
            readable, _, _ = select.select([self._descriptor], [], [], max(deadline - time.monotonic(), 0.0))
            if not readable:
                return False
        return True

    def start_heartbeat(self, bytes_now: Callable[[], dict[str, int]], counts: Callable[[], Sequence[Any]]) -> None:
        """Send a heartbeat each second. `bytes_now` and `counts` (all-reduce calls, how steps ran, the GPU's gauges, tokens
        of experts) give what RankHeartbeat holds; they are called in the heartbeat's thread."""

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        def beat() -> None:
            socket = dealer(
                context, self._address, heartbeat_identity(self.rank), self._cluster_token, max_frame=_MAX_HEARTBEAT_ANSWER
            )
            while True:
                socket.send(encode(RankHeartbeat(self.rank, self.place, bytes_now(), *counts())))
                threading.Event().wait(HEARTBEAT_SECONDS)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Let the last messages leave, for a moment at most. Heartbeats go on until the process ends."""
        self._socket.close()
        self._context.term()
