# SPDX-License-Identifier: Apache-2.0
"""Whether all hosts run the same versions, options and variables."""

from __future__ import annotations

from phalanx.health import doctor
from phalanx.health.check import Check, Finding, Need, error, ok, warning
from phalanx.health.subject import Subject

IGNORED = {"name", "time"}


def examine(subject: Subject) -> list[Finding]:
    own = doctor.about(subject)
    findings = []
    for peer in subject.peers:
        other = peer["host"]
        for field in sorted((own.keys() | other.keys()) - IGNORED):
            findings += _compare(field, own.get(field), other.get(field), other.get("name", "the other host"))
    return findings or [ok(f"{len(subject.peers)} other hosts have the same versions, options and variables")]


def _compare(field: str, own: object, other: object, name: str) -> list[Finding]:
    if own == other:
        return []
    if isinstance(own, dict) and isinstance(other, dict):
        pairs = {key: (own.get(key), other.get(key)) for key in sorted(own.keys() | other.keys()) if own.get(key) != other.get(key)}
        return [_differs(f"{field}.{key}", here, there, name) for key, (here, there) in pairs.items()]
    return [_differs(field, own, other, name)]


def _differs(field: str, here: object, there: object, name: str) -> Finding:
    summary = f"{field} differs: {here if here is not None else 'unset'} here, {there if there is not None else 'unset'} on {name}"
    package = field.removeprefix("packages.")
    command = f"pip install {package}=={here}" if field.startswith("packages.") and here else f"# make {field} equal on both hosts"
    level = warning if field in ("python", "driver") else error
    return level(summary, "make it equal on all hosts", command, field=field, here=here, there=there)


CHECK = Check(
    name="same_software",
    what="versions, options and variables of other hosts (--peer FILE, written there by `phalanx doctor --json FILE`)",
    why="ranks that run different code or options hang in a collective, or disagree on shapes",
    cure="make them equal",
    threads=("https://github.com/vllm-project/vllm/issues/7074", "https://github.com/vllm-project/vllm/issues/12670"),
    examine=examine,
    needs=(Need.PEERS,),
    symptoms=(r"agree", r"diverge", r"differs", r"versions? differ"),
)
