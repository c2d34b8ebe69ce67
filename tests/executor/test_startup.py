# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from phalanx.engine.messages import RankFacts
from phalanx.errors import CapacityError, EngineError, NodeLost
from phalanx.executor.protocol import (
    Allocate,
    Hello,
    KvCapacity,
    NodeHeartbeat,
    RankReady,
    StartupProgress,
)
from phalanx.executor.rank_executor import RankExecutor
from phalanx.executor.startup import StartupCoordinator
from phalanx.layout.memory import HostCounts, HostMemory, fewest, host_counts
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import all_gone, options, pids

SLOW_RANK = """
import time
from phalanx.worker import worker

class Slow(worker.Worker):
    def _build(self, *arguments):
        time.sleep(3.0 * self.rank)
        return super()._build(*arguments)

    def _load(self, model, folder, report):
        for done in range(100 * self.rank):
            report(done, 100)
            time.sleep(0.03)
        super()._load(model, folder, report)

worker.Worker = Slow
worker.main()
"""

UNPINNED_RANK = """
from phalanx.worker import host_blocks, worker

have, take = host_blocks.host_memory, worker.Worker._take_host_memory

def refused(self, *buffers):
    if self.rank == 1:
        host_blocks.host_memory = lambda size, register, node=None: have(size, lambda address, size: 2, node)
    take(self, *buffers)

worker.Worker._take_host_memory = refused
worker.main()
"""

SLOW_LAUNCHER = """
from phalanx.executor.launcher import LocalLauncher

class SlowLauncher(LocalLauncher):
    module = "slow_rank"
"""


def ready(rank: int) -> RankReady:
    return RankReady(rank, RankFacts(rank, 0, "cpu", (0, 1)))


def where(rank: int) -> str:
    return f"pid {100 + rank}, node 0"


def test_ranks_connect_and_share_the_least_offer(tmp_path: Path) -> None:
    startup = StartupCoordinator(3, (), 0.0)
    startup.folder = tmp_path / "socket"
    startup.folder.mkdir()
    for rank in (0, 1):
        startup.rank_connected(Hello(rank, 0, 100 + rank))
    assert startup.next_messages() == []
    startup.rank_connected(Hello(2, 0, 102))
    for rank in range(3):
        assert startup.folder is not None
        startup.heartbeat_received(rank)
        startup.store_request_received(rank)
    assert not (tmp_path / "socket").exists()
    for rank, blocks in enumerate((9, 7, 8)):
        assert startup.next_messages() == []
        startup.receive(KvCapacity(rank, blocks), 0.0)
    assert startup.next_messages() == [([0, 1, 2], Allocate(7))]
    assert startup.next_messages() == []
    for rank in (2, 0, 1):
        assert not startup.complete
        startup.receive(ready(rank), 0.0)
    assert startup.complete
    assert [facts.rank for facts in startup.rank_facts()] == [0, 1, 2]


def test_the_smallest_host_decides_how_many_blocks_ranks_keep_in_host_memory() -> None:
    def sizes(memory: HostMemory, *free: int, on_cpu: bool = False) -> int:
        startup = StartupCoordinator(3, (), 0.0, memory, cache_on_host=on_cpu)
        for rank, (node, block, available) in enumerate(zip((0, 0, 1), (10, 20, 50), free, strict=True)):
            startup.rank_connected(Hello(rank, node, 100 + rank))
            startup.receive(KvCapacity(rank, 7, block, available), 0.0)
        ((ranks, message),) = startup.next_messages()
        assert (ranks, message) == ([0, 1, 2], Allocate(7, message.host_blocks))  # type: ignore[union-attr]
        return message.host_blocks  # type: ignore[union-attr]

    assert sizes(1000, 9000, 9000, 9000) == 20, "node 0 has 30 bytes of each block, node 1 has 50"
    assert sizes("auto", 1000, 601, 9000) == 10, "half of 601 bytes on node 0"
    assert sizes("auto", 1000, 601, 9000, on_cpu=True) == 6, "half of what 7 blocks of 30 bytes leave of 601"
    assert sizes(0, 0, 0, 0) == 0
    with pytest.raises(CapacityError, match="does not fit the memory of node 0 beside the KV cache; 0 bytes are available"):
        sizes(1000, 209, 209, 9000, on_cpu=True)
    with pytest.raises(CapacityError, match="kv_host_memory=1,000 does not fit the memory of node 1; 999 bytes are available"):
        sizes(1000, 9000, 9000, 999)
    with pytest.raises(CapacityError, match="kv_host_memory=49 holds not a single KV block; 49 bytes of node 1; a block takes 50"):
        sizes(49, 9000, 9000, 9000)


