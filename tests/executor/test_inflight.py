# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest

from phalanx.engine.messages import RowResult
from phalanx.errors import StepDiverged
from phalanx.executor.inflight import InFlightSteps, OldestStep
from phalanx.executor.protocol import StepDone
from phalanx.layout.layout import Layout

ROWS = [RowResult(tokens=[7])]


def in_flight(layout: Layout, *numbers: int) -> InFlightSteps:
    steps = InFlightSteps(layout)
    for number in numbers:
        steps.submitted(number, b"d%d" % number, 0.0)
    return steps


def test_a_step_is_handed_out_when_the_last_stage_agrees_and_in_order() -> None:
    steps = in_flight(Layout(pp=2, tp=2), 1, 2)
    steps.record(StepDone(2, 2, b"d2", 5, ROWS), 0.0)
    steps.record(StepDone(3, 2, b"d2", 5), 0.0)
    assert steps.completed() == []
    steps.record(StepDone(2, 1, b"d1", 5, ROWS), 0.0)
    assert steps.completed() == []
    steps.record(StepDone(3, 1, b"d1", 5), 0.0)
    assert [(result.number, result.batches) for result in steps.completed()] == [(1, [ROWS]), (2, [ROWS])]
    assert steps.completed() == []
    assert steps.oldest(100.0) == OldestStep(1, 100.0, math.inf, [0, 1])
    for number in (1, 2):
        for rank in (0, 1):
            steps.record(StepDone(rank, number, b"d%d" % number), 0.0)
    assert steps.completed() == []
    assert steps.oldest(100.0) is None


def test_each_data_parallel_index_has_its_results() -> None:
    steps = in_flight(Layout(dp=2), 1)
    steps.record(StepDone(1, 1, b"d1", 9, [RowResult(tokens=[9])]), 0.0)
    steps.record(StepDone(0, 1, b"d1", 8, [RowResult(tokens=[8])]), 0.0)
    (result,) = steps.completed()
    assert [[row.tokens for row in rows] for rows in result.batches] == [[[8]], [[9]]]


def test_a_move_takes_as_long_as_on_the_slowest_rank() -> None:
    """Also where that is one of an earlier stage, whose report comes after those of the last."""
    steps = InFlightSteps(Layout(pp=2, tp=2))
    steps.submitted(1, b"d1", 0.0, moves=True)
    for rank, moved in ((2, None), (3, None), (0, 0.25)):
        steps.record(StepDone(rank, 1, b"d1", 5 if rank > 1 else None, ROWS if rank == 2 else None, moved), 0.0)
        assert steps.completed() == []
    steps.record(StepDone(1, 1, b"d1", None, None, 0.125), 0.0)
    assert [result.moved for result in steps.completed()] == [0.25]


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (StepDone(1, 1, b"d1", 6), "rank 1 sampled other tokens than rank 0 in step 1"),
        (StepDone(1, 1, b"xx", 5), "rank 1 ran step 1 with digest"),
        (StepDone(1, 2, b"d2", 5), r"rank 1 reports step 2, which is not in flight on it; steps in flight: \[1\]"),
        (StepDone(0, 1, b"d1", 5), "rank 0 reports step 1"),
    ],
)
def test_divergence_names_the_rank(done: StepDone, message: str) -> None:
    steps = in_flight(Layout(tp=2), 1)
    steps.record(StepDone(0, 1, b"d1", 5, ROWS), 0.0)
    with pytest.raises(StepDiverged, match=message):
        steps.record(done, 0.0)


def test_a_queued_steps_time_runs_from_its_turn() -> None:
    steps = in_flight(Layout(), 1, 2)
    assert steps.oldest(9.0) == OldestStep(1, 9.0, math.inf, [0])
    steps.record(StepDone(0, 1, b"d1", 5, ROWS), 12.0)
    assert steps.oldest(21.0) == OldestStep(2, 9.0, math.inf, [0])


def test_calls_of_collectives_are_compared_within_a_tensor_parallel_group() -> None:
    steps = in_flight(Layout(pp=2, tp=2), 1)
    for rank, calls in ((2, b"ab"), (0, b"abc"), (3, b"ab")):
        steps.record(StepDone(rank, 1, b"d1", None, [] if rank == 2 else None, None, calls), 0.0)
        assert not steps.differing(1, rank)
    steps.record(StepDone(1, 1, b"d1", None, None, None, b"abd"), 0.0)
    assert steps.differing(1, 1)
    assert steps.calls(1, 0) == b"abc"
    assert steps.calls(2, 0) is None
