# SPDX-License-Identifier: Apache-2.0
"""Whether the servers live and take requests."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for server in subject.servers:
        if server.failure:
            cure = "start it, or name the address on which it listens"
            findings.append(error(f"{server.url} does not answer: {server.failure}", cure, f"curl -v {server.url}/live"))
        elif server.status == "failed":
            findings.append(
                error(f"{server.url} has failed: {server.reason}", "restart it: the engine is lost", f"curl {server.url}/ready")
            )
        elif server.status not in ("ready", ""):
            reason = f": {server.reason}" if server.reason else ""
            findings.append(
                warning(
                    f"{server.url} takes no requests, it is {server.status}{reason}",
                    "wait, or send requests elsewhere",
                    f"curl {server.url}/ready",
                )
            )
    return findings or [ok(f"{len(subject.servers)} servers take requests")]


CHECK = Check(
    name="server_ready",
    what="/ready of each server",
    why="a server that starts, drains or has failed answers 503",
    cure="wait, or restart it",
    threads=("https://github.com/vllm-project/vllm/issues/16259", "https://github.com/vllm-project/vllm/issues/8031"),
    examine=examine,
    needs=(Need.SERVER,),
)
