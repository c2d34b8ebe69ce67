# SPDX-License-Identifier: Apache-2.0
"""Whether all servers run one version and one model."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    reached = [server for server in subject.servers if not server.failure]
    findings = []
    for what, values in {
        "versions": {server.url: server.version for server in reached},
        "models": {server.url: server.latest.model for server in reached if server.latest is not None and server.latest.model},
    }.items():
        if len(set(values.values())) > 1:
            named = ", ".join(f"{url} {value}" for url, value in values.items())
            findings.append(
                warning(
                    f"servers run different {what}: {named}",
                    f"give all replicas one of the {what}",
                    *(f"curl {url}/version" for url in values),
                )
            )
    return findings or [ok(f"{len(reached)} servers run the same version and model")]


CHECK = Check(
    name="server_versions",
    what="version and model of the servers that are named",
    why="a load balancer over replicas of different versions answers differently each time",
    cure="roll out one version",
    threads=("https://github.com/vllm-project/vllm/issues/12670",),
    examine=examine,
    needs=(Need.SERVER,),
)
