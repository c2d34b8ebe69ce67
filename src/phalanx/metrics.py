# SPDX-License-Identifier: Apache-2.0
"""The metrics of `/metrics`, exported with prometheus-client from a registry of their own.

Names have the stems that common dashboards read (`num_requests_running`, `time_to_first_token_seconds`, ...) behind a prefix:
`phalanx:`, or `vllm:` with `--metrics_prefix vllm`, which is what endpoint pickers of the Gateway API read without any setting.
Every series has the labels `model_name` and `engine`: the number of a replica for what an engine counts, 0 for what the server
does. Latencies are observed as they occur. At each scrape, an engine's gauges and counters are read from the last
`EngineCounters` that it sent.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

FINISHED_REASONS = ("stop", "length", "abort", "error")
REFUSED_REASONS = ("queue_full", "draining", "not_ready")
_FINE = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075)
"""Seconds. A token of a small model takes 2 to 8 ms: below 10 ms, no bucket is wider than half its upper bound."""
ITL_BUCKETS = (*_FINE, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
TTFT_BUCKETS = (*_FINE, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
E2E_BUCKETS = (*_FINE, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Every scraper reads this format. prometheus-client writes `:` as `_` in names for scrapers that ask for OpenMetrics without an
escaping, as Prometheus 2 does, and no dashboard would find them."""

PICKER_PREFIX = "vllm"
"""The prefix of the names that endpoint pickers of the Gateway API Inference Extension read unless they are told others."""

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
    rank_gauges: of each rank's GPU. drafts: rows of which drafts were verified; accepted_tokens: by position; wrong_head: 1 where
    their rate is that of a draft model or head for another model. dp_*: of each data-parallel index, empty where there is one.
    adapters_*: requests by the names of adapters, those that have any; max_adapters: slots for them. host_*: of KV blocks in host
    memory. stalled: why work waits and no step ends; empty while steps do.
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
    nonfinite_requests: int
    drafts: int
    draft_tokens: int
    accepted_tokens: list[int]
    wrong_head: int
    rank_bytes: dict[int, dict[str, int]]
    allreduce: dict[str, int]
    ran: dict[str, int]
    rank_gauges: dict[int, dict[str, float]]
    dp_running: list[int]
    dp_blocks_referenced: list[int]
    adapters_running: dict[str, int]
    adapters_waiting: dict[str, int]
    adapters_in_slots: list[str]
    max_adapters: int
    host_total: int
    host_used: int
    host_hits: int
    host_saved: int
    host_loaded: int
    host_dropped: int
    host_states: int
    host_states_used: int
    stalled: str


class ExpertCounters(NamedTuple):
    """The load of an engine's experts, as pairs of a token and one of its experts. tokens: by layer and expert; rank_tokens: by
    rank, over all layers; imbalance: the largest load of a rank over the mean, in the last minute, averaged over layers.
    moved: experts that a rebalance has moved; longest_move: seconds that one step waited for that, at most."""

    tokens: dict[tuple[str, str], int]
    rank_tokens: dict[str, int]
    imbalance: float
    moved: int = 0
    longest_move: float = 0.0


