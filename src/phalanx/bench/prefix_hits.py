# SPDX-License-Identifier: Apache-2.0
"""What a server found of its prompts while it was measured, by tier: the difference of two readings of its /metrics."""

from __future__ import annotations

import re
from collections import Counter
from typing import TypedDict

import httpx

_LINE = re.compile(r"^(?:\w+:)?prefix_cache_(queries|hits|tier_hits)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_TIER = re.compile(r'tier="(\w+)"')


class Hits(TypedDict):
    """queries: prompt tokens that were looked up; hits: those that were found; tiers: by tier, if the server has some."""

    queries: int
    hits: int
    tiers: dict[str, int]


async def read(client: httpx.AsyncClient) -> Counter[str] | None:
    """The counters by name, "tier_hits device" among them, of all engines together; None where the server shows none."""
    try:
        answer = await client.get("/metrics")
    except httpx.TransportError:
        return None
    return counters(answer.text) if answer.status_code == 200 else None


def counters(text: str) -> Counter[str] | None:
    """Those of one reading; None where it has none."""
    counts: Counter[str] = Counter()
    for name, labels, value in _LINE.findall(text):
        tier = _TIER.search(labels)
        counts[f"{name} {tier[1]}" if tier else name] += int(float(value))
    return counts if "queries" in counts else None


def between(before: Counter[str] | None, after: Counter[str] | None) -> Hits | None:
    """What came between two readings; None where either has no counters."""
    if before is None or after is None:
        return None
    more = {name: after[name] - before[name] for name in after}
    tiers = {name.split()[1]: count for name, count in more.items() if name.startswith("tier_hits ")}
    return {"queries": more["queries"], "hits": more.get("hits", 0), "tiers": tiers}


def text(hits: Hits | None) -> str:
    """One line for people."""
    if hits is None:
        return "found: unknown, since the server's /metrics do not tell"
    queries = hits["queries"] or 1
    tiers = "".join(f", {name} {count / queries:.1%}" for name, count in sorted(hits["tiers"].items()))
    return f"found: {hits['hits'] / queries:.1%} of {hits['queries']:,} prompt tokens{tiers}"
