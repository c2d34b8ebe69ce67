# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: it stands between one client and the ranks, and never waits for either alone.

client -> (Add, Abort, ...) -> scheduler -> Step -> executor -> StepResult -> scheduler -> (Update, ...) -> client
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from phalanx.engine.messages import (
    Abort,
    AddRequest,
    ClientToEngine,
    EngineToClient,
    Failed,
    GetStats,
    Heartbeat,
    RequestRejected,
    Shutdown,
    Stopped,
)
from phalanx.engine.scheduler import Scheduler
from phalanx.errors import EngineClosed, EngineError, OptionError, PhalanxError
from phalanx.log import get_logger

if TYPE_CHECKING:
    from phalanx.engine.executor import Executor

logger = get_logger(__name__)

BEAT_SECONDS = 1.0
STATS_SECONDS = 0.5
QUIET_SECONDS = 2.0
"""For how long there must have been no work before the accounting is checked: a request that comes meanwhile waits for that."""
_MORE, _LAST = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)
_FRAMES_PER_TURN = 512  # so that a flood of messages does not keep the ranks waiting

_encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ClientToEngine).decode


class ClientSocket(Protocol):
    """What the loop needs of the client's end: a zmq DEALER, or a stand-in that a zmq.Poller takes."""

    def recv_multipart(self, flags: int = 0) -> list[bytes]: ...
    def send(self, data: bytes, flags: int = 0) -> Any: ...


def warm_grammars() -> None:
    """Load what grammars need: seconds of imports, paid by the first guided request and by nobody else."""
    from phalanx.engine.grammar import warm

    warm()


