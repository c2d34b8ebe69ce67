# SPDX-License-Identifier: Apache-2.0
"""A check is data: what it examines, why that fails a server, the cure, and threads of users who met it. Its result: findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.health.subject import Subject


class Level(StrEnum):
    """How grave a finding is. Only WARNING and ERROR are alarms."""

    OK = "ok"
    NOTE = "note"  # worth knowing, and normal on a healthy machine
    SKIPPED = "skipped"  # could not be examined, or does not apply; the summary says why
    WARNING = "warning"  # the server works, but slower or less safely than it could
    ERROR = "error"  # a start or a request fails

    @property
    def alarm(self) -> bool:
        return self in (Level.WARNING, Level.ERROR)


class Need(StrEnum):
    """What a check needs in order to say anything. Without it the check is skipped with this reason."""

    GPU = "no GPU is visible"
    PAIR = "fewer than two GPUs are visible"
    MODEL = "no model is named"
    SERVER = "no server's URL is named"
    HOSTS = "the options name one host (nnodes=1)"
    QUALITY = "it starts an engine: only with --quality"
    PEERS = "no report of another host is named (--peer FILE)"


@dataclass(frozen=True)
class Finding:
    """The result of a check. `summary` leads with the failure; `cure` says what to do, `commands` how; `facts` are for scripts."""

    level: Level
    summary: str
    cure: str = ""
    commands: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


Examine = Callable[["Subject"], Finding | Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong.

    what: what is examined.
    why: the symptom, and its cause.
    cure: the general cure; a finding's own cure is more exact.
    threads: links to users' reports.
    needs: conditions without which it is skipped.
    symptoms: regular expressions over the text of a failed start for which this check may hold the explanation.
    slow: takes seconds.
    fine: what to say where it finds nothing.
    """

    name: str
    what: str
    why: str
    cure: str
    threads: tuple[str, ...]
    examine: Examine
    needs: tuple[Need, ...] = ()
    symptoms: tuple[str, ...] = ()
    slow: bool = False
    fine: str = "nothing to report"

    def findings(self, subject: Subject) -> tuple[Finding, ...]:
        outcome = self.examine(subject)
        return (outcome,) if isinstance(outcome, Finding) else tuple(outcome) or (ok(self.fine),)


registered: dict[str, Check] = {}
"""The checks of the modules that are loaded, by name."""


def check(*, why: str, cure: str, threads: tuple[str, ...], **options: Any) -> Callable[[Examine], Examine]:
    """Make a function a check: its name is the check's, its docstring says what it examines.

    threads: URLs; of GitHub the path alone. options: further fields of Check.
    """
    urls = tuple(thread if thread.startswith("https://") else f"https://github.com/{thread}" for thread in threads)

    def register(examine: Examine) -> Examine:
        name = examine.__name__
        registered[name] = Check(name, cleandoc(examine.__doc__ or ""), why, cure, urls, examine, **options)
        return examine

    return register


def ok(summary: str, **facts: Any) -> Finding:
    return Finding(Level.OK, summary, facts=facts)


def note(summary: str, cure: str = "", *commands: str, **facts: Any) -> Finding:
    return Finding(Level.NOTE, summary, cure, commands, facts)


def skipped(reason: str) -> Finding:
    return Finding(Level.SKIPPED, reason)


def warning(summary: str, cure: str, *commands: str, **facts: Any) -> Finding:
    return Finding(Level.WARNING, summary, cure, commands, facts)


def error(summary: str, cure: str, *commands: str, **facts: Any) -> Finding:
    return Finding(Level.ERROR, summary, cure, commands, facts)


def size(count: float) -> str:
    """Bytes for people, in the unit that keeps three digits: "64.0 MiB", "1.00 GiB"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}" if abs(count) < 10 * scale else f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
