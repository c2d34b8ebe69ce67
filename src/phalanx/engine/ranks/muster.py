# SPDX-License-Identifier: Apache-2.0
"""Start-up as the engine sees it: who is here, who is where, and what they are told next. Decides; `executor` sends.

hello -> (rank 0 opens the store: meeting) -> meet -> groups, agreement, weights -> offer -> (the least offer) allocate -> ready.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.engine.messages import RankFacts
from phalanx.engine.ranks.wire import Allocate, FromEngine, Hello, Meet, Meeting, Offer, Progress, Ready, ToEngine
from phalanx.errors import EngineError, NodeLost
from phalanx.log import get_logger

log = get_logger(__name__)

_PROGRESS_SECONDS = 2.0  # between two lines on how loading goes


class Muster:
    """One start-up of a world."""

    def __init__(self, world: int, nodes: int) -> None:
        self._world, self._nodes = world, nodes
        self._joined = {0}
        self._here: set[int] = set()
        self._pulsed: set[int] = set()
        self._meeting: str | None = None
        self._met: set[int] = {0}  # rank 0 opens the store and need not be told
        self._offers: dict[int, int] = {}
        self._allocated = False
        self._ready: dict[int, RankFacts] = {}
        self._at: dict[int, Progress] = {}
        self._told = 0.0
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

    def take(self, message: ToEngine) -> None:
        match message:
            case Meeting():
                self._meeting = message.address
            case Progress():
                self._at[message.rank] = message
                self._tell_progress()
            case Offer():
                self._offers[message.rank] = message.blocks
            case Ready():
                self._ready[message.rank] = message.facts
            case _:
                raise EngineError(f"{type(message).__name__} came in", why="no rank sends that during start-up")

    def orders(self) -> list[tuple[list[int], FromEngine]]:
        """What is to be said now, and to whom."""
        found: list[tuple[list[int], FromEngine]] = []
        if self._meeting is not None and self._here - self._met:
            found.append((sorted(self._here - self._met), Meet(self._meeting)))
            self._met |= self._here
        if len(self._offers) == self._world and not self._allocated:
            self._allocated = True
            found.append((list(range(self._world)), Allocate(self.num_blocks)))
        return found

    def late(self, limit: float, where: Callable[[int], str]) -> EngineError:
        """Time is up: who is not where it should be."""
        asked, cure = f"ranks were given {limit:g} s to start", "raise start_timeout if it only needs longer; else see its log"
        missing = sorted(set(range(self._nodes)) - self._joined)
        if missing:
            return NodeLost(
                asked, held=f"node {', '.join(map(str, missing))} has not joined",
                why="it was not started, or cannot reach master_addr",
                next="start it with the same options and its own node_rank; check master_addr and the firewall",
            )  # fmt: skip
        absent = sorted(set(range(self._world)) - self._here)
        if absent:
            return EngineError(asked, held=f"rank {', '.join(map(str, absent))} did not come up", next=cure)
        rank, at = self._slowest()
        return EngineError(asked, held=f"rank {rank} ({where(rank)}) is still at {_words(at)!r}", next=cure)

    def _slowest(self) -> tuple[int, Progress]:
        """Of the ranks that are not ready, the one that said the least or has the least done."""
        order = {phase: index for index, phase in enumerate(dict.fromkeys(at.phase for at in self._at.values()))}
        waiting = [rank for rank in range(self._world) if rank not in self._ready]
        behind = {rank: self._at.get(rank, Progress(rank, "starting Python")) for rank in waiting}
        rank = min(waiting, key=lambda r: (order.get(behind[r].phase, -1), behind[r].done / max(behind[r].total, 1)))
        return rank, behind[rank]

    def _tell_progress(self) -> None:
        now = time.monotonic()
        if now - self._told < _PROGRESS_SECONDS or self.complete:
            return
        self._told = now
        rank, at = self._slowest()
        log.info("starting ranks: %s%s", _words(at), f" (rank {rank} is slowest)" if self._world > 1 else "")

    def remove_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def _words(at: Progress) -> str:
    return f"{at.phase}, {100 * at.done // at.total} %" if at.total else at.phase
