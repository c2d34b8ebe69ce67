# SPDX-License-Identifier: Apache-2.0
"""Whether a server on GPUs runs its decode steps as graphs."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject

MOSTLY = 0.5
ENOUGH = 50


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for server in subject.servers:
        scrape = server.latest
        if scrape is None:
            continue
        steps = {labels[0]: count for labels, count in scrape.by("steps_total", "kind").items()}
        total, eager = sum(steps.values()), steps.get("eager", 0.0)
        has_graphs = any(kind == "graphs" and count for (kind,), count in scrape.by("rank_memory_bytes", "kind").items())
        if has_graphs and total >= ENOUGH and eager / total > MOSTLY:
            findings.append(
                warning(
                    f"{server.url}: {eager / total:.0%} of {total:.0f} steps ran without a graph",
                    "raise max_num_tokens for long prompts, or look for options that exclude graphs",
                    f"curl {server.url}/metrics | grep steps_total",
                )
            )
    return findings or [ok("steps run as graphs, or the server runs on CPU")]


CHECK = Check(
    name="server_graphs",
    what="how the steps of a server ran",
    why="steps that are launched kernel by kernel are bound by the host",
    cure="find what excludes graphs",
    threads=("https://github.com/vllm-project/vllm/issues/4806",),
    examine=examine,
    needs=(Need.SERVER,),
)
