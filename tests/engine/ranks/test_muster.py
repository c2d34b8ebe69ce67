# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.engine.messages import RankFacts
from phalanx.engine.ranks.muster import Muster
from phalanx.engine.ranks.wire import Allocate, Hello, Meet, Meeting, NodePulse, Offer, Progress, Ready
from phalanx.errors import EngineError, NodeLost


def ready(rank: int) -> Ready:
    return Ready(rank, RankFacts(rank, 0, "cpu", (0, 1)))


def where(rank: int) -> str:
    return f"pid {100 + rank}, node 0"


def test_ranks_meet_where_rank_0_listens_and_share_the_least_offer(tmp_path: Path) -> None:
    muster = Muster(3, 1)
    muster.folder = tmp_path / "socket"
    muster.folder.mkdir()
    for rank in (0, 1):
        muster.hello(Hello(rank, 0, 100 + rank))
    assert muster.orders() == []
    muster.take(Meeting(0, "127.0.0.1:5"))
    assert muster.orders() == [([1], Meet("127.0.0.1:5"))]
    muster.hello(Hello(2, 0, 102))
    assert muster.orders() == [([2], Meet("127.0.0.1:5"))]
    for rank in range(3):
        assert muster.folder is not None
        muster.pulsed(rank)
    assert not (tmp_path / "socket").exists()
    for rank, blocks in enumerate((9, 7, 8)):
        assert muster.orders() == []
        muster.take(Offer(rank, blocks))
    assert muster.orders() == [([0, 1, 2], Allocate(7))]
    assert muster.orders() == []
    for rank in (2, 0, 1):
        assert not muster.complete
        muster.take(ready(rank))
    assert muster.complete
    assert [facts.rank for facts in muster.facts()] == [0, 1, 2]


def test_who_is_late_is_named() -> None:
    muster = Muster(2, 2)
    late = muster.late(5.0, where)
    assert isinstance(late, NodeLost)
    assert "node 1 has not joined" in str(late)
    muster.joined(1)
    muster.hello(Hello(0, 0, 100))
    assert "rank 1 did not come up" in str(muster.late(5.0, where))
    muster.hello(Hello(1, 1, 101))
    for rank, done in ((0, 90), (1, 40)):
        muster.take(Progress(rank, "import torch"))
        muster.take(Progress(rank, "load weights", done, 100))
    assert "rank 1 (pid 101, node 0) is still at 'load weights, 40 %'" in str(muster.late(5.0, where))
    muster.take(ready(1))
    assert "rank 0 (pid 100, node 0) is still at 'load weights, 90 %'" in str(muster.late(5.0, where))


def test_what_no_rank_sends_is_an_error() -> None:
    with pytest.raises(EngineError, match="NodePulse"):
        Muster(1, 1).take(NodePulse(1))
