# SPDX-License-Identifier: Apache-2.0
"""Sleep, wake-up and new weights of a running engine: `ModelChanges` makes one change after the other, by all ranks or by none.

    check (new weights only) -> drain -> apply -> end

Each of check, apply and end is a step without rows. Between drain and end no request runs, so that none is answered by two sets of
weights. Where a rank cannot apply a change, the end undoes it on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from phalanx.engine.messages import (
    CheckWeights,
    EndChange,
    EngineToClient,
    GiveMemory,
    ModelChange,
    ModelState,
    ReadWeights,
    RequestRejected,
    RequestUpdate,
    Sleep,
    Step,
    StepResult,
    TakeMemory,
    UpdateWeights,
    WakeUp,
    Work,
)
from phalanx.engine.step_scheduler import StepScheduler
from phalanx.errors import EngineAsleep, PhalanxError, RequestError
from phalanx.log import get_logger

logger = get_logger(__name__)

LEVELS = (1, 2)
"""Of sleep: weights in the host's memory, or discarded."""

Stage = Literal["check", "drain", "apply", "end"]


@dataclass
class _Change:
    """The change under way. step: in flight, that does the work of the stage. error: of the rank that could not apply it."""

    message: ModelChange
    stage: Stage
    step: int | None = None
    error: PhalanxError | None = None
    freed: dict[int, int] = field(default_factory=dict)
    began: float = 0.0


