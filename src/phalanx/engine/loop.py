# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: it connects one client with the ranks, and never waits for one of them alone.

client -> (AddRequest, Abort, ...) -> scheduler -> Step -> executor -> StepResult -> scheduler -> (RequestUpdate, ...) -> client
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from phalanx.engine.adapter_loads import AdapterLoads, ReadFile, no_adapter
from phalanx.engine.adapters import Adapter
from phalanx.engine.grammar import TokenMatcher, request_matcher
from phalanx.engine.grammar_threads import GrammarThreads
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
    LoadAdapter,
    NextTokens,
    RebalanceExperts,
    RequestRejected,
    RequestUpdate,
    Shutdown,
    Sleep,
    Step,
    Stopped,
    UnloadAdapter,
    UpdateWeights,
    Vocabulary,
    WakeUp,
)
from phalanx.engine.model_changes import ModelChanges
from phalanx.engine.step_draft import price_line
from phalanx.engine.step_scheduler import StepScheduler
from phalanx.engine.step_times import StepLoad
from phalanx.engine.watch_clock import WatchClock
from phalanx.errors import EngineClosed, EngineError, LogitsNotFinite, OptionError, PhalanxError, RequestError
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
STALLED_PART, STALLED_SECONDS = 0.5, 5.0
"""Work stalls, and /ready says so, once a step has taken this part of its limit, or no step has been in flight for so long."""
_FRAMES_PER_ITERATION = 512  # so that a flood of messages does not keep the ranks waiting
RECEIVE_SECONDS = 0.005
"""Time for the messages of one iteration, after which the rest waits for the next: a long prompt takes a millisecond."""

_encode = msgspec.msgpack.Encoder().encode
decode_client_message = msgspec.msgpack.Decoder(ClientToEngine).decode


class ClientSocket(Protocol):
    """What the loop needs of its socket to the client: a zmq DEALER, or a fake that a zmq.Poller accepts."""

    def recv_multipart(self, flags: int = 0) -> list[bytes]: ...
    def send(self, data: bytes, flags: int = 0) -> Any: ...


