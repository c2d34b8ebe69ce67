# SPDX-License-Identifier: Apache-2.0
"""An engine process of negligible cost: every running request gets one token per step of fixed length.

It speaks the messages of the real engine (`phalanx.engine.loop`: the updates of a step are frames of one multipart message), so
that a benchmark measures the cost of the server alone. Its config is the engine's, with "paced": {"seconds" of a step, "tokens"
that repeat}. After a late step the next one begins at once; Stats.preemptions counts late steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from phalanx import launch
from phalanx.engine.messages import (
    Abort,
    AddRequest,
    ClientToEngine,
    GetStats,
    Heartbeat,
    RequestUpdate,
    Shutdown,
    Started,
    Stats,
    Stopped,
)
from phalanx.serve.fake_client import fake_facts

MAX_SEQ_LEN = 1 << 20
_LATE = 0.5  # share of a step; a step that is later counts as late

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ClientToEngine).decode


@dataclass
class Running:
    """A request and its number of tokens."""

    name: str
    max_tokens: int
    count: int = 0


class PacedEngine:
    """The loop: read messages, sleep until the step is due, send its tokens."""

    def __init__(self, socket: zmq.Socket[bytes], *, seconds: float, tokens: list[int]) -> None:
        self._socket, self._seconds, self._tokens = socket, seconds, tokens
        self._running: dict[str, Running] = {}
        self._counted = Stats(blocks_total=1)
        self._beat = 0.0

    def run(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            wait = (due - now if self._running else 0.5) * 1e3
            if self._socket.poll(max(0, int(wait))) and not self._take():
                return
            if now > self._beat:
                self._beat = now + 1.0
                self._socket.send(encode(Heartbeat()))
            if not self._running:
                due = time.monotonic() + self._seconds
                continue
            time.sleep(max(0.0, min(due - time.monotonic(), 1e-3)))
            if (now := time.monotonic()) >= due:
                self._counted.preemptions += now - due > _LATE * self._seconds
                due = max(due + self._seconds, now)
                self._step()

    def _take(self) -> bool:
        """Handle the client's messages; False if it shuts the engine down."""
        for frame in self._socket.recv_multipart():
            match decode(frame):
                case AddRequest(request_id=name, params=params):
                    self._running[name] = Running(name, params.max_tokens or MAX_SEQ_LEN)
                case Abort(request_ids=names):
                    for name in names:
                        self._running.pop(name, None)
                case GetStats():
                    self._counted.running = len(self._running)
                    self._socket.send(encode(self._counted))
                case Shutdown():
                    self._socket.send(encode(Stopped()))
                    return False
        return True

    def _step(self) -> None:
        frames, tokens = [], self._tokens
        for one in list(self._running.values()):
            update = RequestUpdate(one.name, [tokens[one.count % len(tokens)]])
            one.count += 1
            if one.count == one.max_tokens:
                update.finish_reason = "length"
                del self._running[one.name]
            frames.append(encode(update))
        self._counted.steps += 1
        self._counted.generation_tokens += len(frames)
        self._socket.send_multipart(frames)


def main() -> None:
    config: dict[str, Any] = launch.read_config()
    paced = config["paced"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(config["address"])
    facts = fake_facts(vocab_size=paced["vocab_size"], max_seq_len=MAX_SEQ_LEN)
    facts.max_batch_size = 1024
    socket.send(encode(Started(facts)))
    PacedEngine(socket, seconds=paced["seconds"], tokens=paced["tokens"]).run()
    socket.close(linger=1000)
    context.term()


if __name__ == "__main__":
    main()