class Loop:
    """Runs requests until it is told to stop or the ranks fail. Every message is a frame; a turn sends its frames as one multipart
    message.

    `backlog`: frames that came before the loop began. `warm` runs on a thread when the first guided request comes.
    """

    def __init__(
        self, socket: ClientSocket, executor: Executor, scheduler: Scheduler, *, backlog: Iterable[bytes] = (),
        warm: Callable[[], None] = warm_grammars, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._socket, self._executor, self._scheduler, self._clock = socket, executor, scheduler, clock
        self._frames = list(backlog)
        self._outbox: list[EngineToClient] = []  # encoded as they leave, after ranks have their step
        self._beat_due = self._stats_due = clock()
        self._rested = True  # since the last work, clients were told that there is none
        self._check_due: float | None = None  # when the accounting of that work is to be checked
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._polled: list[Any] = []
        self._poller = zmq.Poller()
        self._warm = warm
        self._warmed = threading.Event()
        self._held: list[AddRequest] = []  # guided requests that came before grammars were loaded

    def run(self) -> int:
        """Turn until the end; returns an exit status, 0 if the engine was asked to end. The executor is shut down then."""
        try:
            while not self._stopping:
                self.step()
            if self._check_due is not None:
                self._check()
        except Exception as raised:
            error = raised if isinstance(raised, PhalanxError) else _unexpected(raised)
            self._refuse_everybody(error)
            self._say(Failed(error.to_wire()))
            self._send()
            self._executor.shutdown()
            return 1
        self._refuse_everybody(EngineClosed("the engine was shut down"))
        self._send()  # before ranks take their time to end
        self._executor.shutdown()
        self._say(Stopped())
        self._send()
        return 0

    def step(self) -> None:
        """One turn. What has come is settled before the next step is made, and ranks have that before anybody is told."""
        self._wait()
        self._take_in()
        self._settle()
        self._submit()
        self._report()
        self._send()
        if self._check_due is not None and self._clock() >= self._check_due:
            self._check()

    def stop(self) -> None:
        """End `run` after this turn. May be called from a signal handler or another thread."""
        self._stopping = True
        self._wake()

    # ---- the parts of a turn -----------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until something comes from the client or the ranks, or a message is due."""
        waitables = [self._socket, self._wake_read, *self._executor.waitables()]
        if waitables != self._polled:
            self._poller, self._polled = zmq.Poller(), waitables
            for waitable in waitables:
                self._poller.register(waitable, zmq.POLLIN)
        due = min(self._beat_due, (self._check_due or self._beat_due) if self._scheduler.idle else self._stats_due)
        seconds = 0.0 if self._frames else max(0.0, due - self._clock())
        self._poller.poll(min(int(seconds * 1000) + 1, 1000) if seconds else 0)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _take_in(self) -> None:
        while len(self._frames) < _FRAMES_PER_TURN:
            try:
                self._frames += self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
        frames, self._frames = self._frames, []
        for frame in frames:
            self._take(frame)
        if self._held and self._warmed.is_set():
            held, self._held = self._held, []
            for add in held:
                self._add(add)

    def _settle(self) -> None:
        for result in self._executor.collect():
            for said in self._scheduler.process_result(result):
                self._say(said)

    def _submit(self) -> None:
        while (step := self._scheduler.schedule()) is not None:
            self._executor.submit(step)

    def _report(self) -> None:
        now = self._clock()
        if now >= self._beat_due:
            self._say(Heartbeat())
            self._beat_due = now + BEAT_SECONDS
        if not self._scheduler.idle:
            self._rested, self._check_due = False, None
            if now >= self._stats_due:
                self._say_stats()
                self._stats_due = now + STATS_SECONDS
        elif not self._rested:
            self._rested, self._check_due = True, now + QUIET_SECONDS
            self._say_stats()  # gauges fall to zero

    def _check(self) -> None:
        """Verify what the last work left. Raises EngineError where the accounting is broken."""
        self._check_due = None
        self._scheduler.check()

    def _send(self) -> None:
        if self._outbox:
            frames, self._outbox = [_encode(message) for message in self._outbox], []
            send = self._socket.send  # send_multipart takes four times as long: it combines two enums for every frame
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], _LAST)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _take(self, frame: bytes) -> None:
        try:
            message = decode_to_engine(frame)
        except (msgspec.DecodeError, ValueError) as error:
            self._refuse_unreadable(frame, error)
            return
        match message:
            case AddRequest():
                self._add(message)
            case Abort():
                for request_id in message.request_ids:
                    self._scheduler.abort(request_id)
                    self._held = [add for add in self._held if add.request_id != request_id]
            case GetStats():
                self._say_stats()
            case Shutdown():
                self._stopping = True

    def _add(self, add: AddRequest) -> None:
        if add.params.structured_output is not None and not self._warmed.is_set():
            self._hold(add)
            return
        try:
            self._scheduler.add(add)
        except PhalanxError as error:
            self._say(RequestRejected(add.request_id, error.to_wire()))

    def _hold(self, add: AddRequest) -> None:
        """Let a guided request wait until grammars are loaded; the others go on meanwhile."""

        def load() -> None:
            try:
                self._warm()
            except Exception as error:  # the first matcher fails in the same way, and refuses its request
                logger.warning("grammars cannot be loaded: %r", error)
            self._warmed.set()
            self._wake()

        self._held.append(add)
        if len(self._held) == 1:
            threading.Thread(target=load, name="load grammars", daemon=True).start()

    def _refuse_unreadable(self, frame: bytes, error: Exception) -> None:
        """A request that does not decode is refused by its id, if that much can be read; the engine goes on."""
        logger.warning("a message of %d bytes does not decode: %s", len(frame), error)
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            parts = msgspec.msgpack.decode(frame)
            if isinstance(parts, list) and len(parts) > 1 and parts[0] == "Add" and isinstance(parts[1], str):
                refusal = OptionError(f"request {parts[1]!r} was sent", why=str(error), next="send what messages.Add holds")
                self._say(RequestRejected(parts[1], refusal.to_wire()))

    def _refuse_everybody(self, error: PhalanxError) -> None:
        wire = error.to_wire()
        for request_id in [*self._scheduler.open_ids, *(add.request_id for add in self._held)]:
            self._say(RequestRejected(request_id, wire))

    def _say(self, message: EngineToClient) -> None:
        self._outbox.append(message)

    def _say_stats(self) -> None:
        stats = self._scheduler.stats()
        stats.rank_bytes, stats.allreduce, stats.ran = self._executor.stats()
        self._say(stats)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")


def _unexpected(raised: Exception) -> EngineError:
    """A bug of ours, as an error that an asker can read."""
    logger.exception("the engine cannot go on")
    return EngineError("a request was running", held="the engine met an error that it does not know", why=repr(raised),
                       next="report this with the engine's log")  # fmt: skip
