# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of ranks and nodes: which process has been silent for too long. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import NodeLost, RankStalled

NODE_TIMEOUT = 8.0
"""Seconds without a heartbeat after which a node counts as lost; for a node, the same holds for the engine. A node sends its
heartbeat from a loop that does nothing else. With this limit everything has ended within 10 seconds, even where a cut link sends no
reset."""

SUSPECT_TIMEOUT = 3.0
"""The limit that replaces NODE_TIMEOUT for a while after a connection to some node was closed: a killed process closes its
connections."""
_SUSPECT_SECONDS = 6.0

MONITOR_GAP = 5.0
"""When nobody has looked at the heartbeats for this many seconds, the monitoring process itself stood still. Heartbeats then lie
unread, so the silence of every process is counted from zero again."""


@dataclass
class _RankHeartbeats:
    where: str
    last: float | None = None
    begun: int = 0
    finished: int = 0


_UNKNOWN = _RankHeartbeats("not heard of yet")


class HeartbeatMonitor:
    """Silence is counted from the first heartbeat, as a process that still loads its libraries cannot send one; and once all ranks
    have started, for every rank."""

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._ranks: dict[int, _RankHeartbeats] = {}
        self._nodes: dict[int, tuple[str, float]] = {}
        self._last_check = 0.0
        self._suspicious_until = 0.0

    def register(self, rank: int, where: str) -> None:
        """The process of a rank runs. `where` names it in errors."""
        self._ranks[rank] = _RankHeartbeats(where)

    def rank_heartbeat(self, rank: int, now: float, *, begun: int, finished: int) -> None:
        """A rank's heartbeat, with the numbers of the last steps that it began and finished."""
        heartbeats = self._ranks.setdefault(rank, _RankHeartbeats(_UNKNOWN.where))
        heartbeats.last, heartbeats.begun, heartbeats.finished = now, begun, finished

    def all_started(self, now: float) -> None:
        """All ranks are ready. One that was stopped before its first heartbeat arrived is silent from now on."""
        for heartbeats in self._ranks.values():
            if heartbeats.last is None:
                heartbeats.last = now

    def node_heartbeat(self, node: int, now: float, *, address: str | None = None) -> None:
        self._nodes[node] = (address or self._nodes.get(node, ("address unknown", 0.0))[0], now)

    def connection_closed(self, now: float) -> None:
        """A connection to some node was closed; nothing tells to which."""
        self._suspicious_until = now + _SUSPECT_SECONDS

    def where(self, rank: int) -> str:
        """For errors: the process of the rank."""
        return self._ranks.get(rank, _UNKNOWN).where

    def doing(self, rank: int) -> str:
        """For errors: the steps that the rank last reported."""
        heartbeats = self._ranks.get(rank, _UNKNOWN)
        if not heartbeats.begun:
            return "it had begun no step"
        return f"it had begun step {heartbeats.begun} and finished step {heartbeats.finished}"

    def first_silent(self, now: float) -> RankStalled | NodeLost | None:
        """The error for the first process that has been silent for too long, nodes before ranks; None when there is none. Call this
        several times per MONITOR_GAP."""
        paused, self._last_check = now - self._last_check > MONITOR_GAP, now
        if paused:
            for heartbeats in self._ranks.values():
                heartbeats.last = None if heartbeats.last is None else now
            self._nodes = {node: (address, now) for node, (address, _) in self._nodes.items()}
        limit = SUSPECT_TIMEOUT if now < self._suspicious_until else NODE_TIMEOUT
        for node, (address, last) in self._nodes.items():
            if now - last > limit:
                return NodeLost(
                    f"node {node} ({address}) has been silent for {now - last:.0f} s", held=f"the limit is {limit:g} s",
                    why="its process is gone or the link to it is cut", next="check that host and the network to it",
                )  # fmt: skip
        for rank, heartbeats in self._ranks.items():
            if heartbeats.last is not None and now - heartbeats.last > self._stall_timeout:
                return RankStalled(
                    f"rank {rank} ({heartbeats.where}) has sent no heartbeat for {now - heartbeats.last:.0f} s",
                    held=f"{self.doing(rank)}; stall_timeout is {self._stall_timeout:g} s", why="its process stands still",
                    next="check whether it was stopped, and whether its host swaps",
                )  # fmt: skip
        return None
