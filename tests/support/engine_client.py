# SPDX-License-Identifier: Apache-2.0
"""A client of an engine's loop, with the loop on a thread and fake ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import zmq

from phalanx.config import SamplingParams
from phalanx.engine.fake import FakeExecutor
from phalanx.engine.grammar import OpenMatcher
from phalanx.engine.grammar_threads import GrammarThreads
from phalanx.engine.loop import Loop
from phalanx.engine.messages import AddRequest, EngineToClient, NextTokens, RequestUpdate, Shutdown
from phalanx.engine.scheduler import Scheduler, SchedulerOptions

SIZES: dict[str, int] = {"num_blocks": 64, "block_size": 4, "max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 128}


def no_grammar(compiled: str) -> Any:
    raise ValueError(f"{compiled!r} is no grammar")


def each_update(messages: Iterable[Any]) -> Iterator[Any]:
    """The messages, with one for each request of NextTokens."""
    for message in messages:
        yield from message.updates() if isinstance(message, NextTokens) else [message]


class Client:
    """The client's end, and the loop on a thread."""

    def __init__(
        self, executor: FakeExecutor | None = None, *, open_matcher: OpenMatcher = no_grammar, vocab_size: int = 50
    ) -> None:  # fmt: skip
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.bind("inproc://engine")
        self.engine_end = self.context.socket(zmq.DEALER)
        self.engine_end.connect("inproc://engine")
        self.executor = executor or FakeExecutor.of(vocab_size=vocab_size, **SIZES)
        options = SchedulerOptions(**SIZES, vocab_size=vocab_size)
        self.scheduler = Scheduler(options, open_matcher, grammar_calls=GrammarThreads())
        self.loop = Loop(self.engine_end, self.executor, self.scheduler)
        self.messages: list[Any] = []  # as they came; `heard` has each token as an update
        self.heard: list[Any] = []
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.status = self.loop.run()

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        self.say(AddRequest(name, prompt, SamplingParams(**params)))

    def hear(self, kind: type, count: int = 1, seconds: float = 30.0) -> list[Any]:
        """All messages of a kind so far, once there are so many."""
        deadline = time.monotonic() + seconds
        while sum(isinstance(message, kind) for message in self.heard) < count:
            assert self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))), f"{count} {kind.__name__} did not come"
            messages = [msgspec.msgpack.decode(frame, type=EngineToClient) for frame in self.socket.recv_multipart()]
            self.messages += messages
            self.heard += each_update(messages)
        return [message for message in self.heard if isinstance(message, kind)]

    def tokens(self, name: str) -> list[int]:
        return [t for m in self.heard if isinstance(m, RequestUpdate) and m.request_id == name for t in m.tokens]

    def finish(self) -> int | None:
        if self.thread.is_alive():
            self.say(Shutdown())
        self.thread.join(30)
        self.socket.close(linger=0)
        self.engine_end.close(linger=0)
        self.context.term()
        return self.status


def ended(client: Client, count: int) -> None:
    """Wait until so many requests have finished."""
    while sum(isinstance(m, RequestUpdate) and m.finish_reason is not None for m in client.heard) < count:
        client.hear(RequestUpdate, sum(isinstance(m, RequestUpdate) for m in client.heard) + 1)
