# SPDX-License-Identifier: Apache-2.0
"""Start-up as the engine sees it: who is here, who is where, and what they are told next. Decides; `executor` sends.

hello -> (rank 0 opens the store: meeting) -> meet -> groups, agreement, weights -> offer -> (the least offer) allocate -> ready.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
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
    StoreAddress,
    StoreReady,
)
from phalanx.log import get_logger

log = get_logger(__name__)

_GAPS = (0.9, 1.0, 3.0, 5.0)
"""Seconds from a phase's beginning to the first line on it, and from each line to the next; the last goes on. So a phase is heard
of at 1, 2, 5, 10, 15, ... s. The first is short of a second: no phase that takes one is silent, though the engine may wake late."""
_FIRST = "starting Python"  # until a rank says anything else
_OFFERED = "wait for the other ranks"


class StartupCoordinator:
    """One start-up of a world, which begins `now`."""

    def __init__(self, world: int, nodes: int, now: float) -> None:
        self._world, self._nodes = world, nodes
        self._joined = {0}
        self._here: set[int] = set()
        self._pulsed: set[int] = set()
        self._meeting: str | None = None
        self._met: set[int] = {0}  # rank 0 opens the store and need not be told
        self._offers: dict[int, int] = {}
        self._allocated = False
        self._ready: dict[int, RankFacts] = {}
        self._at = {rank: StartupProgress(rank, _FIRST) for rank in range(world)}
        self._since = dict.fromkeys(range(world), now)  # each began its phase
        self._order = {_FIRST: 0}  # all ranks go through the same phases, so the first to enter one tells where it stands
        self._subject, self._lines, self._told = "", 0, now  # what the last line was on, how many were, and when
        self.folder: Path | None = None

    @property
    def complete(self) -> bool:
        return len(self._ready) == self._world

    @property
    def num_blocks(self) -> int:
        """The least of what the ranks offer: block ids mean the same on all."""
        return min(self._offers.values())

    def facts(self) -> list[RankFacts]:
        return [self._ready[rank] for rank in range(self._world)]

    def hello(self, hello: Hello) -> None:
        self._here.add(hello.rank)

    def pulsed(self, rank: int) -> None:
        self._pulsed.add(rank)
        if self.folder is not None and len(self._here) == len(self._pulsed) == self._world:
            self.remove_folder()  # both lines of all ranks stand: the socket's name is needed no more

    def joined(self, node: int) -> None:
        self._joined.add(node)

    def take(self, message: RankToEngine, now: float) -> None:
        match message:
            case StoreReady():
                self._meeting = message.address
            case StartupProgress():
                self._enter(message, now)
            case KvCapacity():
                self._offers[message.rank] = message.blocks
                self._enter(StartupProgress(message.rank, _OFFERED), now)
            case RankReady():
                self._ready[message.rank] = message.facts
            case _:
                raise EngineError(f"{type(message).__name__} came in", why="no rank sends that during start-up")

    def _enter(self, at: StartupProgress, now: float) -> None:
        self._order.setdefault(at.phase, len(self._order))
        before = self._at.get(at.rank)
        if before is None or before.phase != at.phase:
            self._since[at.rank] = now
        self._at[at.rank] = at

    def orders(self) -> list[tuple[list[int], EngineToRank]]:
        """What is to be said now, and to whom."""
        found: list[tuple[list[int], EngineToRank]] = []
        if self._meeting is not None and self._here - self._met:
            found.append((sorted(self._here - self._met), StoreAddress(self._meeting)))
            self._met |= self._here
        if len(self._offers) == self._world and not self._allocated:
            self._allocated = True
            found.append((list(range(self._world)), Allocate(self.num_blocks)))
        return found

    def late(self, limit: float, where: Callable[[int], str]) -> EngineError:
        """Time is up: who is not where it should be."""
        asked, cure = f"ranks were given {limit:g} s to start", "raise start_timeout if it only needs longer; else see its log"
        if self._joined != set(range(self._nodes)):
            return NodeLost(
                asked, held=self._missing(),
                why="it was not started, or cannot reach master_addr",
                next="start it with the same options and its own node_rank; check master_addr and the firewall",
            )  # fmt: skip
        absent = sorted(set(range(self._world)) - self._here)
        if absent:
            return EngineError(asked, held=f"rank {', '.join(map(str, absent))} did not come up", next=cure)
        rank = self._slowest()
        return EngineError(asked, held=f"rank {rank} ({where(rank)}) is still at {_words(self._at[rank])!r}", next=cure)

    def tell(self, now: float) -> float:
        """Log who is behind, at what and for how long, if that is due. Returns the seconds until it may be due again.

        These are all the lines on how a start goes, however often ranks report: a fast one has none, and a long one few.
        """
        rank = self._slowest()
        subject = self._at[rank].phase if self._joined == set(range(self._nodes)) else self._missing()
        if subject != self._subject:
            self._subject, self._lines = subject, 0
        last = self._told if self._lines else max(self._told, self._since[rank])
        due = last + _GAPS[min(self._lines, len(_GAPS) - 1)]
        if now < due:
            return due - now
        doing = f"rank {rank}: {_words(self._at[rank])}" if subject == self._at[rank].phase else subject
        log.info("%s ... %.0f s", doing, now - self._since[rank])
        self._lines, self._told = self._lines + 1, now
        return _GAPS[min(self._lines, len(_GAPS) - 1)]

    def _slowest(self) -> int:
        """Of the ranks that are not ready, the one in the earliest phase; of several there the one that has the least done; then
        the one that has been there for the longest."""

        def how_far(rank: int) -> tuple[int, float, float]:
            at = self._at[rank]
            return self._order[at.phase], at.done / max(at.total, 1), self._since[rank]

        return min((rank for rank in range(self._world) if rank not in self._ready), key=how_far)

    def _missing(self) -> str:
        return f"node {', '.join(map(str, sorted(set(range(self._nodes)) - self._joined)))} has not joined"

    def remove_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def _words(at: StartupProgress) -> str:
    if not at.total:
        return at.phase
    return f"{at.phase}, {at.unit} {at.done} of {at.total}" if at.unit else f"{at.phase}, {100 * at.done // at.total} %"
