# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import signal

import pytest

from phalanx.errors import EngineError, RankDied, WeightError
from phalanx.executor.failure import Evidence, FailureReport, from_exit, from_rank_error, root_cause
from phalanx.executor.protocol import RankError


def ended(code: int) -> FailureReport:
    return from_exit(3, code, where="pid 9, node 0", doing="it had begun step 5 and finished step 4")


LOST = from_rank_error(RankError(0, EngineError("rank 0 failed: connection closed by peer").to_wire(), consequence=True))
OWN = from_rank_error(RankError(1, WeightError("rank 1: model.norm.weight is missing").to_wire(), consequence=False))


@pytest.mark.parametrize(
    ("reports", "best"),
    [
        ([LOST, OWN], OWN),
        ([ended(1), LOST], ended(1)),
        ([ended(1), OWN], OWN),
        ([ended(-signal.SIGABRT), OWN], OWN),
        ([OWN, ended(-signal.SIGKILL)], ended(-signal.SIGKILL)),
        ([LOST], LOST),
        ([OWN, from_rank_error(RankError(2, WeightError("rank 2").to_wire(), consequence=False))], OWN),
    ],
)
def test_the_report_that_says_most_is_the_cause(reports: list[FailureReport], best: FailureReport) -> None:
    found = root_cause(reports)
    assert found is not None
    assert str(found.error) == str(best.error)
    assert type(found.error) is type(best.error)


def test_no_report_has_no_root_cause() -> None:
    assert root_cause([]) is None


def test_a_death_names_the_rank_the_signal_and_what_it_was_doing() -> None:
    report = ended(-signal.SIGKILL)
    assert isinstance(report.error, RankDied)
    assert report.evidence == Evidence.KILLED
    assert str(report.error).startswith("rank 3 (pid 9, node 0) was killed by SIGKILL; it had begun step 5 and finished step 4")
    assert "/dev/shm" in str(ended(-signal.SIGBUS).error)
