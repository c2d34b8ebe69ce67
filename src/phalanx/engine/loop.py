# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: it connects one client with the ranks, and never waits for one of them alone.

client -> (AddRequest, Abort, ...) -> scheduler -> Step -> executor -> StepResult -> scheduler -> (RequestUpdate, ...) -> client
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from phalanx.engine.grammar import TokenMatcher, request_matcher
from phalanx.engine.grammar_threads import OPEN_SECONDS, SLOW_SECONDS, GrammarThreads, require_room
from phalanx.engine.messages import (
    Abort,
    AddRequest,
    ClientToEngine,
    EngineToClient,
    ExpertStats,
    Failed,
    GetExperts,
    GetStats,
    Heartbeat,
    RebalanceExperts,
    RequestRejected,
    RequestUpdate,
    Shutdown,
    Stopped,
)
from phalanx.engine.scheduler import Scheduler
from phalanx.engine.step_scheduler import StepScheduler
from phalanx.errors import EngineClosed, EngineError, OptionError, PhalanxError, RequestError
from phalanx.log import get_logger

if TYPE_CHECKING:
    from phalanx.engine.executor import Executor
    from phalanx.engine.experts import ExpertLoads

logger = get_logger(__name__)

HEARTBEAT_SECONDS = 1.0
STATS_SECONDS = 0.5
QUIET_SECONDS = 2.0
"""How long the engine must have been idle before the accounting is checked: a request that comes during the check waits for it."""
SCORES_PER_UPDATE = 256
"""Logprobs of a prompt that go to the client in one message: it decodes them in milliseconds."""
SCORES_SECONDS = 0.005
"""Time between two such messages."""
_MORE, _LAST = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)
_FRAMES_PER_ITERATION = 512  # so that a flood of messages does not keep the ranks waiting
RECEIVE_SECONDS = 0.005
"""Time for the messages of one iteration, after which the rest waits for the next: a long prompt takes a millisecond."""

_encode = msgspec.msgpack.Encoder().encode
decode_client_message = msgspec.msgpack.Decoder(ClientToEngine).decode


class ClientSocket(Protocol):
    """What the loop needs of its socket to the client: a zmq DEALER, or a fake that a zmq.Poller accepts."""

    def recv_multipart(self, flags: int = 0) -> list[bytes]: ...
    def send(self, data: bytes, flags: int = 0) -> Any: ...


def warm_grammars() -> None:
    """Import what grammars need, which takes seconds. Only the first constrained request waits for it."""
    from phalanx.engine.grammar import warm

    warm()


