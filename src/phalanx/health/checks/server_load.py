# SPDX-License-Identifier: Apache-2.0
"""Whether queues are full, requests refused, or sequences preempted."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject

FULL = 0.95
QUEUE = 0.8


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for server in subject.servers:
        scrape = server.latest
        if scrape is None:
            continue
        used, waiting = scrape.value("kv_cache_usage_perc") or 0.0, scrape.value("num_requests_waiting") or 0.0
        preempted, refused = (
            server.rise("num_preemptions_total") or 0.0,
            server.rise("request_refused_total", reason="queue_full") or 0.0,
        )
        queued, limit = scrape.value("num_requests_queued") or 0.0, scrape.value("queue_limit", kind="requests") or 0.0
        if preempted:
            findings.append(
                warning(
                    f"{server.url}: {preempted:.0f} sequences were preempted during the check, with {used:.0%} of the KV"
                    " cache in use",
                    "give the KV cache more memory, or lower max_batch_size",
                    "phalanx serve ... --max_batch_size N",
                    "phalanx serve ... --kv_cache_dtype fp8",
                )
            )
        elif used >= FULL and waiting:
            findings.append(
                warning(
                    f"{server.url}: the KV cache is {used:.0%} full, and {waiting:.0f} requests wait for it",
                    "add a replica, or use kv_cache_dtype=fp8",
                    "phalanx serve ... --kv_cache_dtype fp8",
                )
            )
        if refused:
            findings.append(
                warning(
                    f"{server.url}: {refused:.0f} requests were refused during the check: its queue is full",
                    "add a replica",
                    "phalanx monitor",
                )
            )
        elif limit and queued / limit >= QUEUE:
            findings.append(
                warning(
                    f"{server.url}: {queued:.0f} of {limit:.0f} places of its queue are taken",
                    "add a replica, or send less",
                    "phalanx monitor",
                )
            )
    return findings or [ok("queues and KV caches have room")]


CHECK = Check(
    name="server_load",
    what="queue, KV cache and preemptions of each server",
    why="a full KV cache puts sequences back, which computes them twice; a full queue answers 429",
    cure="add memory or replicas",
    threads=("https://github.com/vllm-project/vllm/issues/8031", "https://github.com/vllm-project/vllm/issues/14350"),
    examine=examine,
    needs=(Need.SERVER,),
)
