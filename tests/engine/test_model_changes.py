# SPDX-License-Identifier: Apache-2.0
"""A change of the model is made by all ranks or by none, and no request runs meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config import SamplingParams
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import (
    AddRequest,
    CheckWeights,
    EndChange,
    GiveMemory,
    ModelState,
    ReadWeights,
    RequestMode,
    RequestRejected,
    RequestUpdate,
    RowResult,
    Sleep,
    Step,
    StepResult,
    TakeMemory,
    UpdateWeights,
    WakeUp,
    WorkResult,
)
from phalanx.engine.model_changes import ModelChanges
from phalanx.engine.scheduler import Scheduler
from phalanx.errors import WeightError
from tests.support.engine_client import SIZES

FAILED = {1: WeightError("a tensor is missing").to_wire()}


class Engine:
    """The changes of an engine, whose ranks do what a test says."""

    def __init__(self, indices: int = 1) -> None:
        options = SchedulerOptions(**SIZES, vocab_size=50)
        self.scheduler: Any = Scheduler(options) if indices == 1 else DpScheduler(options, indices)
        self.sent: list[Any] = []
        self.changes = ModelChanges(self.scheduler, self.sent.append, lambda: 0.0)

    def works(self, errors: dict[type, dict[int, dict[str, str]]] | None = None) -> list[Any]:
        """Run steps until no change goes on; the works that ranks did."""
        works = []
        while (step := self.changes.next_step()) is not None:
            assert not any(batch.rows for batch in step.batches)
            (work,) = step.before
            works.append(work)
            failed = (errors or {}).get(type(work), {})
            self.end(step, {rank: WorkResult(failed.get(rank), 7) for rank in range(2)})
        return works

    def end(self, step: Step, works: dict[int, WorkResult]) -> None:
        result = StepResult(step.number, [[] for _ in step.batches], works=works)
        assert self.scheduler.process_result(result) == []
        self.changes.step_done(result)

    @property
    def state(self) -> ModelState:
        return [message for message in self.sent if isinstance(message, ModelState)][-1]


@pytest.mark.parametrize("indices", [1, 2])
def test_a_change_ends_once_all_ranks_have_made_it(indices: int) -> None:
    engine = Engine(indices)
    engine.changes.add(UpdateWeights("new"))
    assert engine.works() == [CheckWeights("new"), ReadWeights("new"), EndChange(True)]
    assert (engine.state.error, engine.state.folder, engine.state.generation) == (None, "new", 1)
    engine.changes.add(Sleep(1))
    engine.changes.add(WakeUp())
    assert engine.works() == [GiveMemory(keep=True), EndChange(True), TakeMemory(True, True), EndChange(True)]
    assert (engine.state.level, engine.changes.paused) == (0, False)


@pytest.mark.parametrize("where", [CheckWeights, ReadWeights])
def test_what_one_rank_cannot_do_none_does(where: type) -> None:
    engine = Engine()
    engine.changes.add(UpdateWeights("new"))
    works = engine.works({where: FAILED})
    assert works == [CheckWeights("new"), *([ReadWeights("new"), EndChange(False)] if where is ReadWeights else [])]
    assert engine.state.error is not None
    assert engine.state.error["failure"] == "rank 1: a tensor is missing"
    assert (engine.state.folder, engine.state.generation, engine.changes.paused) == ("", 0, False)


def test_requests_that_run_finish_first_and_those_that_wait_come_after() -> None:
    engine = Engine()
    scheduler = engine.scheduler
    for name in ("first", "second"):
        scheduler.add(AddRequest(name, [1, 2, 3], SamplingParams(max_tokens=1)))
        if name == "first":
            running = scheduler.schedule()
    engine.changes.add(UpdateWeights("new"))
    check = engine.changes.next_step()
    assert check is not None
    scheduler.add(AddRequest("third", [1, 2, 3], SamplingParams(max_tokens=1)))
    (update,) = scheduler.process_result(StepResult(running.number, [[RowResult([5])]]))
    assert update.finish_reason == "length"
    engine.end(check, {0: WorkResult()})
    assert engine.works() == [ReadWeights("new"), EndChange(True)]
    assert scheduler.open_ids == ["second", "third"]
    step = scheduler.schedule()
    assert len(step.batches[0].rows) == 2


def test_a_held_request_can_be_aborted_and_sleep_rejects_it() -> None:
    engine = Engine()
    engine.scheduler.hold()
    for name in ("one", "two"):
        engine.scheduler.add(AddRequest(name, [1, 2, 3], SamplingParams()))
    engine.scheduler.abort("one")
    engine.changes.add(Sleep(2))
    (rejected,) = [message for message in engine.sent if isinstance(message, RequestRejected)]
    assert (rejected.request_id, rejected.error["kind"]) == ("two", "EngineAsleep")
    assert engine.works() == [GiveMemory(keep=False), EndChange(True)]
    assert engine.scheduler.idle


def ended(engine: Engine) -> list[tuple[str, str | None]]:
    return [(message.request_id, message.finish_reason) for message in engine.sent if isinstance(message, RequestUpdate)]


@pytest.mark.parametrize("change", [Sleep(1, "abort"), UpdateWeights("new", "abort")])
def test_kept_requests_end_where_that_is_asked_for(change: Sleep | UpdateWeights) -> None:
    engine = Engine()
    engine.scheduler.add(AddRequest("kept", [1, 2, 3], SamplingParams()))
    engine.changes.add(Sleep(1, "keep"))
    engine.works()
    assert engine.state.kept == 1
    engine.changes.add(UpdateWeights("new"))
    assert "wake up, or end them with mode 'abort'" in str(engine.state.error)
    engine.changes.add(change)
    engine.works()
    assert ended(engine) == [("kept", "abort")]
    assert (engine.state.error, engine.state.kept, engine.state.level) == (None, 0, 1)
    assert engine.scheduler.idle
    engine.changes.add(UpdateWeights("new"))
    engine.works()
    assert engine.state.error is None


def test_a_kept_request_whose_client_has_left_keeps_no_new_weights_away() -> None:
    engine = Engine()
    engine.scheduler.add(AddRequest("kept", [1, 2, 3], SamplingParams()))
    engine.changes.add(Sleep(2, "keep"))
    engine.works()
    engine.scheduler.abort("kept")
    engine.changes.add(UpdateWeights("new"))
    engine.works()
    assert (engine.state.error, engine.state.kept, engine.state.generation) == (None, 0, 1)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_sleep_that_ends_requests_does_not_wait_for_them_behind_another_change(mode: RequestMode) -> None:
    engine = Engine()
    for name in ("runs", "waits"):
        engine.scheduler.add(AddRequest(name, [1, 2, 3], SamplingParams(max_tokens=40)))
        if name == "runs":
            running = engine.scheduler.schedule()
    engine.changes.add(UpdateWeights("new"))
    check = engine.changes.next_step()
    engine.scheduler.process_result(StepResult(running.number, [[RowResult([5])]]))
    assert check is not None
    engine.end(check, {0: WorkResult()})
    assert engine.changes.next_step() is None, "it waits for the request that runs"
    engine.changes.add(Sleep(1, mode))
    assert ended(engine) == ([("runs", "abort")] if mode == "abort" else [])
    if mode == "abort":
        assert engine.works() == [ReadWeights("new"), EndChange(True), GiveMemory(keep=True), EndChange(True)]
        assert [message.request_id for message in engine.sent if isinstance(message, RequestRejected)] == ["waits"]


def test_an_update_that_ends_requests_leaves_those_that_no_step_has_begun() -> None:
    engine = Engine()
    for name in ("runs", "waits"):
        engine.scheduler.add(AddRequest(name, [1, 2, 3], SamplingParams(max_tokens=40)))
        if name == "runs":
            running = engine.scheduler.schedule()
    engine.changes.add(UpdateWeights("new", "abort"))
    check = engine.changes.next_step()
    engine.scheduler.process_result(StepResult(running.number, [[RowResult([5])]]))
    assert check is not None
    engine.end(check, {0: WorkResult()})
    assert ended(engine) == [("runs", "abort")]
    assert engine.works() == [ReadWeights("new"), EndChange(True)]
    assert engine.scheduler.open_ids == ["waits"]


def test_the_prefix_cache_is_forgotten_with_the_weights_that_made_it() -> None:
    engine = Engine()
    prompt = list(range(20))

    def cached() -> int:
        engine.scheduler.add(AddRequest("a", prompt, SamplingParams(max_tokens=1)))
        step = engine.scheduler.schedule()
        (update,) = engine.scheduler.process_result(StepResult(step.number, [[RowResult([5])]]))
        return int(update.cached_tokens)

    assert [cached(), cached()] == [0, 16]
    engine.changes.add(UpdateWeights("new"))
    engine.works({ReadWeights: FAILED})
    assert cached() == 16  # the old weights have stayed
    engine.changes.add(UpdateWeights("new"))
    engine.works()
    assert [cached(), cached()] == [0, 16]
    engine.scheduler.check()
