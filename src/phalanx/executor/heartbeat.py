# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of ranks and nodes: which process has been silent for too long. Pure: the time is an argument,
of a `WatchClock`."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import NodeLost, RankStalled
from phalanx.executor.protocol import NOWHERE, RankPlace
from phalanx.layout.rank_progress import in_layer

NODE_TIMEOUT = 8.0
"""Seconds without a heartbeat after which a node counts as lost; for a node, the same holds for the engine. A node sends its
heartbeat from a loop that does nothing else. With this limit everything has ended within 10 seconds, even where a cut link sends no
reset."""

SUSPECT_TIMEOUT = 3.0
"""The limit that replaces NODE_TIMEOUT for a while after a connection to some node was closed: a killed process closes its
connections."""
_SUSPECT_SECONDS = 6.0


@dataclass
class RankHeartbeats:
    """Of one rank. where: names its process. last: when the last one came. place: what it said. moved: when it said something else
    than before."""

    where: str
    last: float | None = None
    place: RankPlace = NOWHERE
    moved: float = 0.0


_UNKNOWN = RankHeartbeats("not heard of yet")


class HeartbeatMonitor:
    """Silence is counted from the first heartbeat, as a process that still loads its libraries cannot send one; and once all ranks
    have started, for every rank."""

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._ranks: dict[int, RankHeartbeats] = {}
        self._nodes: dict[int, tuple[str, float]] = {}
        self._suspicious_until = 0.0

    def register(self, rank: int, where: str) -> None:
        """The process of a rank runs. `where` names it in errors."""
        self._ranks[rank] = RankHeartbeats(where)

    def rank_heartbeat(self, rank: int, now: float, place: RankPlace) -> None:
        """A rank's heartbeat, with its place."""
        heartbeats = self._ranks.setdefault(rank, RankHeartbeats(_UNKNOWN.where))
        if place != heartbeats.place:
            heartbeats.moved = now
        heartbeats.last, heartbeats.place = now, place

    def last(self, rank: int) -> RankHeartbeats:
        """What is known of a rank."""
        return self._ranks.get(rank, _UNKNOWN)

    def stand_still(self, since: float, now: float, *, seconds: float, silent: float) -> bool:
        """Whether every rank has told since then, for so many seconds, that it is at the same place; or was silent for `silent`."""
        return all(
            each.last is not None and (each.last - max(each.moved, since) >= seconds or now - each.last >= silent)
            for each in self._ranks.values()
        )

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
        return self.last(rank).where

    def doing(self, rank: int) -> str:
        """For errors: the steps that the rank last reported."""
        place = self.last(rank).place
        if not place.begun:
            return "it had begun no step"
        unknown = (place.queued and not place.on_device) or not (place.layer or place.inside or place.calls)
        at = "" if unknown else f", where it was {in_layer(place.layer)},"
        return f"it had begun step {place.begun}{at} and finished step {place.finished}"

    def first_silent(self, now: float) -> RankStalled | NodeLost | None:
        """The error for the first process that has been silent for too long, nodes before ranks; None when there is none."""
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