class Loop:
    """Runs requests until it is told to stop or the ranks fail. Every message is a frame; an iteration sends its frames as one
    multipart message.

    `rebalance_every`: seconds between two rebalances of `experts`; None: none by itself. `backlog`: frames that came before the
    loop began. `warm` runs on a thread when the first constrained request comes.
    """

    def __init__(
        self, socket: ClientSocket, executor: Executor, scheduler: StepScheduler[Any], *, backlog: Iterable[bytes] = (),
        experts: ExpertLoads | None = None, rebalance_every: float | None = None, warm: Callable[[], None] = warm_grammars,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._socket, self._executor, self._scheduler, self._clock = socket, executor, scheduler, clock
        self._experts, self._rebalance_every = experts, rebalance_every
        self._rebalance_due = clock() + (rebalance_every or 0.0)
        self._frames = deque(backlog)
        self._outbox: list[EngineToClient] = []  # encoded when they are sent, after the ranks have their step
        self._scores: dict[str, deque[RequestUpdate]] = {}  # of each request whose scores are not all sent: its next updates
        self._heartbeat_due = self._stats_due = self._scores_due = clock()
        self._idle_reported = True  # the client has the statistics of the idle engine
        self._check_due: float | None = None  # when the accounting is to be checked
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._polled: list[Any] = []
        self._poller = zmq.Poller()
        self._warm = warm
        self._warmed = threading.Event()
        self._delayed: list[AddRequest] = []  # constrained requests that came before grammars were imported
        self._opening: dict[str, AddRequest] = {}  # constrained requests whose grammars are being read
        self._openings = GrammarThreads(self._wake, call_seconds=OPEN_SECONDS)
        scheduler.grammar_calls.notify = self._wake

    def run(self) -> int:
        """Iterate until the end; returns an exit status, 0 if the engine was asked to end. The executor is shut down then."""
        try:
            while not self._stopping:
                self.iterate()
            if self._check_due is not None:
                self._check()
        except Exception as raised:
            error = raised if isinstance(raised, PhalanxError) else _unexpected(raised)
            self._reject_all(error)
            self._queue(Failed(error.to_wire()))
            self._send()
            self._executor.shutdown()
            return 1
        self._reject_all(EngineClosed("the engine was shut down"))
        self._send()  # before ranks take their time to end
        self._executor.shutdown()
        self._queue(Stopped())
        self._send()
        return 0

    def iterate(self) -> None:
        """One iteration. Results are processed before the next step is made, and the ranks get that step before the client hears of
        the results."""
        self._wait()
        self._receive()
        self._process_results()
        self._submit()
        self._report()
        self._queue_scores()
        self._send()
        if self._check_due is not None and self._clock() >= self._check_due:
            self._check()

    def stop(self) -> None:
        """End `run` after this iteration. May be called from a signal handler or another thread."""
        self._stopping = True
        self._wake()

    # ---- the parts of an iteration -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until something comes from the client or the ranks, or a message is due."""
        waitables = [self._socket, self._wake_read, *self._executor.waitables()]
        if waitables != self._polled:
            self._poller, self._polled = zmq.Poller(), waitables
            for waitable in waitables:
                self._poller.register(waitable, zmq.POLLIN)
        due = min(self._heartbeat_due, (self._check_due or self._heartbeat_due) if self._scheduler.idle else self._stats_due)
        if self._scores:
            due = min(due, self._scores_due)
        seconds = 0.0 if self._frames else max(0.0, due - self._clock())
        if self._scheduler.grammar_calls.busy or self._openings.busy:
            seconds = min(seconds, SLOW_SECONDS)
        self._poller.poll(min(int(seconds * 1000) + 1, 1000) if seconds else 0)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _receive(self) -> None:
        while len(self._frames) < _FRAMES_PER_ITERATION:
            try:
                self._frames += self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
        until = self._clock() + RECEIVE_SECONDS
        while self._frames:
            self._take(self._frames.popleft())
            if self._clock() > until:
                break
        if self._delayed and self._warmed.is_set():
            delayed, self._delayed = self._delayed, []
            for add in delayed:
                self._add(add)
        if self._opening or self._openings.busy:  # a request that was aborted leaves its call behind
            self._add_opened()

    def _process_results(self) -> None:
        for result in self._executor.collect():
            if self._experts is not None:
                self._experts.step_done(result.number, result.moved)
            for message in self._scheduler.process_result(result):
                self._queue(message)
        self._scheduler.grammar_calls.wait()
        for message in self._scheduler.process_grammar_calls():
            self._queue(message)

    def _submit(self) -> None:
        while (step := self._scheduler.schedule()) is not None:
            if self._experts is not None and self._experts.moving:
                step.move = self._experts.next_move(step.number)
            self._executor.submit(step)
        if self._experts is not None and self._experts.moving and not self._scheduler.steps_in_flight:
            self._move_without_requests(self._experts)

    def _move_without_requests(self, experts: ExpertLoads) -> None:
        """No request runs: the moves go on in steps of their own."""
        assert isinstance(self._scheduler, Scheduler), "experts do not move between data-parallel indices"
        step = self._scheduler.empty_step()
        if step is not None:
            step.move = experts.next_move(step.number)
            self._executor.submit(step)

    def _report(self) -> None:
        now = self._clock()
        if now >= self._heartbeat_due:
            self._queue(Heartbeat())
            self._heartbeat_due = now + HEARTBEAT_SECONDS
        if not self._scheduler.idle:
            self._idle_reported, self._check_due = False, None
            if self._rebalance_every is not None and now >= self._rebalance_due:
                self._begin_rebalance()
                self._rebalance_due = now + self._rebalance_every
            if now >= self._stats_due:
                self._queue_stats()
                self._stats_due = now + STATS_SECONDS
        elif not self._idle_reported:
            self._idle_reported, self._check_due = True, now + QUIET_SECONDS
            self._queue_stats()  # the gauges of an idle engine

    def _check(self) -> None:
        """Verify the accounting of blocks and slots. Raises EngineError where it is broken."""
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
            message = decode_client_message(frame)
        except (msgspec.DecodeError, ValueError) as error:
            self._reject_unreadable(frame, error)
            return
        match message:
            case AddRequest():
                self._add(message)
            case Abort():
                for request_id in message.request_ids:
                    self._scheduler.abort(request_id)
                    self._delayed = [add for add in self._delayed if add.request_id != request_id]
                    self._opening.pop(request_id, None)
                    self._scores.pop(request_id, None)
            case GetStats():
                self._queue_stats()
            case GetExperts():
                self._queue_experts()
            case RebalanceExperts():
                self._begin_rebalance()
                self._queue_experts()
            case Shutdown():
                self._stopping = True

    def _add(self, add: AddRequest) -> None:
        if add.params.structured_output is not None and not self._warmed.is_set():
            self._delay(add)
            return
        try:
            if add.params.structured_output is not None:
                self._open(add)
            else:
                self._scheduler.add(add)
        except PhalanxError as error:
            self._queue(RequestRejected(add.request_id, error.to_wire()))

    def _open(self, add: AddRequest) -> None:
        """Read the grammar of a request on a thread: it may have megabytes. The request is queued afterwards."""
        if add.request_id in self._opening:
            raise RequestError(f"request id {add.request_id!r} is in use", next="give each request its own id")
        require_room(self._scheduler.grammar_calls, self._openings)
        self._opening[add.request_id] = add

        def work() -> TokenMatcher | None:
            matcher = request_matcher(add, self._scheduler.open_matcher)
            if matcher is not None:
                matcher.mask()
            return matcher

        self._openings.begin(add, work)

    def _add_opened(self) -> None:
        """Queue the requests whose grammars have been read, except those that were aborted."""
        self._openings.wait()
        for call in self._openings.collect():
            add: AddRequest = call.owner
            if self._opening.get(add.request_id) is not add:
                continue
            del self._opening[add.request_id]
            try:
                if call.error is not None:
                    raise call.error
                self._scheduler.add(add, call.value)
            except PhalanxError as error:
                self._queue(RequestRejected(add.request_id, error.to_wire()))

    def _delay(self, add: AddRequest) -> None:
        """Let a constrained request wait until grammars are imported; the others go on meanwhile."""

        def load() -> None:
            try:
                self._warm()
            except Exception as error:  # the first matcher fails in the same way, and rejects its request
                logger.warning("grammars cannot be loaded: %r", error)
            self._warmed.set()
            self._wake()

        self._delayed.append(add)
        if len(self._delayed) == 1:
            threading.Thread(target=load, name="load grammars", daemon=True).start()

    def _reject_unreadable(self, frame: bytes, error: Exception) -> None:
        """Reject a request that does not decode, if its id can be read; the engine goes on."""
        logger.warning("a message of %d bytes does not decode: %s", len(frame), error)
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            parts = msgspec.msgpack.decode(frame)
            if isinstance(parts, list) and len(parts) > 1 and parts[0] == AddRequest.__name__ and isinstance(parts[1], str):
                rejection = OptionError(
                    f"request {parts[1]!r} cannot be decoded", why=str(error), next="send the fields of messages.AddRequest"
                )
                self._queue(RequestRejected(parts[1], rejection.to_wire()))

    def _reject_all(self, error: PhalanxError) -> None:
        wire = error.to_wire()
        for request_id in [*self._scheduler.open_ids, *(add.request_id for add in self._delayed), *self._opening]:
            self._queue(RequestRejected(request_id, wire))

    def _queue(self, message: EngineToClient) -> None:
        if isinstance(message, RequestUpdate):
            id, scores = message.request_id, message.prompt_logprobs or []
            if len(scores) > SCORES_PER_UPDATE:
                parts = [scores[start : start + SCORES_PER_UPDATE] for start in range(0, len(scores), SCORES_PER_UPDATE)]
                message.prompt_logprobs = parts[-1]
                self._scores[id] = deque([*(RequestUpdate(id, [], prompt_logprobs=part) for part in parts[:-1]), message])
                return
            if id in self._scores:
                self._scores[id].append(message)
                return
        elif isinstance(message, RequestRejected):
            self._scores.pop(message.request_id, None)
        self._outbox.append(message)

    def _queue_scores(self) -> None:
        """The next part of a long prompt's scores. The client decodes messages in their order, at milliseconds for each part: all
        at once would hold up the tokens of other requests behind them."""
        if self._scores and (now := self._clock()) >= self._scores_due:
            id = next(iter(self._scores))
            parts = self._scores.pop(id)
            self._outbox.append(parts.popleft())
            if parts:
                self._scores[id] = parts  # behind the other requests'
            self._scores_due = now + SCORES_SECONDS

    def _queue_stats(self) -> None:
        stats, reported = self._scheduler.stats(), self._executor.stats()
        stats.rank_bytes, stats.allreduce, stats.ran, stats.rank_gauges = reported[:4]
        if self._experts is not None:
            self._experts.update(reported.experts)
        self._queue(stats)

    def _begin_rebalance(self) -> None:
        if self._experts is not None:
            self._experts.update(self._executor.stats().experts)
            self._experts.begin_rebalance()

    def _queue_experts(self) -> None:
        if self._experts is not None:
            self._experts.update(self._executor.stats().experts)
        self._queue(ExpertStats() if self._experts is None else self._experts.stats())

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")


def _unexpected(raised: Exception) -> EngineError:
    """The error that clients get for a bug."""
    logger.exception("the engine cannot go on")
    return EngineError("the engine failed with an unexpected error", why=repr(raised), next="report this with the engine's log")