class ModelChanges:
    """Of one engine. folder: of the weights. send: to the client. weights_read: called when ranks have read weights, whose experts
    are at their first places then."""

    def __init__(
        self, scheduler: StepScheduler[Any], send: Callable[[EngineToClient], None], clock: Callable[[], float], *,
        folder: str = "", weights_read: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.state = ModelState(folder=folder)
        self._scheduler, self._send, self._clock, self._weights_read = scheduler, send, clock, weights_read
        self._coming: deque[ModelChange] = deque()
        self._change: _Change | None = None

    # ---- what the loop asks ------------------------------------------------------------------------------------------

    def add(self, message: ModelChange) -> None:
        """Make this change after those that came before. A sleep that ends requests does so at once, where another change waits for
        them."""
        waits = self._change is not None and self._change.stage == "drain"
        if waits and isinstance(message, Sleep) and message.mode == "abort" and message.level in LEVELS:
            self._abort_begun()
        self._coming.append(message)
        self._begin_next()

    @property
    def paused(self) -> bool:
        """Whether no request may run."""
        change = self._change
        if self.state.level or change is None:
            return self.state.level > 0
        return change.stage in ("apply", "end") or (change.stage == "drain" and _mode(change.message) == "keep")

    @property
    def stage(self) -> str:
        """What is under way, in words; empty where nothing is."""
        return "" if self._change is None else _WORDS[type(self._change.message)]

    def require_awake(self) -> None:
        """Raise EngineAsleep where requests are rejected: from the moment when a sleep was asked for."""
        if self.state.level or (self._change is not None and isinstance(self._change.message, Sleep)):
            raise _asleep(self.state.level)

    def next_step(self) -> Step | None:
        """The step that goes on with the change; None where it waits for something, or there is none."""
        change = self._change
        if change is None or change.step is not None:
            return None
        if change.stage == "drain" and self._is_drained(change):
            change.stage, change.began = "apply", self._clock()
        work = self._work(change)
        step = None if work is None else self._scheduler.empty_step()
        if step is not None and work is not None:
            step.before.append(work)
            change.step = step.number
        return step

    def step_done(self, result: StepResult) -> None:
        """Take in the result of a step, which may be the change's."""
        change = self._change
        if change is None or result.number != change.step:
            return
        change.step = None
        failed = {rank: work.error for rank, work in sorted(result.works.items()) if work.error is not None}
        if failed:
            change.error = _error_of(failed, len(result.works))
        match change.stage:
            case "check" if change.error is not None:
                self._finish(change)
            case "check":
                self._drain(change)
            case "apply":
                change.freed = {rank: work.freed for rank, work in result.works.items()}
                change.stage = "end"
            case _:
                self._finish(change)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _begin_next(self) -> None:
        while self._coming and self._change is None:
            message = self._coming.popleft()
            try:
                if self._is_needed(message):
                    change = self._change = _Change(message, "check" if isinstance(message, UpdateWeights) else "drain")
                    logger.info("the engine %s", self.stage)
                    if change.stage == "drain":
                        self._drain(change)
                    return
            except PhalanxError as error:
                self._answer(error)
                continue
            self.state.bytes, self.state.seconds = {}, 0.0
            self._answer(None)

    def _is_needed(self, message: ModelChange) -> bool:
        """Whether the message changes anything. Raises RequestError for one that cannot be honoured."""
        state = self.state
        match message:
            case Sleep():
                if message.level not in LEVELS:
                    raise RequestError(
                        f"level={message.level} is no level of sleep", next="use 1 (weights to host memory) or 2 (discarded)"
                    )
                ends = message.mode == "abort" and self._kept > 0
                return ends or state.weights or state.kv_cache or message.level > state.level
            case WakeUp():
                return (message.weights and not state.weights) or (message.kv_cache and not state.kv_cache)
            case UpdateWeights():
                if message.mode == "keep":
                    raise RequestError(
                        "mode='keep' is not possible for new weights",
                        why="a request would be answered by a mix of old and new ones", next="use 'wait' or 'abort'",
                    )  # fmt: skip
                if self._kept and message.mode != "abort":
                    raise RequestError(
                        f"{self._kept} requests were kept by the sleep, and go on after the wake-up",
                        why="they would be answered by a mix of old and new weights", next="wake up, or end them with mode 'abort'",
                    )  # fmt: skip
                return True

    def _drain(self, change: _Change) -> None:
        """Deal with the requests that run or wait."""
        change.stage = "drain"
        scheduler, mode = self._scheduler, _mode(change.message)
        if not (isinstance(change.message, WakeUp) or self.state.level or mode == "keep"):
            scheduler.hold()
            if isinstance(change.message, Sleep):
                for request in list(scheduler.held_requests):
                    scheduler.abort(request.id)
                    self._send(RequestRejected(request.id, _asleep(0).to_wire()))
        if mode == "abort":
            self._abort_begun()

    def _abort_begun(self) -> None:
        """End the requests that no change holds."""
        for id in self._scheduler.begun_ids:
            self._scheduler.abort(id)
            self._send(RequestUpdate(id, [], finish_reason="abort"))

    @property
    def _kept(self) -> int:
        """Requests that go on after the wake-up: asleep, there are no others."""
        return len(self._scheduler.open_ids) if self.state.level else 0

    def _is_drained(self, change: _Change) -> bool:
        scheduler = self._scheduler
        if scheduler.steps_in_flight:
            return False
        if self.state.level or isinstance(change.message, WakeUp):
            return True
        if _mode(change.message) == "keep":
            scheduler.stop_running()
            return True
        return scheduler.drained

    def _work(self, change: _Change) -> Work | None:
        message = change.message
        match change.stage:
            case "check":
                return CheckWeights(message.folder) if isinstance(message, UpdateWeights) else None
            case "drain":
                return None
            case "end":
                return EndChange(change.error is None)
            case "apply":
                match message:
                    case Sleep():
                        return GiveMemory(keep=message.level == 1)
                    case WakeUp():
                        return TakeMemory(message.weights, message.kv_cache)
                    case UpdateWeights():
                        return ReadWeights(message.folder)

    def _finish(self, change: _Change) -> None:
        self._change = None
        state, message = self.state, change.message
        state.bytes, state.seconds = {}, 0.0
        if change.error is None:
            state.bytes, state.seconds = change.freed, self._clock() - change.began
            match message:
                case Sleep():
                    level = message.level if state.weights else max(message.level, state.level)  # discarded ones stay so
                    state.level, state.weights, state.kv_cache = level, False, False
                    self._scheduler.forget_prefixes()
                case WakeUp():
                    if message.weights and not state.weights and state.level == 2:
                        self._weights_read()
                    state.weights, state.kv_cache = state.weights or message.weights, state.kv_cache or message.kv_cache
                case UpdateWeights():
                    state.weights, state.folder, state.generation = True, message.folder, state.generation + 1
                    self._scheduler.forget_prefixes()
                    self._weights_read()
            if state.weights and state.kv_cache:
                state.level = 0
        if not state.level:
            self._scheduler.resume()
        self._answer(change.error)
        self._begin_next()

    def _answer(self, error: PhalanxError | None) -> None:
        state = self.state
        if error is not None:
            logger.error("the model stays as it is: %s", error)
        else:
            what = f"asleep at level {state.level}" if state.level else f"awake, on generation {state.generation} of the weights"
            logger.info(
                "the engine is %s; freed: %s",
                what,
                ", ".join(f"rank {rank} {n:,} bytes" for rank, n in state.bytes.items()) or "nothing",
            )
        state.kept = self._kept
        self._send(msgspec.structs.replace(state, error=None if error is None else error.to_wire()))


_WORDS: dict[type[ModelChange], str] = {Sleep: "falls asleep", WakeUp: "wakes up", UpdateWeights: "gets new weights"}


def _mode(message: ModelChange) -> str:
    return "wait" if isinstance(message, WakeUp) else message.mode


def _asleep(level: int) -> EngineAsleep:
    state = f"asleep at level {level}" if level else "falling asleep"
    return EngineAsleep("the engine takes no requests", held=f"it is {state}", next="POST /wake_up")


def _error_of(failed: dict[int, dict[str, str]], ranks: int) -> PhalanxError:
    """The error of the first rank, with the number of the others."""
    rank, wire = next(iter(failed.items()))
    more = f" (and {len(failed) - 1} more of {ranks} ranks)" if len(failed) > 1 else ""
    return PhalanxError.from_wire({**wire, "failure": f"rank {rank}{more}: {wire['failure']}"})