class Loop:
    """Runs requests until it is told to stop or the ranks fail. Every message is a frame; an iteration sends its frames as one
    multipart message.

    `rebalance_every`: seconds between rebalances of `experts`; None: none by itself. `backlog`: frames that came before the loop
    began. `vocabulary` gets what the client sends for structured output, unless it is there. `folder`: of the weights;
    `change_timeout`: of a step that changes the model. `read_adapter`: see `AdapterLoads`.
    """

    def __init__(
        self, socket: ClientSocket, executor: Executor, scheduler: StepScheduler[Any], *, backlog: Iterable[bytes] = (),
        vocabulary: Future[Vocabulary] | None = None, experts: ExpertLoads | None = None,
        rebalance_every: float | None = None, folder: str = "", change_timeout: float = math.inf,
        read_adapter: ReadFile = no_adapter, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._socket, self._executor, self._scheduler, self._clock = socket, executor, scheduler, clock
        self._vocabulary = vocabulary or Future()
        self._experts, self._rebalance_every = experts, rebalance_every
        self._watch, self._times, self._change_timeout = WatchClock(clock), scheduler.times, change_timeout
        self._changes = ModelChanges(scheduler, self._queue, clock, folder=folder, weights_read=self._weights_read)
        self._rebalance_due = clock() + (rebalance_every or 0.0)
        self._frames = deque(backlog)
        self._outbox: list[EngineToClient] = []  # encoded when they are sent, after the ranks have their step
        self._scores: dict[str, deque[RequestUpdate]] = {}  # of each request whose scores are not all sent: its next updates
        self._heartbeat_due = self._stats_due = self._scores_due = clock()
        self._progressed = self._watch.look()  # when the engine was idle, or a step ended
        self._stalled = ""
        self._idle_reported = True  # the client has the statistics of the idle engine
        self._check_due: float | None = None  # when the accounting is to be checked
        self._stopping = self._price_told = self._broken_bound_told = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._polled: list[Any] = []
        self._poller = zmq.Poller()
        self._opening: dict[str, tuple[AddRequest, Adapter | None]] = {}  # constrained requests whose grammars are being read
        self._loads = AdapterLoads(scheduler.adapters, executor, read_adapter, self._wake)
        self._openings = GrammarThreads(self._wake)
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
        if self._opening or self._openings.busy:  # a request that was aborted leaves its call behind
            self._add_opened()
        if self._loads.busy:
            for answer in self._loads.poll(self._open_adapters):
                self._queue(answer)

    def _process_results(self) -> None:
        results = self._executor.collect()
        if results:
            self._progressed = self._watch.look()
        for result in results:
            if self._experts is not None:
                self._experts.step_done(result.number, result.moved)
            for message in self._scheduler.process_result(result):
                self._queue(message)
            self._changes.step_done(result)
            self._times.ended(result.number, self._progressed, alone=len(results) == 1)
        if self._scheduler.grammar_calls.busy:
            self._scheduler.grammar_calls.wait()
            for message in self._scheduler.process_grammar_calls():
                self._queue(message)

    def _submit(self) -> None:
        if (step := self._changes.next_step()) is not None:
            self._times.submitted(step.number, None, self._watch.look())
            step.limit = self._change_timeout
            self._executor.submit(step)
        if self._changes.paused:
            return
        while (step := self._scheduler.schedule(int(self._clock() * 1e6))) is not None:
            self._submit_step(step)
        if self._experts is not None and self._experts.moving and not self._scheduler.steps_in_flight:
            self._move_without_requests()

    def _submit_step(self, step: Step) -> None:
        """Submit a step, with what ranks are to do before it."""
        if self._experts is not None and self._experts.moving and (move := self._experts.next_move(step.number)) is not None:
            step.before.append(move)
        alone = not step.before and not any(batch.loaded for batch in step.batches)
        load = StepLoad.of(step, self._times.prompt_wave) if alone else None
        step.limit = self._times.submitted(step.number, load, self._watch.look())
        self._executor.submit(step)

    def _move_without_requests(self) -> None:
        """No request runs: the moves go on in steps of their own."""
        step = self._scheduler.empty_step()
        if step is not None:
            self._submit_step(step)

    def _report(self) -> None:
        now = self._clock()
        if now >= self._heartbeat_due:
            self._queue(Heartbeat())
            self._heartbeat_due = now + HEARTBEAT_SECONDS
        stalled = self._why_stalled(self._watch.look())
        if bool(stalled) != bool(self._stalled):
            self._stats_due = now
        self._stalled = stalled
        if not self._scheduler.idle:
            self._idle_reported, self._check_due = False, None
            if self._rebalance_every is not None and now >= self._rebalance_due:
                self._begin_rebalance()
                self._rebalance_due = now + self._rebalance_every
            if now >= self._stats_due:
                self._tell_broken_bound()
                self._queue_stats()
                self._stats_due = now + STATS_SECONDS
        elif not self._idle_reported:
            self._idle_reported, self._check_due = True, now + QUIET_SECONDS
            self._tell_price()
            self._queue_stats()  # the gauges of an idle engine

    def _tell_price(self) -> None:
        """Log once what the bound on gaps costs, when steps were bounded and enough is known to tell."""
        pace, options = next((part.pace for part in self._scheduler.parts if part.pace is not None), None), self._scheduler.options
        if pace is not None and not self._price_told:
            line = price_line(self._times, pace, options.max_seq_len - 1, options.max_num_tokens)
            self._price_told = bool(line)
            if line:
                logger.info("%s", line)

    def _tell_broken_bound(self) -> None:
        """Log once that no step with a prompt can keep the bound on gaps."""
        for part in self._scheduler.parts:
            if part.pace is not None and part.pace.shortest is not None and not self._broken_bound_told:
                self._broken_bound_told = True
                logger.warning(
                    "max_decode_gap: the bound of %.0f ms cannot be kept: beside %d decode rows, the shortest step with a prompt "
                    "takes %.0f ms here, as its context is that long, or decodes take as much; such steps take a quarter more, so "
                    "that prompts go on", 1e3 * part.pace.bound, part.pace.decodes.tokens, 1e3 * part.pace.shortest,
                )  # fmt: skip

    def _why_stalled(self, now: float) -> str:
        """Why work waits and no step ends; empty while steps do, or there is no work."""
        if self._scheduler.idle or self._changes.state.level:
            self._progressed = now
            return ""
        oldest = self._times.oldest(now)
        if oldest is None:
            seconds = now - self._progressed
            return "" if seconds < STALLED_SECONDS else f"requests wait, and no step has begun for {seconds:.0f} s"
        number, seconds, limit = oldest
        if seconds < STALLED_PART * limit:
            return ""
        return f"step {number} has run for {seconds:.0f} s and has not ended, which is longer than such steps take here"

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
                    self._opening.pop(request_id, None)
                    self._scores.pop(request_id, None)
            case LoadAdapter():
                if (answer := self._loads.load(message)) is not None:
                    self._queue(answer)
            case UnloadAdapter():
                self._queue(self._loads.unload(message))
            case GetStats():
                self._queue_stats()
            case GetExperts():
                self._queue_experts()
            case RebalanceExperts():
                self._begin_rebalance()
                self._queue_experts()
            case Sleep() | WakeUp() | UpdateWeights():
                self._changes.add(message)
            case Vocabulary():
                if not self._vocabulary.done():
                    self._vocabulary.set_result(message)
            case Shutdown():
                self._stopping = True

    def _add(self, add: AddRequest) -> None:
        try:
            if add.params.structured_output is not None:
                self._open(add)
            else:
                self._accept(add)
        except PhalanxError as error:
            self._queue(RequestRejected(add.request_id, error.to_wire()))

    def _accept(self, add: AddRequest, matcher: TokenMatcher | None = None, adapter: Adapter | None = None) -> None:
        self._changes.require_awake()
        self._scheduler.add(add, matcher, adapter)

    def _open(self, add: AddRequest) -> None:
        """Read the grammar of a request on a thread. The request is queued afterwards."""
        if add.request_id in self._opening:
            raise RequestError(f"request id {add.request_id!r} is in use", next="give each request its own id")
        self._opening[add.request_id] = add, self._scheduler.adapters.named(add.params.adapter)

        def work() -> TokenMatcher | None:
            matcher = request_matcher(add, self._scheduler.open_matcher)
            if matcher is not None:
                matcher.mask()
            return matcher

        self._openings.begin(add, work, quick=False)

    def _add_opened(self) -> None:
        """Queue the requests whose grammars have been read, except those that were aborted."""
        for call in self._openings.collect():
            add: AddRequest = call.owner
            opening, adapter = self._opening.get(add.request_id, (None, None))
            if opening is not add:
                continue
            del self._opening[add.request_id]
            try:
                if call.error is not None:
                    raise call.error
                self._accept(add, call.value, adapter)
            except PhalanxError as error:
                self._queue(RequestRejected(add.request_id, error.to_wire()))

    def _open_adapters(self) -> list[Adapter | None]:
        """The adapter of each request that has come and has not ended."""
        return [*self._scheduler.open_adapters(), *(adapter for _, adapter in self._opening.values())]

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
        for request_id in [*self._scheduler.open_ids, *self._opening]:
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
        elif isinstance(message, NextTokens) and self._scores:
            for update in message.updates():
                self._queue(update)
            return
        elif isinstance(message, RequestRejected):
            self._scores.pop(message.request_id, None)
            if message.error["kind"] == LogitsNotFinite.__name__:
                logger.error("request %s ends: %s", message.request_id, PhalanxError.from_wire(message.error))
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
        stats.stalled = self._stalled
        self._scheduler.count_adapters(stats)
        if self._experts is not None:
            self._experts.update(reported.experts)
        self._queue(stats)

    def _weights_read(self) -> None:
        if self._experts is not None:
            self._experts.begin_placements()

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
