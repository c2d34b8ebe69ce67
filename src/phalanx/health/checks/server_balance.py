# SPDX-License-Identifier: Apache-2.0
"""Whether memory is even over the ranks of a server, and load over servers."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, size, warning
from phalanx.health.subject import Subject

SPREAD = 0.25
BUSY = 8


def examine(subject: Subject) -> list[Finding]:
    findings = []
    loads = {}
    for server in subject.servers:
        scrape = server.latest
        if scrape is None:
            continue
        loads[server.url] = scrape.value("num_requests_running") or 0.0
        used = _used(scrape.by("rank_memory_bytes", "rank", "kind"))
        if len(used) > 1 and max(used.values()) - min(used.values()) > SPREAD * max(used.values()):
            fullest, emptiest = max(used, key=lambda rank: used[rank]), min(used, key=lambda rank: used[rank])
            findings.append(
                warning(
                    f"{server.url}: rank {fullest} has {size(used[fullest])} and rank {emptiest} {size(used[emptiest])}",
                    "check tp_size and pp_size: stages may hold unequal layers; then restart",
                    "phalanx doctor MODEL --tp_size N --pp_size M",
                )
            )
    if len(loads) > 1 and max(loads.values()) >= BUSY and max(loads.values()) > 4 * (min(loads.values()) + 1):
        named = ", ".join(f"{url} {count:.0f}" for url, count in loads.items())
        findings.append(
            warning(
                f"requests are spread unevenly over the servers: {named}",
                "look at the load balancer: it may keep connections to one",
                "phalanx monitor",
            )
        )
    return findings or [ok("memory is even over ranks, and load over servers")]


def _used(by_kind: dict[tuple[str, ...], float]) -> dict[str, float]:
    """Bytes of each rank: weights, KV cache, graphs and activations."""
    sums: dict[str, float] = {}
    for (rank, kind), count in by_kind.items():
        if kind not in ("total", "capacity"):
            sums[rank] = sums.get(rank, 0.0) + count
    return sums


CHECK = Check(
    name="server_balance",
    what="memory of ranks, and load of servers, against each other",
    why="one GPU at 90 percent and another at 40: unequal stages, or another process; one busy replica beside idle ones",
    cure="check the layout and the load balancer",
    threads=(
        "https://github.com/vllm-project/vllm/issues/14011",
        "https://github.com/sgl-project/sglang/issues/11753",
        "https://github.com/sgl-project/sglang/issues/1533",
    ),
    examine=examine,
    needs=(Need.SERVER,),
)