def test_host_memory_is_divided_over_blocks_and_the_states_that_hits_need() -> None:
    def counts(memory: HostMemory, block: int = 10, state: int = 2000) -> HostCounts:
        return host_counts(memory, block, 10**9, state=state, block_size=32, host="node 0")

    assert counts(0) == (0, 0)
    assert counts(100 * (2000 + 4096 // 32 * 10)) == (100 * 128, 100), "a state for each 4,096 tokens"
    assert counts(2005 + 10) == (1, 1), "one at least"
    assert counts(50_000, block=0) == (25 * 128, 25), "a host whose stages keep no tokens"
    with pytest.raises(CapacityError, match=r"holds not a single KV block and a state; 2,009 bytes .* takes 10 and a state 2,000"):
        counts(2009)

    assert fewest([HostCounts(9, 4), HostCounts(7, 0), HostCounts(8, 3)]) == (7, 3), "a host whose stages have no states"
    startup = StartupCoordinator(2, (), 0.0, 3 * (2000 + 2560), block_size=16)
    for rank, (block, state) in enumerate(((10, 0), (0, 2000))):
        startup.rank_connected(Hello(rank, 0, 100 + rank))
        startup.receive(KvCapacity(rank, 7, block, 10**9, state), 0.0)
    assert startup.next_messages() == [([0, 1], Allocate(7, 3 * 256, 3))], "both ranks number blocks and states alike"


def test_a_start_that_wants_more_host_memory_than_there_is_leaves_no_process(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    executor = RankExecutor(options(folder, kv_host_memory=1 << 50))
    with pytest.raises(CapacityError, match="does not fit the memory of node 0"):
        executor.start()
    assert all_gone(pids(executor))


def test_a_rank_whose_memory_cannot_be_pinned_ends_the_start_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "unpinned_rank.py").write_text(UNPINNED_RANK)
    (tmp_path / "unpinned_launcher.py").write_text(SLOW_LAUNCHER.replace("slow_rank", "unpinned_rank"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    sizes = {"kv_host_memory": 1 << 20, "kv_cache_bytes": 1 << 20, "tensor_parallel_size": 2}
    executor = RankExecutor(options(folder, launcher="unpinned_launcher:SlowLauncher", **sizes))
    with pytest.raises(CapacityError, match=r"^rank 1: [0-9,]+ bytes of host memory.*CUDA cannot pin it \(error 2\)"):
        executor.start()
    assert all_gone(pids(executor))


def test_who_is_late_is_named() -> None:
    startup = StartupCoordinator(2, {1}, 0.0)
    late = startup.timeout_error(5.0, where)
    assert isinstance(late, NodeLost)
    assert "node 1 has not joined" in str(late)
    startup.node_joined(1)
    startup.rank_connected(Hello(0, 0, 100))
    assert "rank 1 did not come up" in str(startup.timeout_error(5.0, where))
    startup.rank_connected(Hello(1, 1, 101))
    for rank, done in ((0, 90), (1, 40)):
        startup.receive(StartupProgress(rank, "import torch"), 0.0)
        startup.receive(StartupProgress(rank, "load weights", done, 100), 0.0)
    assert "rank 1 (pid 101, node 0) is still at 'load weights, 40 %'" in str(startup.timeout_error(5.0, where))
    startup.receive(ready(1), 0.0)
    assert "rank 0 (pid 100, node 0) is still at 'load weights, 90 %'" in str(startup.timeout_error(5.0, where))


def test_who_is_ready_as_time_is_up_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = RankExecutor(options(Path("x"), start_timeout=1e-9))
    for skipped in ("_launch", "_wait", "_send_to_ranks"):
        monkeypatch.setattr(executor, skipped, lambda *arguments: None)

    def ready_at_last() -> None:
        executor._startup.receive(KvCapacity(0, 7), 0.0)
        executor._startup.receive(ready(0), 0.0)

    monkeypatch.setattr(executor, "_check", ready_at_last)
    facts, blocks = executor.start()
    assert (facts[0].rank, blocks) == (0, 7)


def test_what_no_rank_sends_is_an_error() -> None:
    with pytest.raises(EngineError, match="NodeHeartbeat"):
        StartupCoordinator(1, (), 0.0).receive(NodeHeartbeat(1), 0.0)


def heard(startup: StartupCoordinator, caplog: pytest.LogCaptureFixture, begin: float, end: float) -> list[str]:
    """What is logged of a start between these times, by an engine that wakes as it is told and twice a second."""
    caplog.clear()
    caplog.set_level(logging.INFO, logger="phalanx")
    now = begin
    while now < end:
        now += max(min(0.5, startup.log_progress(now)), 1e-3)
    return [record.getMessage() for record in caplog.records]


def test_a_long_phase_is_heard_of_within_a_second_and_then_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    startup = StartupCoordinator(2, (), 0.0)
    for rank in (0, 1):
        startup.receive(StartupProgress(rank, "import torch"), 0.2)
    assert heard(startup, caplog, 0.2, 21.0) == [f"rank 0: import torch ... {age} s" for age in (1, 2, 5, 10, 15, 20)]
    startup.receive(StartupProgress(0, "form groups"), 21.0)
    assert heard(startup, caplog, 21.0, 26.0) == ["rank 1: import torch ... 25 s"]
    startup.receive(StartupProgress(1, "form groups"), 26.0)
    assert heard(startup, caplog, 26.0, 27.0) == ["rank 0: form groups ... 5 s"], "of what comes next, too"


def test_a_fast_start_is_silent_however_much_ranks_report(caplog: pytest.LogCaptureFixture) -> None:
    startup, lines, now = StartupCoordinator(2, (), 0.0), list[str](), 0.0
    for phase in ("import torch", "form groups", "build", "load weights"):
        for done in range(80):
            for rank in (0, 1):
                startup.receive(StartupProgress(rank, phase, done, 80), now)
            now += 0.01
            lines += heard(startup, caplog, now, now)
    assert lines == []


def test_the_rank_in_the_earliest_phase_is_behind(caplog: pytest.LogCaptureFixture) -> None:
    startup = StartupCoordinator(3, (), 0.0)
    for phase in ("import torch", "build", "measure"):
        for rank in range(3):
            if phase != "measure" or rank != 1:
                startup.receive(StartupProgress(rank, phase), 0.0)
    assert heard(startup, caplog, 0.0, 1.0) == ["rank 1: build ... 1 s"]
    startup.receive(StartupProgress(1, "measure"), 1.0)
    startup.receive(KvCapacity(0, 5), 1.0)
    for rank, done in ((1, 11), (2, 12)):
        startup.receive(StartupProgress(rank, "measure", done, 40, "step"), 1.5)
    assert heard(startup, caplog, 1.5, 2.0) == ["rank 1: measure, step 11 of 40 ... 1 s"]
    startup.receive(KvCapacity(1, 5), 2.0)
    assert "rank 2 (pid 102, node 0) is still at 'measure, step 12 of 40'" in str(connected(startup).timeout_error(5.0, where))


def connected(startup: StartupCoordinator) -> StartupCoordinator:
    for rank in range(3):
        startup.rank_connected(Hello(rank, 0, 100 + rank))
    return startup


def test_a_node_that_is_not_there_is_waited_for_aloud(caplog: pytest.LogCaptureFixture) -> None:
    startup = StartupCoordinator(2, {1}, 0.0)
    assert heard(startup, caplog, 0.0, 2.5) == ["node 1 has not joined ... 1 s", "node 1 has not joined ... 2 s"]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert heard(startup, caplog, 2.5, 11.0) == ["node 1 has not joined ... 5 s", "node 1 has not joined ... 10 s"]
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    startup.node_joined(1)
    assert heard(startup, caplog, 11.0, 16.5)[-1] == "rank 0: starting Python ... 15 s"
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_slow_phases_of_a_rank_are_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start on two real ranks. Rank 1 says nothing for 3 s, then for 3 s it reports a hundred times."""
    (tmp_path / "slow_rank.py").write_text(SLOW_RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "slow_launcher.py").write_text(SLOW_LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO, logger="phalanx")
    executor = RankExecutor(
        options(write_checkpoint(tmp_path / "llama", "llama"), tensor_parallel_size=2, launcher="slow_launcher:SlowLauncher")
    )
    try:
        executor.start()
    finally:
        executor.shutdown()
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("startup")]
    assert [line for line in lines if "build" in line] == ["rank 1: build ... 1 s", "rank 1: build ... 2 s"]
    loading = [re.fullmatch(r"rank 1: load weights, (\d+) % ... (\d) s", line) for line in lines if "load" in line]
    assert [match and match[2] for match in loading] == ["1", "2"]
    percents = [int(match[1]) for match in loading if match]
    assert 10 < percents[0] < 50 < percents[1] < 90
