# SPDX-License-Identifier: Apache-2.0
"""Who has given a sign of life, and who is silent for too long. Pure: time comes in as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import NodeLost, RankStalled

NODE_TIMEOUT = 8.0
"""Seconds without a sign of life after which a node, or for a node the engine, counts as lost. A node's sign comes from a loop
that does nothing else; with this, all is over within 10 seconds also where a cut link sends no reset."""

SUSPECT_TIMEOUT = 3.0
"""The same for a while after some line to another node was closed: a killed process closes its lines."""
_SUSPECT_SECONDS = 6.0

_BLIND = 5.0  # If nobody looked for so long, it was the engine that stood still: signs of life lie unread, so begin anew.


@dataclass
class _Rank:
    where: str
    heard: float | None = None
    begun: int = 0
    finished: int = 0


class HeartbeatMonitor:
    """Silence is counted from the first sign of life: a process that still loads its libraries cannot give one."""

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._ranks: dict[int, _Rank] = {}
        self._nodes: dict[int, tuple[str, float]] = {}
        self._looked = 0.0
        self._suspicious_until = 0.0

    def know(self, rank: int, where: str) -> None:
        """A rank's process runs; `where` names it in errors."""
        self._ranks[rank] = _Rank(where)

    def heard(self, rank: int, now: float, *, begun: int, finished: int) -> None:
        """A rank's sign of life, with the last steps that it began and finished."""
        known = self._ranks.setdefault(rank, _Rank("not heard of yet"))
        known.heard, known.begun, known.finished = now, begun, finished

    def heard_node(self, node: int, now: float, *, address: str | None = None) -> None:
        self._nodes[node] = (address or self._nodes.get(node, ("address unknown", 0.0))[0], now)

    def suspect(self, now: float) -> None:
        """A line to some node was closed, and nothing says whose."""
        self._suspicious_until = now + _SUSPECT_SECONDS

    def where(self, rank: int) -> str:
        """For errors: which process the rank is."""
        return self._ranks.get(rank, _Rank("not heard of yet")).where

    def doing(self, rank: int) -> str:
        """For errors: what the rank last said it was doing."""
        known = self._ranks.get(rank)
        if known is None or not known.begun:
            return "it had begun no step"
        return f"it had begun step {known.begun} and finished step {known.finished}"

    def silent(self, now: float) -> RankStalled | NodeLost | None:
        """Who has been silent for too long, if any; a node before its ranks. To be asked several times per `_BLIND`."""
        blind, self._looked = now - self._looked > _BLIND, now
        if blind:
            for known in self._ranks.values():
                known.heard = None if known.heard is None else now
            self._nodes = {node: (address, now) for node, (address, _) in self._nodes.items()}
        limit = SUSPECT_TIMEOUT if now < self._suspicious_until else NODE_TIMEOUT
        for node, (address, heard) in self._nodes.items():
            if now - heard > limit:
                return NodeLost(
                    f"node {node} ({address}) has been silent for {now - heard:.0f} s", held=f"the limit is {limit:g} s",
                    why="its process is gone or the link to it is cut", next="look at that host and the network between",
                )  # fmt: skip
        for rank, known in self._ranks.items():
            if known.heard is not None and now - known.heard > self._stall_timeout:
                return RankStalled(
                    f"rank {rank} ({known.where}) has given no sign of life for {now - known.heard:.0f} s",
                    held=f"{self.doing(rank)}; stall_timeout is {self._stall_timeout:g} s", why="its process stands still",
                    next="was it stopped, or does its host swap?",
                )  # fmt: skip
        return None
