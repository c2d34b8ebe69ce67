# SPDX-License-Identifier: Apache-2.0
"""The metrics of `/metrics`, exported with prometheus-client from a registry of their own.

Names have the stems that common dashboards read (`num_requests_running`, `time_to_first_token_seconds`, ...) behind a prefix:
`phalanx:`, or `vllm:` with `--metrics_prefix vllm`. Every series has the labels `model_name` and `engine`. Latencies are observed
as they occur. At each scrape, the engine's gauges and counters are read from the last `EngineCounters` that it sent.
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
"""Seconds. A token of a small model takes 2 to 8 ms: below 10 ms, no bucket is wider than half its upper bound."""
ITL_BUCKETS = (*_FINE, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
TTFT_BUCKETS = (*_FINE, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
E2E_BUCKETS = (*_FINE, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)

RANK_GAUGES = {
    "gpu_utilization_perc": "Utilization of each rank's GPU, 0 to 100.",
    "power_watts": "Power that each rank's GPU draws.",
    "power_limit_watts": "Power that it may draw.",
    "temperature_celsius": "Temperature of each rank's GPU.",
    "sm_clock_mhz": "Clock of its multiprocessors.",
}


class EngineCounters(Protocol):
    """The engine's counts; its `Stats` message satisfies this protocol. Gauges are current, counters run since the start.

    rank_bytes: by rank and kind. allreduce: calls by "strategy/fusion". ran: steps by "kind/steps", "kind/tokens", "kind/padding".
    rank_gauges: of each rank's GPU.
    """

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
    rank_gauges: dict[int, dict[str, float]]


class Metrics:
    """All series of one server. It is created before the engine; `engine` is set when the engine has sent its counters."""

    def __init__(self, *, prefix: str, model_name: str, version: str, engine: str = "0") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # creation times would double the size of a scrape, and no dashboard reads them
        self.registry = CollectorRegistry(auto_describe=False)
        self.prefix = prefix
        self._labels = {"model_name": model_name, "engine": engine}
        self._ttft = self._histogram("time_to_first_token_seconds", "Seconds from acceptance to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", "Seconds between two tokens of one sequence.", ITL_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Seconds from acceptance to the last token.", E2E_BUCKETS)
        self._finished = self._counter(
            "request_success_total", "Sequences that ended, by reason.", "finished_reason", FINISHED_REASONS
        )
        self._refused = self._counter(
            "request_refused_total", "Requests that admission control rejected, by reason.", "reason", REFUSED_REASONS
        )
        self.registry.register(_EngineCollector(self))
        ProcessCollector(registry=self.registry)
        self.engine: EngineCounters | None = None
        self.build = {"version": version}
        self.startup_phases: dict[str, float] = {}
        self.queue_limits: dict[str, float] = {}
        self.rank_bytes: dict[int, dict[str, int]] = {}
        self.queued: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens arrived together, `seconds` after the previous token."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def finished(self, reason: str, seconds: float) -> None:
        """A sequence ended, `seconds` after its request was accepted."""
        self._e2e.observe(seconds)
        self._finished.labels(**self._labels, finished_reason=reason if reason in FINISHED_REASONS else "error").inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(**self._labels, reason=reason).inc()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text of `/metrics` and its content type, in the format of the scraper's Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def name(self, stem: str) -> str:
        return f"{self.prefix}:{stem}"

    def _histogram(self, stem: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(self.name(stem), help_text, list(self._labels), registry=self.registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def _counter(self, stem: str, help_text: str, label: str, values: Iterable[str]) -> Counter:
        counter = Counter(self.name(stem), help_text, [*self._labels, label], registry=self.registry)
        for value in values:  # a series at 0 differs from one that is not exported
            counter.labels(**self._labels, **{label: value})
        return counter


class _EngineCollector(Collector):
    """Reads the last counters of the engine at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        metrics = self._metrics
        counters = metrics.engine
        if counters is not None:
            yield from self._of_engine(counters)
        queued, tokens = metrics.queued()
        yield self._gauge("num_requests_queued", "Sequences accepted by the server that have no token yet.", {(): queued})
        yield self._gauge("num_tokens_queued", "Prompt tokens of those sequences.", {(): tokens})
        limits = {(kind,): value for kind, value in metrics.queue_limits.items()}
        yield self._gauge("queue_limit", "Upper limit of the queue, by kind.", limits, "kind")
        phases = {(name,): seconds for name, seconds in metrics.startup_phases.items()}
        yield self._gauge("startup_phase_seconds", "Seconds of each start-up phase.", phases, "phase")
        yield self._gauge("build_info", "Version of the server, as a label.", {tuple(metrics.build.values()): 1}, *metrics.build)

    def _of_engine(self, counters: EngineCounters) -> Iterable[Metric]:
        yield self._gauge("num_requests_running", "Sequences in the batch.", {(): counters.running})
        yield self._gauge("num_requests_waiting", "Sequences that wait for a place in the batch.", {(): counters.waiting})
        used = counters.blocks_referenced / counters.blocks_total if counters.blocks_total else 0.0
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of KV cache blocks in use by requests, 0 to 1; blocks that are only cached do not count.",
            {(): used},
        )
        for stem, help_text, value in (
            ("num_preemptions", "Sequences preempted to free KV cache blocks.", counters.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hits),
            ("prompt_tokens", "Prompt tokens of accepted requests.", counters.prompt_tokens),
            ("generation_tokens", "Generated tokens.", counters.generation_tokens),
        ):
            yield self._count(stem, help_text, {(): value})
        rank_bytes = counters.rank_bytes or self._metrics.rank_bytes
        by_rank = {(str(rank), kind): size for rank, kinds in sorted(rank_bytes.items()) for kind, size in kinds.items()}
        yield self._gauge("rank_memory_bytes", "Memory of each rank, by kind.", by_rank, "rank", "kind")
        yield from self._of_gpus(counters.rank_gauges)
        calls = {tuple(f"{key}/".split("/")[:2]): count for key, count in counters.allreduce.items()}
        yield self._count("allreduce_calls", "All-reduces of rank 0, by strategy and fusion.", calls, "strategy", "fusion")
        for stem, what, help_text in (
            ("steps", "steps", "Steps of rank 0, by how they ran (graph or eager)."),
            ("step_tokens", "tokens", "Tokens of those steps."),
            ("step_padding_tokens", "padding", "Padding tokens that CUDA graphs of fixed sizes computed in addition."),
        ):
            ran = {(key.removesuffix(f"/{what}"),): count for key, count in counters.ran.items() if key.endswith(f"/{what}")}
            yield self._count(stem, help_text, ran, "kind")

    def _of_gpus(self, gauges: Mapping[int, Mapping[str, float]]) -> Iterable[Metric]:
        """Of each rank's GPU, as NVML answers; what it refuses has no series."""
        for name, help_text in RANK_GAUGES.items():
            values = {(str(rank),): of_rank[name] for rank, of_rank in sorted(gauges.items()) if name in of_rank}
            if values:
                yield self._gauge(f"rank_{name}", help_text, values, "rank")
        traffic = {
            (str(rank), way): of_rank[f"nvlink_{way}_bytes"]
            for rank, of_rank in sorted(gauges.items()) for way in ("tx", "rx") if f"nvlink_{way}_bytes" in of_rank
        }  # fmt: skip
        if traffic:
            yield self._count(
                "rank_nvlink_bytes", "Bytes of each rank's GPU over NVLink, by direction.", traffic, "rank", "direction"
            )
        reasons = {
            (str(rank), name.partition("/")[2]): value
            for rank, of_rank in sorted(gauges.items()) for name, value in of_rank.items() if name.startswith("clock_reason/")
        }  # fmt: skip
        if reasons:
            yield self._gauge(
                "rank_clock_reason", "1 where a rank's GPU runs below its highest clock, by reason.", reasons, "rank", "reason"
            )

    def _gauge(self, stem: str, help_text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(self._metrics.name(stem), help_text, labels=self._names(labels)), values)

    def _count(self, stem: str, help_text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._fill(CounterMetricFamily(self._metrics.name(stem), help_text, labels=self._names(labels)), values)

    def _names(self, labels: Iterable[str]) -> list[str]:
        return [*self._metrics._labels, *labels]

    def _fill(self, family: Any, values: Mapping[Any, float]) -> Metric:
        for labels, value in values.items():
            family.add_metric([*self._metrics._labels.values(), *labels], value)
        filled: Metric = family
        return filled