class Latencies(Collector):
    """A histogram. One of prometheus-client would take two locks and look at the buckets one by one, for every token.

    Observed by one thread; a scrape on another may see a count without its seconds. buckets: their upper bounds, ascending.
    """

    def __init__(self, name: str, help_text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._name, self._help, self._labels, self._bounds = name, help_text, labels, list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` times the same latency."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        return [family]


class Metrics:
    """All series of one server. It is created before the engine; `engines` is set when the engine (or each replica) has sent its
    counters. engines_up: the numbers of those that take requests."""

    def __init__(self, *, prefix: str, model_name: str, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # creation times would double the size of a scrape, and no dashboard reads them
        self.registry = CollectorRegistry(auto_describe=False)
        self.prefix, self.model_name = prefix, model_name
        self._labels = {"model_name": model_name, "engine": "0"}
        self._ttft = self._histogram("time_to_first_token_seconds", "Seconds from acceptance to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", "Seconds between two tokens of one sequence.", ITL_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Seconds from acceptance to the last token.", E2E_BUCKETS)
        self._finished = self._counter(
            "request_success_total", "Sequences that ended, by reason.", "finished_reason", FINISHED_REASONS
        )
        self._refused = self._counter(
            "request_refused_total", "Requests that admission control rejected, by reason.", "reason", REFUSED_REASONS
        )
        self._accepted = self._counter(
            "request_fields_without_effect_total", "Requests with a field that is accepted without effect, by field.", "field", ()
        )
        self.registry.register(_EngineCollector(self))
        ProcessCollector(registry=self.registry)
        self.engines: Sequence[EngineCounters] = ()
        self.engines_up: Sequence[int] = (0,)
        self.experts: Mapping[int, ExpertCounters] = {}
        self.each_expert = True
        self._one_scrape = threading.Lock()
        self.build = {"version": version}
        self.startup_phases: dict[str, float] = {}
        self.queue_limits: dict[str, float] = {}
        self.cache_config: dict[str, int] = {}
        self.rank_bytes: dict[int, dict[str, int]] = {}
        self.queued: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens arrived together, `seconds` after the previous token."""
        self._itl.observe(seconds / count, count)

    def finished(self, reason: str, seconds: float) -> None:
        """A sequence ended, `seconds` after its request was accepted."""
        self._e2e.observe(seconds)
        self._finished.labels(**self._labels, finished_reason=reason if reason in FINISHED_REASONS else "error").inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(**self._labels, reason=reason).inc()

    def accepted_field(self, field: str) -> None:
        """A request has a field that is accepted without effect. field: body and name, one of a fixed table."""
        self._accepted.labels(**self._labels, field=field).inc()

    def exposition(self) -> bytes:
        """The text of `/metrics`. On any thread: thousands of experts take a tenth of a second."""
        with self._one_scrape:
            return generate_latest(self.registry)

    def name(self, stem: str) -> str:
        return f"{self.prefix}:{stem}"

    def _histogram(self, stem: str, help_text: str, buckets: Sequence[float]) -> Latencies:
        latencies = Latencies(self.name(stem), help_text, self._labels, buckets)
        self.registry.register(latencies)
        return latencies

    def _counter(self, stem: str, help_text: str, label: str, values: Iterable[str]) -> Counter:
        counter = Counter(self.name(stem), help_text, [*self._labels, label], registry=self.registry)
        for value in values:  # a series at 0 differs from one that is not exported
            counter.labels(**self._labels, **{label: value})
        return counter


class _EngineCollector(Collector):
    """Reads the last counters of the engine at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._engine = "0"
        self._now: Callable[[], float] = time.time
        self._adapters: dict[str, tuple[tuple[str, ...], float]] = {}  # by engine: what the picker was told last, and since when

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        metrics = self._metrics
        yield from self._of_engines(metrics.engines)
        queued, tokens = metrics.queued()
        yield self._gauge("num_requests_queued", "Sequences accepted by the server that have no token yet.", {(): queued})
        yield self._gauge("num_tokens_queued", "Prompt tokens of those sequences.", {(): tokens})
        limits = {(kind,): value for kind, value in metrics.queue_limits.items()}
        yield self._gauge("queue_limit", "Upper limit of the queue, by kind.", limits, "kind")
        phases = {(name,): seconds for name, seconds in metrics.startup_phases.items()}
        yield self._gauge("startup_phase_seconds", "Seconds of each start-up phase.", phases, "phase")
        yield self._gauge("build_info", "Version of the server, as a label.", {tuple(metrics.build.values()): 1}, *metrics.build)
        if metrics.cache_config:
            config = {name: str(value) for name, value in metrics.cache_config.items()}
            yield self._gauge("cache_config_info", "Size of the KV cache, as labels.", {tuple(config.values()): 1}, *config)

    def _of_picker(self, counters: EngineCounters) -> Iterable[Metric]:
        """What endpoint pickers read beside the series above: one that they miss is an error in their log at each scrape."""
        running, waiting = (",".join(sorted(each)) for each in (counters.adapters_running, counters.adapters_waiting))
        adapters = {"max_lora": str(counters.max_adapters), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        values, (before, _) = tuple(adapters.values()), self._adapters.get(self._engine, ((), 0.0))
        if values != before:
            self._adapters[self._engine] = values, self._now()
        changed = self._adapters[self._engine][1]
        yield self._gauge("lora_requests_info", "Adapters of requests; the time of the last change.", {values: changed}, *adapters)
        yield self._gauge("gpu_cache_usage_perc", "kv_cache_usage_perc under its older name.", {(): _share(counters)})

    def _of_engines(self, engines: Sequence[EngineCounters]) -> Iterable[Metric]:
        """Each family once, with the samples of all engines."""
        families: dict[str, Metric] = {}
        for number, counters in enumerate(engines):
            self._engine = str(number)
            up = {(): float(number in self._metrics.engines_up and not counters.stalled)}
            picked = self._of_picker(counters) if self._metrics.prefix == PICKER_PREFIX else ()
            alive = self._gauge("engine_up", "1 where an engine takes requests and makes progress.", up)
            experts = self._of_experts(self._metrics.experts.get(number))
            for family in (*self._of_engine(counters), *experts, *picked, alive):
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        self._engine = "0"
        return families.values()

    def _of_adapters(self, counters: EngineCounters) -> Iterable[Metric]:
        """Series of the adapters that have requests now, or a slot: there are never more than those."""
        if not counters.max_adapters:
            return
        states = (("running", counters.adapters_running), ("waiting", counters.adapters_waiting))
        requests = {(name, state): count for state, counts in states for name, count in counts.items()}
        yield self._gauge("adapter_requests", "Sequences of an adapter, by state.", requests, "adapter", "state")
        placed = {(name,): 1 for name in counters.adapters_in_slots}
        yield self._gauge("adapter_in_slot", "1 for each adapter that has a slot on the device.", placed, "adapter")

    def _of_engine(self, counters: EngineCounters) -> Iterable[Metric]:
        yield self._gauge("num_requests_running", "Sequences in the batch.", {(): counters.running})
        yield from self._of_adapters(counters)
        yield self._gauge("num_requests_waiting", "Sequences that wait for a place in the batch.", {(): counters.waiting})
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of KV cache blocks in use by requests, 0 to 1; blocks that are only cached do not count.",
            {(): _share(counters)},
        )
        yield from self._of_dp_indices(counters)
        for stem, help_text, value in (
            ("num_preemptions", "Sequences preempted to free KV cache blocks.", counters.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hits),
            ("prompt_tokens", "Prompt tokens of accepted requests.", counters.prompt_tokens),
            ("generation_tokens", "Generated tokens.", counters.generation_tokens),
            ("nonfinite_requests", "Requests that ended because their logits were NaN or infinite.", counters.nonfinite_requests),
        ):
            yield self._count(stem, help_text, {(): value})
        yield from self._of_host_memory(counters)
        yield from self._of_drafts(counters)
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

    def _of_host_memory(self, counters: EngineCounters) -> Iterable[Metric]:
        """Of an engine that keeps KV blocks there."""
        if not counters.host_total:
            return
        hits = {("device",): counters.prefix_hits - counters.host_hits, ("host",): counters.host_hits}
        yield self._count("prefix_cache_tier_hits", "Prompt tokens found in the prefix cache, by where.", hits, "tier")
        usage = counters.host_used / counters.host_total
        yield self._gauge("kv_host_usage_perc", "Share of the KV blocks of host memory that have content, 0 to 1.", {(): usage})
        copies = {("out",): counters.host_saved, ("in",): counters.host_loaded}
        yield self._count("kv_host_block_copies", "KV blocks copied to host memory and back.", copies, "direction")
        lost = "KV blocks that left the device uncopied, since the step had its copies or no slot."
        yield self._count("kv_host_dropped_blocks", lost, {(): counters.host_dropped})
        if counters.host_states:
            usage = counters.host_states_used / counters.host_states
            yield self._gauge("kv_host_state_usage_perc", "Share of the states of prefixes in host memory in use.", {(): usage})

    def _of_drafts(self, counters: EngineCounters) -> Iterable[Metric]:
        """Of an engine that speculates. The mean acceptance length is 1 + accepted / drafts."""
        by_place = {(str(place),): count for place, count in enumerate(counters.accepted_tokens)}
        if by_place:
            yield self._count("spec_decode_num_drafts", "Rows whose drafts were verified.", {(): counters.drafts})
            yield self._count("spec_decode_num_draft_tokens", "Drafts that were verified.", {(): counters.draft_tokens})
            accepted = {(): sum(counters.accepted_tokens)}
            yield self._count("spec_decode_num_accepted_tokens", "Drafts that were accepted.", accepted)
            help_text = "Accepted drafts, by their position in the row."
            yield self._count("spec_decode_num_accepted_tokens_per_pos", help_text, by_place, "position")
            help_text = "1: the first draft is accepted so rarely that the draft model or head is likely for another model."
            yield self._gauge("spec_decode_wrong_head", help_text, {(): counters.wrong_head})

    def _of_dp_indices(self, counters: EngineCounters) -> Iterable[Metric]:
        """How evenly requests and their KV blocks lie on data-parallel indices, where there are several."""
        indices = len(counters.dp_running)
        if indices:
            running = {(str(index),): count for index, count in enumerate(counters.dp_running)}
            yield self._gauge("dp_requests_running", "Sequences in the batch of each data-parallel index.", running, "dp_index")
            blocks = counters.blocks_total / indices or 1.0
            usage = {(str(index),): count / blocks for index, count in enumerate(counters.dp_blocks_referenced)}
            yield self._gauge("dp_kv_cache_usage_perc", "kv_cache_usage_perc of each data-parallel index.", usage, "dp_index")

    def _of_experts(self, counters: ExpertCounters | None) -> Iterable[Metric]:
        """Of a model with experts."""
        if counters is None:
            return
        pairs = "Pairs of a token and one of its experts"
        if self._metrics.each_expert:
            yield self._count("expert_tokens", f"{pairs}, by layer and expert.", counters.tokens, "layer", "expert")
        by_rank = {(rank,): count for rank, count in counters.rank_tokens.items()}
        yield self._count("expert_rank_tokens", f"{pairs}, by the rank that has the expert.", by_rank, "rank")
        help_text = "Largest load of a rank's experts over the mean of the ranks, in the last minute, averaged over layers."
        yield self._gauge("expert_imbalance", help_text, {(): counters.imbalance})
        yield self._count("expert_moves", "Experts that rebalances have moved to other ranks.", {(): counters.moved})
        help_text = "Longest time that a step waited for a move of experts, since the start."
        yield self._gauge("expert_move_seconds_max", help_text, {(): counters.longest_move})

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
            family.add_metric([self._metrics._labels["model_name"], self._engine, *labels], value)
        filled: Metric = family
        return filled


def _share(counters: EngineCounters) -> float:
    """KV cache blocks that requests use, of all: 0 to 1."""
    return counters.blocks_referenced / counters.blocks_total if counters.blocks_total else 0.0
