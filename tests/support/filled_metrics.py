# SPDX-License-Identifier: Apache-2.0
"""Metrics of a server that every kind of request and fault has met, for tests of names, dashboards and alerts."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from phalanx.engine.messages import Stats
from phalanx.metrics import ExpertCounters, Metrics


def filled(prefix: str = "phalanx", *, engines: int = 1) -> Metrics:
    """Metrics of a server on which everything has happened that has a series. engines: how many replicas it has."""
    metrics = Metrics(prefix=prefix, model_name="demo", version="1.2")
    metrics.engines = [Stats(
        running=3, waiting=2, blocks_total=100, blocks_referenced=25, preemptions=1, prefix_queries=50, prefix_hits=20,
        prompt_tokens=60, generation_tokens=70, rank_bytes={0: {"weights": 10, "kv": 20}, 1: {"weights": 11, "kv": 21}},
        allreduce={"ONESHOT/RESIDUAL_RMS_NORM": 8, "NCCL/NONE": 9},
        rank_gauges={
            0: {
                "gpu_utilization_perc": 90.0, "power_watts": 650.5, "temperature_celsius": 60.0, "sm_clock_mhz": 1500.0,
                "nvlink_tx_bytes": 2048.0, "clock_reason/power_cap": 1.0,
            },
            1: {"gpu_utilization_perc": 80.0, "power_limit_watts": 700.0},
        },
        ran={"decode graph/steps": 5, "decode graph/tokens": 35, "decode graph/padding": 6, "eager/steps": 0},
        dp_running=[2, 1], dp_blocks_referenced=[20, 5], drafts=9, draft_tokens=25, accepted_tokens=[7, 4],
        host_total=50, host_used=10, host_hits=15, host_saved=12, host_loaded=4, host_dropped=3,
        host_states=8, host_states_used=2,
    )] * engines  # fmt: skip
    experts = ExpertCounters({("0", "0"): 30, ("0", "1"): 10}, {"0": 30, "1": 10}, 1.5)
    metrics.experts = dict.fromkeys(range(engines), experts)
    metrics.startup_phases = {"weights": 1.5}
    metrics.queue_limits = {"requests": 16, "tokens": 1000}
    metrics.cache_config = {"block_size": 16, "num_gpu_blocks": 100}
    metrics.queued = lambda: (4, 400)
    return metrics


def samples(metrics: Metrics) -> dict[str, dict[tuple, float]]:
    series: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for one in family.samples:
            series.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
    return series
