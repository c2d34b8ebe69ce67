# SPDX-License-Identifier: Apache-2.0
"""Start-up of the ranks, seen from the engine: who has connected, how far each rank is, and which message comes next. This module
decides; `rank_executor` sends.

Hello -> groups, agreement (`executor.rank_store`), weights -> KvCapacity -> (the smallest of them) Allocate -> RankReady.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from phalanx.engine.messages import RankFacts
from phalanx.errors import EngineError, NodeLost
from phalanx.executor.protocol import (
    Allocate,
    EngineToRank,
    Hello,
    KvCapacity,
    RankReady,
    RankToEngine,
    StartupProgress,
)
from phalanx.layout.memory import HostCounts, HostMemory, fewest, host_counts
from phalanx.log import get_logger

log = get_logger(__name__)

_LOG_INTERVALS = (0.9, 1.0, 3.0, 5.0)
"""Seconds from the beginning of a phase to the first log line on it, and from each line to the next; the last interval repeats. So
the lines come at 1, 2, 5, 10, 15, ... s. The first interval is shorter than a second: every phase that takes one is logged, even
where the engine wakes late."""
_LINES_BEFORE_AN_ERROR = 2
"""Of lines on a node that has not joined: hosts start seconds apart, but one that is missing after 5 s is an error."""
_FIRST_PHASE = "starting Python"  # until a rank reports another one
_WAITING_PHASE = "wait for the other ranks"


class StartupCoordinator:
    """One start-up of a world of ranks, which begins `now`. joins: the nodes that must join the engine. host_memory: the option
    kv_host_memory. block_size: tokens of a KV block. cache_on_host: the KV cache itself is in the same memory, as on CPU."""

    def __init__(
        self, world: int, joins: Collection[int], now: float, host_memory: HostMemory = 0, *, block_size: int = 16,
        cache_on_host: bool = False,
    ) -> None:  # fmt: skip
        self._world, self._host_memory, self._block_size, self._cache_on_host = world, host_memory, block_size, cache_on_host
        self._nodes: dict[int, int] = {}  # of ranks
        self._missing = set(joins)
        self._connected: set[int] = set()
        self._beating: set[int] = set()  # ranks that have sent a heartbeat
        self._using_store: set[int] = set()
        self._capacities: dict[int, KvCapacity] = {}
        self._allocated = False
        self._ready: dict[int, RankFacts] = {}
        self._progress = {rank: StartupProgress(rank, _FIRST_PHASE) for rank in range(world)}
        self._phase_began = dict.fromkeys(range(world), now)
        self._phase_order = {_FIRST_PHASE: 0}  # all ranks go through the same phases; the first to enter one gives its place
        self._log_subject, self._log_lines, self._last_logged = "", 0, now
        self.folder: Path | None = None
        """The private folder of the engine's socket, while it is needed."""

    @property
    def complete(self) -> bool:
        return len(self._ready) == self._world

    @property
    def num_blocks(self) -> int:
        """The smallest number of KV blocks that a rank has memory for: block ids mean the same on all ranks."""
        return min(capacity.blocks for capacity in self._capacities.values())

    def _on_host(self) -> HostCounts:
        """What the memory of the smallest host holds for each of its ranks. Raises CapacityError."""
        by_node: dict[int, list[KvCapacity]] = {}
        for rank, capacity in self._capacities.items():
            by_node.setdefault(self._nodes.get(rank, 0), []).append(capacity)
        counts, beside = [], " beside the KV cache" if self._cache_on_host else ""
        for node, ranks in sorted(by_node.items()):
            block, state = (sum(getattr(each, name) for each in ranks) for name in ("block_bytes", "state_bytes"))
            free = min(each.free_host_memory for each in ranks)
            if self._cache_on_host:  # which no rank has made yet
                free = max(free - self.num_blocks * block, 0)
            host = f"node {node}{beside}"
            counts.append(host_counts(self._host_memory, block, free, state=state, block_size=self._block_size, host=host))
        return fewest(counts)

    def rank_facts(self) -> list[RankFacts]:
        return [self._ready[rank] for rank in range(self._world)]

    def rank_connected(self, hello: Hello) -> None:
        self._connected.add(hello.rank)
        self._nodes[hello.rank] = hello.node

    def heartbeat_received(self, rank: int) -> None:
        self._beating.add(rank)
        self._remove_folder_once_connected()

    def store_request_received(self, rank: int) -> None:
        self._using_store.add(rank)
        self._remove_folder_once_connected()

    def _remove_folder_once_connected(self) -> None:
        """When all connections of all ranks stand, the name of the socket is not needed any more. A rank alone has no store."""
        stores = len(self._using_store) if self._world > 1 else 1
        if self.folder is not None and len(self._connected) == len(self._beating) == stores == self._world:
            self.remove_folder()

    def node_joined(self, node: int) -> None:
        self._missing.discard(node)

    def receive(self, message: RankToEngine, now: float) -> None:
        """Take in a message of the start-up. Raises EngineError for any other message."""
        match message:
            case StartupProgress():
                self._enter(message, now)
            case KvCapacity():
                self._capacities[message.rank] = message
                self._enter(StartupProgress(message.rank, _WAITING_PHASE), now)
            case RankReady():
                self._ready[message.rank] = message.facts
            case _:
                raise EngineError(f"unexpected message {type(message).__name__}", why="no rank sends it during start-up")

    def _enter(self, progress: StartupProgress, now: float) -> None:
        self._phase_order.setdefault(progress.phase, len(self._phase_order))
        before = self._progress.get(progress.rank)
        if before is None or before.phase != progress.phase:
            self._phase_began[progress.rank] = now
        self._progress[progress.rank] = progress

    def next_messages(self) -> list[tuple[list[int], EngineToRank]]:
        """The messages to send now, each with the ranks that get it. Each message is returned once."""
        messages: list[tuple[list[int], EngineToRank]] = []
        if len(self._capacities) == self._world and not self._allocated:
            self._allocated = True
            messages.append((list(range(self._world)), Allocate(self.num_blocks, *self._on_host())))
        return messages

    def timeout_error(self, limit: float, where: Callable[[int], str]) -> EngineError:
        """The error for a start that took longer than `limit` seconds: it names the node or rank that is behind."""
        failure = f"the ranks did not start within {limit:g} s"
        hint = "raise start_timeout if it only needs longer; else see its log"
        if self._missing:
            return NodeLost(
                failure, held=self._missing_nodes(),
                why="it was not started, or cannot reach master_addr",
                next="start it with the same options and its own node_rank; check master_addr and the firewall",
            )  # fmt: skip
        absent = sorted(set(range(self._world)) - self._connected)
        if absent:
            return EngineError(failure, held=f"rank {', '.join(map(str, absent))} did not come up", next=hint)
        rank = self._slowest()
        return EngineError(failure, held=f"rank {rank} ({where(rank)}) is still at {_words(self._progress[rank])!r}", next=hint)

    def log_progress(self, now: float) -> float:
        """Log which rank is behind, in which phase and for how long, if a line is due. Returns the seconds until one may be due.

        These are all log lines on the progress of a start, however often ranks report: a fast start has none, a long one few.
        """
        rank = self._slowest()
        subject = self._missing_nodes() if self._missing else self._progress[rank].phase
        if subject != self._log_subject:
            self._log_subject, self._log_lines = subject, 0
        last = self._last_logged if self._log_lines else max(self._last_logged, self._phase_began[rank])
        due = last + _LOG_INTERVALS[min(self._log_lines, len(_LOG_INTERVALS) - 1)]
        if now < due:
            return due - now
        doing = f"rank {rank}: {_words(self._progress[rank])}" if subject == self._progress[rank].phase else subject
        level = logging.ERROR if self._missing and self._log_lines >= _LINES_BEFORE_AN_ERROR else logging.INFO
        log.log(level, "%s ... %.0f s", doing, now - self._phase_began[rank])
        self._log_lines, self._last_logged = self._log_lines + 1, now
        return _LOG_INTERVALS[min(self._log_lines, len(_LOG_INTERVALS) - 1)]

    def _slowest(self) -> int:
        """Of the ranks that are not ready, the one in the earliest phase; among several of them the one that has done the least of
        it; among those the one that has been in it for the longest."""

        def position(rank: int) -> tuple[int, float, float]:
            progress = self._progress[rank]
            return self._phase_order[progress.phase], progress.done / max(progress.total, 1), self._phase_began[rank]

        return min((rank for rank in range(self._world) if rank not in self._ready), key=position)

    def _missing_nodes(self) -> str:
        return f"node {', '.join(map(str, sorted(self._missing)))} has not joined"

    def remove_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def _words(progress: StartupProgress) -> str:
    if not progress.total:
        return progress.phase
    if progress.unit:
        return f"{progress.phase}, {progress.unit} {progress.done} of {progress.total}"
    return f"{progress.phase}, {100 * progress.done // progress.total} %"
