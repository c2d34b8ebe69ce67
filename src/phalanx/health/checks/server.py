# SPDX-License-Identifier: Apache-2.0
"""Running servers, reached over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.health.check import Finding, Need, check, error, ok, size, warning
from phalanx.health.servers import Scrape, Server
from phalanx.health.subject import Subject


@check(
    why="a server that starts, drains or has failed answers 503",
    cure="wait, or restart it",
    threads=("vllm-project/vllm/issues/16259", "vllm-project/vllm/issues/8031"),
    needs=(Need.SERVER,),
)
def server_ready(subject: Subject) -> list[Finding]:
    """/ready of each server"""
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


FULL_CACHE = 0.95
FULL_QUEUE = 0.8


def _scraped(subject: Subject) -> Iterator[tuple[Server, Scrape]]:
    """The servers whose metrics were read, each with its latest ones."""
    return ((server, server.latest) for server in subject.servers if server.latest is not None)


@check(
    why="a full KV cache puts sequences back, which computes them twice; a full queue answers 429",
    cure="add memory or replicas",
    threads=("vllm-project/vllm/issues/8031", "vllm-project/vllm/issues/14350"),
    needs=(Need.SERVER,),
    fine="queues and KV caches have room",
)
def server_load(subject: Subject) -> Iterator[Finding]:
    """queue, KV cache and preemptions of each server"""
    for server, scrape in _scraped(subject):
        used, waiting = scrape.value("kv_cache_usage_perc") or 0.0, scrape.value("num_requests_waiting") or 0.0
        preempted, refused = (
            server.rise("num_preemptions_total") or 0.0,
            server.rise("request_refused_total", reason="queue_full") or 0.0,
        )
        queued, limit = scrape.value("num_requests_queued") or 0.0, scrape.value("queue_limit", kind="requests") or 0.0
        if preempted:
            yield warning(
                f"{server.url}: {preempted:.0f} sequences were preempted during the check, with {used:.0%} of the KV cache in use",
                "give the KV cache more memory, or lower max_batch_size",
                "phalanx serve ... --max_batch_size N",
                "phalanx serve ... --kv_cache_dtype fp8",
            )
        elif used >= FULL_CACHE and waiting:
            yield warning(
                f"{server.url}: the KV cache is {used:.0%} full, and {waiting:.0f} requests wait for it",
                "add a replica, or use kv_cache_dtype=fp8",
                "phalanx serve ... --kv_cache_dtype fp8",
            )
        if refused:
            yield warning(
                f"{server.url}: {refused:.0f} requests were refused during the check: its queue is full",
                "add a replica",
                "phalanx monitor",
            )
        elif limit and queued / limit >= FULL_QUEUE:
            yield warning(
                f"{server.url}: {queued:.0f} of {limit:.0f} places of its queue are taken",
                "add a replica, or send less",
                "phalanx monitor",
            )


MEMORY_SPREAD = 0.25
BUSY_SERVER = 8


@check(
    why="one GPU at 90 percent and another at 40: unequal stages, or another process; one busy replica beside idle ones",
    cure="check the layout and the load balancer",
    threads=("vllm-project/vllm/issues/14011", "sgl-project/sglang/issues/11753", "sgl-project/sglang/issues/1533"),
    needs=(Need.SERVER,),
    fine="memory is even over ranks, and load over servers",
)
def server_balance(subject: Subject) -> Iterator[Finding]:
    """memory of ranks, and load of servers, against each other"""
    loads = {}
    for server, scrape in _scraped(subject):
        loads[server.url] = scrape.value("num_requests_running") or 0.0
        used = _used_memory(scrape.by("rank_memory_bytes", "rank", "kind"))
        if len(used) > 1 and max(used.values()) - min(used.values()) > MEMORY_SPREAD * max(used.values()):
            fullest, emptiest = max(used, key=lambda rank: used[rank]), min(used, key=lambda rank: used[rank])
            yield warning(
                f"{server.url}: rank {fullest} has {size(used[fullest])} and rank {emptiest} {size(used[emptiest])}",
                "check tp_size and pp_size: stages may hold unequal layers; then restart",
                "phalanx doctor MODEL --tp_size N --pp_size M",
            )
    if len(loads) > 1 and max(loads.values()) >= BUSY_SERVER and max(loads.values()) > 4 * (min(loads.values()) + 1):
        named = ", ".join(f"{url} {count:.0f}" for url, count in loads.items())
        yield warning(
            f"requests are spread unevenly over the servers: {named}",
            "look at the load balancer: it may keep connections to one",
            "phalanx monitor",
        )


def _used_memory(by_kind: dict[tuple[str, ...], float]) -> dict[str, float]:
    """Bytes of each rank: weights, KV cache, graphs and activations."""
    sums: dict[str, float] = {}
    for (rank, kind), count in by_kind.items():
        if kind not in ("total", "capacity"):
            sums[rank] = sums.get(rank, 0.0) + count
    return sums


MOSTLY_EAGER = 0.5
ENOUGH_STEPS = 50


@check(
    why="steps that are launched kernel by kernel are bound by the host",
    cure="find what excludes graphs",
    threads=("vllm-project/vllm/issues/4806",),
    needs=(Need.SERVER,),
    fine="steps run as graphs, or the server runs on CPU",
)
def server_graphs(subject: Subject) -> Iterator[Finding]:
    """how the steps of a server ran"""
    for server, scrape in _scraped(subject):
        steps = {labels[0]: count for labels, count in scrape.by("steps_total", "kind").items()}
        total, eager = sum(steps.values()), steps.get("eager", 0.0)
        has_graphs = any(kind == "graphs" and count for (kind,), count in scrape.by("rank_memory_bytes", "kind").items())
        if has_graphs and total >= ENOUGH_STEPS and eager / total > MOSTLY_EAGER:
            yield warning(
                f"{server.url}: {eager / total:.0%} of {total:.0f} steps ran without a graph",
                "raise max_num_tokens for long prompts, or look for options that exclude graphs",
                f"curl {server.url}/metrics | grep steps_total",
            )


@check(
    why="drafts that are never accepted cost time, and give nothing",
    cure="name the head that was trained for the model",
    threads=("vllm-project/vllm/issues/43671", "sgl-project/sglang/issues/25454"),
    needs=(Need.SERVER,),
    fine="no server has a draft model or head that seems to be for another model",
)
def server_drafts(subject: Subject) -> Iterator[Finding]:
    """how often the first draft of a draft model or head is accepted"""
    for server, scrape in _scraped(subject):
        if not scrape.value("spec_decode_wrong_head"):
            continue
        rows = scrape.value("spec_decode_num_drafts_total") or 0.0
        first = scrape.by("spec_decode_num_accepted_tokens_per_pos_total", "position").get(("0",), 0.0)
        yield warning(
            f"{server.url}: the first draft was accepted in {first / max(rows, 1):.0%} of {rows:.0f} rows",
            "compare the head's model and layer ids with the model that is served; the server's log says what was expected",
            f"curl {server.url}/metrics | grep spec_decode",
        )


@check(
    why="a load balancer over replicas of different versions answers differently each time",
    cure="roll out one version",
    threads=("vllm-project/vllm/issues/12670",),
    needs=(Need.SERVER,),
)
def server_versions(subject: Subject) -> list[Finding]:
    """version and model of the servers that are named"""
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
