# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from phalanx.engine.watch_clock import LOOK_SECONDS, WatchClock
from phalanx.errors import NodeLost, RankStalled
from phalanx.executor.heartbeat import NODE_TIMEOUT, SUSPECT_TIMEOUT, HeartbeatMonitor
from phalanx.executor.protocol import RankPlace


def watched(
    monitor: HeartbeatMonitor, begin: float, end: float, *beating: int, nodes: tuple[int, ...] = ()
) -> RankStalled | NodeLost | None:
    """Look twice a second; the ranks in `beating` and `nodes` give their signs."""
    now = begin
    while now < end:
        for rank in beating:
            monitor.rank_heartbeat(rank, now, RankPlace(4, 3))
        for node in nodes:
            monitor.node_heartbeat(node, now)
        error = monitor.first_silent(now)
        if error is not None:
            return error
        now += 0.5
    return None


def test_a_silent_rank_is_named_with_its_process_and_its_last_step() -> None:
    monitor = HeartbeatMonitor(20.0)
    for rank in (0, 1):
        monitor.register(rank, f"pid {100 + rank}, node 0")
    assert watched(monitor, 0.0, 5.0, 0, 1) is None
    error = watched(monitor, 5.0, 60.0, 0)
    assert isinstance(error, RankStalled)
    assert "rank 1 (pid 101, node 0) has sent no heartbeat for 20 s" in str(error)
    assert "it had begun step 4 and finished step 3" in str(error)


def test_a_rank_that_still_loads_its_libraries_is_not_silent() -> None:
    monitor = HeartbeatMonitor(20.0)
    monitor.register(0, "pid 1, node 0")
    assert watched(monitor, 0.0, 100.0) is None
    assert monitor.doing(0) == "it had begun no step"
    assert monitor.where(7) == "not heard of yet"


def test_a_rank_that_was_stopped_before_its_first_heartbeat_is_silent_once_all_have_started() -> None:
    monitor = HeartbeatMonitor(20.0)
    for rank in (0, 1):
        monitor.register(rank, f"pid {100 + rank}, node 0")
    assert watched(monitor, 0.0, 50.0, 0) is None  # rank 1 may still load its libraries
    monitor.all_started(50.0)
    assert watched(monitor, 50.0, 70.0, 0) is None
    error = watched(monitor, 70.0, 72.0, 0)
    assert isinstance(error, RankStalled)
    assert "rank 1 (pid 101, node 0) has sent no heartbeat for 20 s; it had begun no step" in str(error)


def test_a_lost_node_comes_before_its_ranks() -> None:
    monitor = HeartbeatMonitor(NODE_TIMEOUT)
    monitor.node_heartbeat(1, 0.0, address="10.0.0.2")
    assert watched(monitor, 0.0, 2.0, 0, 1, nodes=(1,)) is None
    error = watched(monitor, 2.0, 60.0, 0)
    assert isinstance(error, NodeLost)
    assert "node 1 (10.0.0.2)" in str(error)


def test_a_closed_line_shortens_the_patience_with_nodes() -> None:
    monitor = HeartbeatMonitor(20.0)
    assert watched(monitor, 0.0, 2.0, 0, nodes=(1, 2)) is None
    monitor.connection_closed(2.0)
    assert watched(monitor, 2.0, 2.0 + SUSPECT_TIMEOUT - 0.6, 0, nodes=(2,)) is None
    error = watched(monitor, 2.0 + SUSPECT_TIMEOUT - 0.6, 2.0 + SUSPECT_TIMEOUT + 1.0, 0, nodes=(2,))
    assert isinstance(error, NodeLost)
    assert "node 1 " in str(error)


def test_an_engine_that_stood_still_itself_blames_nobody() -> None:
    now, monitor = 0.0, HeartbeatMonitor(20.0)
    watch = WatchClock(lambda: now)
    monitor.node_heartbeat(1, watch.look())
    now = 100.0
    while (error := monitor.first_silent(watch.look())) is None:
        now += 0.5
    assert isinstance(error, NodeLost)
    assert now == 100.5 + NODE_TIMEOUT - LOOK_SECONDS
