# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` says, through prometheus-client, in a registry of its own.

Names keep the stems that dashboards in the field read (`num_requests_running`, `time_to_first_token_seconds`, ...) behind a prefix:
`phalanx:` or, with `--metrics_prefix vllm`, `vllm:`. Every series has the labels `model_name` and `engine`. Latencies are
observed as they happen; the engine's gauges and counters are read from the last `EngineCounters` it sent, at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

FINISHED_REASONS = ("stop", "length", "abort", "error")
REFUSED_REASONS = ("queue_full", "draining", "not_ready")
_FINE = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075)
"""Seconds. A token of a small model takes 2 to 8 ms: below 10 ms a bucket is no wider than half its bound."""
ITL_BUCKETS = (*_FINE, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
TTFT_BUCKETS = (*_FINE, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
E2E_BUCKETS = (*_FINE, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class EngineCounters(Protocol):
    """What the engine counts (the engine's `Stats` message fits): gauges of now, counters since start; bytes by rank and kind;
    calls by "strategy/fusion"; how steps ran by "kind/steps", "kind/tokens" and "kind/padding"."""

    running: int
    waiting: int
    blocks_total: int
    blocks_referenced: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    rank_bytes: dict[int, dict[str, int]]
    allreduce: dict[str, int]
    ran: dict[str, int]


class Metrics:
    """All series of one server. Made before the engine is there; `engine` is filled in as the engine speaks."""

    def __init__(self, *, prefix: str, model_name: str, version: str, engine: str = "0") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of creation per series doubles what a scrape carries, and no dashboard reads it
        self.registry = CollectorRegistry(auto_describe=False)
        self.prefix = prefix
        self._labels = {"model_name": model_name, "engine": engine}
        self._first = self._histogram("time_to_first_token_seconds", "From acceptance to the first token.", TTFT_BUCKETS)
        self._between = self._histogram("inter_token_latency_seconds", "Between tokens of one sequence.", ITL_BUCKETS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From acceptance to the last token.", E2E_BUCKETS)
        ended = "Sequences that ended, by reason."
        self._finished = self._counter("request_success_total", ended, "finished_reason", FINISHED_REASONS)
        self._refused = self._counter("request_refused_total", "Requests turned away at the door.", "reason", REFUSED_REASONS)
        self.registry.register(_EngineCollector(self))
        ProcessCollector(registry=self.registry)
        self.engine: EngineCounters | None = None
        self.build = {"version": version}
        self.startup_phases: dict[str, float] = {}
        self.queue_limits: dict[str, float] = {}
        self.rank_bytes: dict[int, dict[str, int]] = {}
        self.queued: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens came together, `seconds` after the one before them."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def finished(self, reason: str, seconds: float) -> None:
        """A sequence ended, `seconds` after it was accepted."""
        self._whole.observe(seconds)
        self._finished.labels(**self._labels, finished_reason=reason if reason in FINISHED_REASONS else "error").inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(**self._labels, reason=reason).inc()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text of `/metrics` and its content type, in the format that the scraper's Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def name(self, stem: str) -> str:
        return f"{self.prefix}:{stem}"

    def _histogram(self, stem: str, says: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(self.name(stem), says, list(self._labels), registry=self.registry, buckets=buckets)
        return made.labels(**self._labels)

    def _counter(self, stem: str, says: str, label: str, values: Iterable[str]) -> Counter:
        made = Counter(self.name(stem), says, [*self._labels, label], registry=self.registry)
        for value in values:  # a series that is there at 0 can be told from one that is not exported
            made.labels(**self._labels, **{label: value})
        return made


class _EngineCollector(Collector):
    """Reads what the engine last said, at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        held = self._metrics
        counters = held.engine
        if counters is not None:
            yield from self._of_engine(counters)
        queued, tokens = held.queued()
        yield self._gauge("num_requests_queued", "Sequences accepted by the server that have no token yet.", {(): queued})
        yield self._gauge("num_tokens_queued", "Prompt tokens of those sequences.", {(): tokens})
        limits = {(kind,): value for kind, value in held.queue_limits.items()}
        yield self._gauge("queue_limit", "What may wait, at most, by kind.", limits, "kind")
        phases = {(name,): seconds for name, seconds in held.startup_phases.items()}
        yield self._gauge("startup_phase_seconds", "Where start-up time went.", phases, "phase")
        yield self._gauge("build_info", "The build, in labels.", {tuple(held.build.values()): 1}, *held.build)

    def _of_engine(self, counters: EngineCounters) -> Iterable[Metric]:
        yield self._gauge("num_requests_running", "Sequences in the batch.", {(): counters.running})
        yield self._gauge("num_requests_waiting", "Sequences that wait for a place in the batch.", {(): counters.waiting})
        used = counters.blocks_referenced / counters.blocks_total if counters.blocks_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "KV blocks that requests hold, 0 to 1; cached ones do not count.", {(): used})
        for stem, says, value in (
            ("num_preemptions", "Sequences put back to make room.", counters.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hits),
            ("prompt_tokens", "Prompt tokens of accepted requests.", counters.prompt_tokens),
            ("generation_tokens", "Tokens made.", counters.generation_tokens),
        ):
            yield self._count(stem, says, {(): value})
        kept = counters.rank_bytes or self._metrics.rank_bytes
        by_rank = {(str(rank), kind): size for rank, kinds in sorted(kept.items()) for kind, size in kinds.items()}
        yield self._gauge("rank_memory_bytes", "Memory of each rank, by kind.", by_rank, "rank", "kind")
        calls = {tuple(f"{key}/".split("/")[:2]): count for key, count in counters.allreduce.items()}
        yield self._count("allreduce_calls", "All-reduces of rank 0, by strategy and fusion.", calls, "strategy", "fusion")
        for stem, what, says in (
            ("steps", "steps", "Steps of rank 0, by how they ran."),
            ("step_tokens", "tokens", "Tokens of those steps."),
            ("step_padding_tokens", "padding", "What graphs of fixed sizes forwarded beside those tokens."),
        ):
            ran = {(key.removesuffix(f"/{what}"),): count for key, count in counters.ran.items() if key.endswith(f"/{what}")}
            yield self._count(stem, says, ran, "kind")

    def _gauge(self, stem: str, says: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(self._metrics.name(stem), says, labels=self._names(labels)), values)

    def _count(self, stem: str, says: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._fill(CounterMetricFamily(self._metrics.name(stem), says, labels=self._names(labels)), values)

    def _names(self, labels: Iterable[str]) -> list[str]:
        return [*self._metrics._labels, *labels]

    def _fill(self, family: Any, values: Mapping[Any, float]) -> Metric:
        for labels, value in values.items():
            family.add_metric([*self._metrics._labels.values(), *labels], value)
        filled: Metric = family
        return filled
