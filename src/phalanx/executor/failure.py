# SPDX-License-Identifier: Apache-2.0
"""The root cause of a failure. When ranks fail, several report at once, and most of them only that a peer is gone. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import IntEnum

from phalanx.config.host_facts import differences
from phalanx.errors import EngineError, PhalanxError, RankDied
from phalanx.executor.protocol import NodeHello, RankError
from phalanx.launch import exit_words


class Evidence(IntEnum):
    """How much a report tells about the root cause. From CAUSE on there is nothing better to wait for."""

    CONSEQUENCE = 0  # a peer is gone
    ENDED = 1  # the process ended; its own error may still be on its way
    CAUSE = 2  # an error of the rank's own
    KILLED = 3  # somebody or something killed the process


@dataclass(frozen=True)
class FailureReport:
    """One thing that went wrong. rank: of which rank, where it is about one."""

    evidence: Evidence
    error: PhalanxError
    rank: int | None = None


def from_rank_error(message: RankError) -> FailureReport:
    """The report of an error that a rank sent."""
    evidence = Evidence.CONSEQUENCE if message.consequence else Evidence.CAUSE
    return FailureReport(evidence, PhalanxError.from_wire(message.error), message.rank)


def from_exit(rank: int, code: int, *, where: str, doing: str) -> FailureReport:
    """The report of a process that ended. `where`: "pid 17, node 0". `doing`: "it had begun step 5 and finished step 4"."""
    killed = code < 0 and -code != signal.SIGABRT  # libraries abort when a peer is gone
    hints = {
        -signal.SIGKILL: "if nobody killed it by hand, the kernel's out-of-memory killer did: see dmesg",
        -signal.SIGBUS: "often /dev/shm is too small: see df /dev/shm",
    }
    error = RankDied(f"rank {rank} ({where}) {exit_words(code)}", held=doing, next=hints.get(code, "see its log lines above"))
    return FailureReport(Evidence.KILLED if killed else Evidence.ENDED, error, rank)


_SHOWN = 5  # differences of a host in one error


def require_equal_hosts(facts: dict[str, str], hello: NodeHello) -> None:
    """Raise EngineError where a node that joins has other facts (`config.host_facts`) than the engine's host has."""
    differing = differences(facts, hello.facts)
    if not differing:
        return
    if not hello.facts:  # as older versions join
        raise EngineError(
            f"node {hello.node} ({hello.address}) runs another version of Phalanx", held="it does not say which",
            next="install the same version on every host",
        )  # fmt: skip
    first = {name.removeprefix("option "): pair for name, pair in list(differing.items())[:_SHOWN]}
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    values = "; ".join(f"{name}: {engine} at the engine, {node} on node {hello.node}" for name, (engine, node) in first.items())
    raise EngineError(
        f"node {hello.node} ({hello.address}) differs from the engine's host in {', '.join(first)}", held=values + more,
        why="ranks of both would compute different results", next="give every host the same options, software and checkpoint",
    )  # fmt: skip


def root_cause(reports: list[FailureReport]) -> FailureReport | None:
    """The report with the strongest evidence; among equals the first. A rank that reports a lost peer and ends has ended because of
    it: its end is no more than a consequence."""
    lost_a_peer = {report.rank for report in reports if report.evidence == Evidence.CONSEQUENCE and report.rank is not None}

    def strength(report: FailureReport) -> Evidence:
        ended_for_it = report.evidence == Evidence.ENDED and report.rank in lost_a_peer
        return Evidence.CONSEQUENCE if ended_for_it else report.evidence

    best = max(reports, key=strength, default=None)
    return None if best is None else replace(best, evidence=strength(best))
