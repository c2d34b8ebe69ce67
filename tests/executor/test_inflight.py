# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from phalanx.engine.messages import RowResult
from phalanx.errors import StepDiverged
from phalanx.executor.inflight import InFlightSteps
from phalanx.executor.protocol import StepDone
from phalanx.plan.layout import Layout

ROWS = [RowResult(token=7)]


def ledger(layout: Layout, *numbers: int) -> InFlightSteps:
    found = InFlightSteps(layout)
    for number in numbers:
        found.submitted(number, b"d%d" % number, 0.0)
    return found


def test_a_step_is_handed_out_when_the_last_stage_agrees_and_in_order() -> None:
    held = ledger(Layout(pp=2, tp=2), 1, 2)
    held.record(StepDone(2, 2, b"d2", 5, ROWS), 0.0)
    held.record(StepDone(3, 2, b"d2", 5), 0.0)
    assert held.completed() == []
    held.record(StepDone(2, 1, b"d1", 5, ROWS), 0.0)
    assert held.completed() == []
    held.record(StepDone(3, 1, b"d1", 5), 0.0)
    assert [(result.number, result.batches) for result in held.completed()] == [(1, [ROWS]), (2, [ROWS])]
    assert held.completed() == []
    assert held.overdue(100.0, 10.0) == (1, [0, 1])
    for number in (1, 2):
        for rank in (0, 1):
            held.record(StepDone(rank, number, b"d%d" % number), 0.0)
    assert held.completed() == []
    assert held.overdue(100.0, 10.0) is None


def test_each_data_parallel_index_has_its_results() -> None:
    held = ledger(Layout(dp=2), 1)
    held.record(StepDone(1, 1, b"d1", 9, [RowResult(token=9)]), 0.0)
    held.record(StepDone(0, 1, b"d1", 8, [RowResult(token=8)]), 0.0)
    (result,) = held.completed()
    assert [[row.token for row in rows] for rows in result.batches] == [[8], [9]]


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (StepDone(1, 1, b"d1", 6), "rank 1 sampled other tokens than rank 0 in step 1"),
        (StepDone(1, 1, b"xx", 5), "rank 1 ran step 1 with digest"),
        (StepDone(1, 2, b"d2", 5), r"rank 1 reports step 2, which is not in flight on it; steps in flight: \[1\]"),
        (StepDone(0, 1, b"d1", 5), "rank 0 reports step 1"),
    ],
)
def test_divergence_names_the_rank(done: StepDone, said: str) -> None:
    held = ledger(Layout(tp=2), 1)
    held.record(StepDone(0, 1, b"d1", 5, ROWS), 0.0)
    with pytest.raises(StepDiverged, match=said):
        held.record(done, 0.0)


def test_a_queued_steps_time_runs_from_its_turn() -> None:
    held = ledger(Layout(), 1, 2)
    assert held.overdue(9.0, 10.0) is None
    assert held.overdue(11.0, 10.0) == (1, [0])
    held.record(StepDone(0, 1, b"d1", 5, ROWS), 12.0)
    assert held.overdue(21.0, 10.0) is None
    assert held.overdue(23.0, 10.0) == (2, [0])
