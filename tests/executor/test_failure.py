# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import signal

import pytest

from phalanx.errors import EngineError, RankDied, WeightError
from phalanx.executor.failure import Evidence, FailureReport, from_exit, from_rank_error, require_equal_hosts, root_cause
from phalanx.executor.protocol import NodeHello, RankError


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
    cause = root_cause(reports)
    assert cause is not None
    assert str(cause.error) == str(best.error)
    assert type(cause.error) is type(best.error)


def test_the_end_of_a_rank_that_lost_its_peer_is_a_consequence() -> None:
    """Whichever is heard of first: a better report, such as that of a lost node, is waited for."""
    lost = from_rank_error(RankError(3, EngineError("rank 3 failed: connection closed by peer").to_wire(), consequence=True))
    for reports in ([lost, ended(1)], [ended(1), lost]):
        cause = root_cause(reports)
        assert cause is not None
        assert cause.evidence == Evidence.CONSEQUENCE
    for code in (0, 1):
        cause = root_cause([LOST, ended(code)])  # of another rank
        assert cause is not None
        assert cause.evidence == Evidence.ENDED
    killed = root_cause([lost, ended(-signal.SIGKILL)])
    assert killed is not None
    assert killed.evidence == Evidence.KILLED


def test_no_report_has_no_root_cause() -> None:
    assert root_cause([]) is None


def test_a_death_names_the_rank_the_signal_and_what_it_was_doing() -> None:
    report = ended(-signal.SIGKILL)
    assert isinstance(report.error, RankDied)
    assert report.evidence == Evidence.KILLED
    assert str(report.error).startswith("rank 3 (pid 9, node 0) was killed by SIGKILL; it had begun step 5 and finished step 4")
    assert "/dev/shm" in str(ended(-signal.SIGBUS).error)


FACTS = {"phalanx version": "1.0", "option max_seq_len": "512", "checkpoint": "abc"}


def test_a_host_with_other_software_or_another_checkpoint_is_refused_with_the_difference() -> None:
    require_equal_hosts(FACTS, NodeHello(1, "10.0.0.2", dict(FACTS)))
    differs = r"^node 1 \(10.0.0.2\) differs from the engine's host in checkpoint, phalanx version; checkpoint: abc at the engine, "
    with pytest.raises(EngineError, match=differs + "xyz on node 1; phalanx version: 1.0 at the engine, 0.9 on node 1"):
        require_equal_hosts(FACTS, NodeHello(1, "10.0.0.2", {**FACTS, "phalanx version": "0.9", "checkpoint": "xyz"}))
    with pytest.raises(EngineError, match="and 3 more"):
        require_equal_hosts({str(n): "a" for n in range(8)}, NodeHello(1, "10.0.0.2", {str(n): "b" for n in range(8)}))
    with pytest.raises(EngineError, match="runs another version of Phalanx"):
        require_equal_hosts(FACTS, NodeHello(1, "10.0.0.2"))
