# SPDX-License-Identifier: Apache-2.0
"""A process that speaks the engine's messages and misbehaves as told: the `model` option names the way.

Answers an AddRequest with two tokens a message, in frames of one multipart message, until max_tokens. Token 13 is answered as said.
"""

from __future__ import annotations

import os
import signal
import time

import msgspec
import zmq

from phalanx import launch
from phalanx.config import EngineOptions
from phalanx.engine.messages import (
    Abort,
    AddRequest,
    ClientToEngine,
    ExpertStats,
    Failed,
    GetExperts,
    GetStats,
    Heartbeat,
    RequestRejected,
    RequestUpdate,
    Shutdown,
    Started,
    Stats,
    Stopped,
)
from phalanx.errors import ModelError, RankDied, RequestError
from phalanx.serve.fake_client import fake_facts


def main() -> None:
    config = launch.read_config()
    way = EngineOptions(**config["options"]).model
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ClientToEngine).decode
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(config["address"])
    if way == "bad model":
        socket.send(encode(Failed(ModelError("the weights were read", why="they are not there").to_wire())))
        time.sleep(0.2)
        raise SystemExit(1)
    if way == "dies at start":
        raise SystemExit(3)
    if way == "never starts":
        time.sleep(600)
    socket.send_multipart([encode(Heartbeat()), encode(Started(fake_facts(eos_token_ids=[2])))])
    aborted = 0
    while True:
        message = decode(socket.recv())
        match message:
            case AddRequest(request_id=name, token_ids=tokens, params=params):
                if 13 in tokens:
                    obey(way, socket, encode, name)
                elif 14 not in tokens:  # 14: never answered
                    updates = [RequestUpdate(name, [index, index + 1]) for index in range(0, params.max_tokens, 2)]
                    updates[-1].finish_reason = "length"
                    socket.send_multipart([encode(update) for update in updates])
            case Abort(request_ids=names):
                aborted += len(names)
            case GetStats():
                socket.send(encode(Stats(steps=aborted)))
            case GetExperts():
                failed = [encode(Failed(RankDied("rank 1 ran step 7").to_wire()))] if way == "answers late" else []
                socket.send_multipart([*failed, encode(ExpertStats(experts=8))])
            case Shutdown():
                if way == "ignores shutdown":
                    time.sleep(600)
                socket.send(encode(Stopped()))
                socket.close(linger=1000)
                return


def obey(way: str, socket: zmq.Socket, encode, name: str) -> None:
    if way == "refuses":
        socket.send(encode(RequestRejected(name, RequestError("13 was asked for", why="it brings bad luck").to_wire())))
    elif way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "loses a rank":
        socket.send(encode(Failed(RankDied("rank 1 ran step 7", held="it was killed by SIGKILL").to_wire())))
        socket.close(linger=1000)
        raise SystemExit(1)
    elif way == "sends nonsense":
        socket.send(b"\xc1")
    elif way == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
