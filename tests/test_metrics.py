# SPDX-License-Identifier: Apache-2.0
"""The names that dashboards read, and what the series say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Histogram

from phalanx.engine.messages import Stats
from phalanx.metrics import E2E_BUCKETS, ITL_BUCKETS, TTFT_BUCKETS, Latencies, Metrics
from tests.support.filled_metrics import filled, samples

ALERTS = Path(__file__).resolve().parents[1] / "dashboards" / "alerts.yaml"
STEMS = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
]  # fmt: skip


@pytest.mark.parametrize("prefix", ["phalanx", "vllm"])
def test_names_and_labels(prefix):
    exported = samples(filled(prefix))
    for stem in STEMS:
        series = exported[f"{prefix}:{stem}"]
        for labels in series:
            assert {("model_name", "demo"), ("engine", "0")} <= set(labels)
    reasons = {dict(labels)["finished_reason"] for labels in exported[f"{prefix}:request_success_total"]}
    assert {"stop", "length", "abort"} <= reasons
    assert not any(name.endswith("_created") for name in exported)


def test_values():
    metrics = filled()
    metrics.first_token(0.003)
    metrics.next_tokens(0.008, 2)
    metrics.finished("stop", 0.5)
    metrics.finished("strange", 0.5)
    metrics.refused("queue_full")
    exported = samples(metrics)

    def value(name: str, **labels: str) -> float:
        return exported[f"phalanx:{name}"][tuple(sorted({"model_name": "demo", "engine": "0", **labels}.items()))]

    assert value("num_requests_running") == 3
    assert value("num_requests_waiting") == 2
    assert value("kv_cache_usage_perc") == 0.25
    assert value("prompt_tokens_total") == 60
    assert value("generation_tokens_total") == 70
    assert value("prefix_cache_hits_total") == 20
    assert value("prefix_cache_tier_hits_total", tier="device") == 5
    assert value("prefix_cache_tier_hits_total", tier="host") == 15
    assert value("kv_host_usage_perc") == 0.2
    assert value("kv_host_block_copies_total", direction="out") == 12
    assert value("kv_host_block_copies_total", direction="in") == 4
    assert value("kv_host_dropped_blocks_total") == 3
    assert value("kv_host_state_usage_perc") == 0.25
    assert value("spec_decode_num_drafts_total") == 9
    assert value("spec_decode_num_draft_tokens_total") == 25
    assert value("spec_decode_num_accepted_tokens_total") == 11
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 4
    assert value("spec_decode_wrong_head") == 0
    assert value("rank_memory_bytes", rank="1", kind="kv") == 21
    assert value("allreduce_calls_total", strategy="ONESHOT", fusion="RESIDUAL_RMS_NORM") == 8
    assert value("steps_total", kind="decode graph") == 5
    assert value("steps_total", kind="eager") == 0
    assert value("step_tokens_total", kind="decode graph") == 35
    assert value("step_padding_tokens_total", kind="decode graph") == 6
    assert value("startup_phase_seconds", phase="weights") == 1.5
    assert value("queue_limit", kind="tokens") == 1000
    assert value("num_requests_queued") == 4
    assert value("build_info", version="1.2") == 1
    assert value("time_to_first_token_seconds_count") == 1
    assert value("time_to_first_token_seconds_bucket", le="0.003") == 1
    assert value("inter_token_latency_seconds_count") == 2
    assert value("inter_token_latency_seconds_sum") == pytest.approx(0.008)
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("request_success_total", finished_reason="error") == 1
    assert value("request_refused_total", reason="queue_full") == 1


def test_before_the_engine():
    exported = samples(Metrics(prefix="phalanx", model_name="demo", version="1"))
    assert "phalanx:build_info" in exported
    assert "phalanx:num_requests_running" not in exported


@pytest.mark.parametrize("buckets", [TTFT_BUCKETS, ITL_BUCKETS, E2E_BUCKETS])
def test_buckets_are_fine_below_ten_milliseconds(buckets):
    assert list(buckets) == sorted(set(buckets))
    assert len([bound for bound in buckets if bound < 0.01]) >= 6


def test_rank_bytes_of_the_start_stand_until_there_are_newer():
    metrics = filled()
    metrics.rank_bytes = {0: {"kv": 1}}
    metrics.engines = [Stats()]
    assert len(samples(metrics)["phalanx:rank_memory_bytes"]) == 1


def test_experts_by_layer_and_by_rank():
    metrics = filled()
    exported = samples(metrics)
    values = {(dict(key)["layer"], dict(key)["expert"]): value for key, value in exported["phalanx:expert_tokens_total"].items()}
    assert values == {("0", "0"): 30, ("0", "1"): 10}
    assert list(exported["phalanx:expert_imbalance"].values()) == [1.5]
    metrics.each_expert = False
    assert "phalanx:expert_tokens_total" not in samples(metrics)
    assert sum(samples(metrics)["phalanx:expert_rank_tokens_total"].values()) == 40
    metrics.experts = {}  # a model without experts
    assert not [name for name in samples(metrics) if "expert" in name]


def test_gauges_of_gpus():
    """Each as NVML answered it, by rank; what no rank answers has no series."""
    series = samples(filled())

    def value(name, **labels):
        entries = {tuple(dict(key).get(label) for label in labels): amount for key, amount in series[f"phalanx:{name}"].items()}
        return entries[tuple(labels.values())]

    assert [value("rank_gpu_utilization_perc", rank=rank) for rank in ("0", "1")] == [90.0, 80.0]
    assert value("rank_power_watts", rank="0") == 650.5
    assert value("rank_power_limit_watts", rank="1") == 700.0
    assert value("rank_nvlink_bytes_total", rank="0", direction="tx") == 2048.0
    assert value("rank_clock_reason", rank="0", reason="power_cap") == 1.0
    assert set(series["phalanx:rank_temperature_celsius"]) == {(("engine", "0"), ("model_name", "demo"), ("rank", "0"))}
    bare = Metrics(prefix="phalanx", model_name="demo", version="1")
    bare.engines = [Stats(rank_bytes={0: {"kv": 1}})]
    assert not [name for name in samples(bare) if "gpu" in name or "nvlink" in name or "power" in name or "host" in name]


def test_data_parallel_indices_share_the_blocks():
    exported = samples(filled())
    usage = {dict(labels)["dp_index"]: value for labels, value in exported["phalanx:dp_kv_cache_usage_perc"].items()}
    assert usage == {"0": 0.4, "1": 0.1}
    running = {dict(labels)["dp_index"]: value for labels, value in exported["phalanx:dp_requests_running"].items()}
    assert running == {"0": 2, "1": 1}


def test_alerts_ask_for_series_that_are_there():
    rules = [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    assert len(rules) >= 8
    series = samples(filled())
    for rule in rules:
        assert {"summary", "remedy"} <= rule["annotations"].keys()
        for name, selector in re.findall(r"(phalanx:\w+)(?:\{([^}]*)\})?", rule["expr"]):
            assert name in series, f"{rule['alert']} asks for {name}, which is not exported"
            labels = {label for key in series[name] for label, _ in key}
            assert set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', selector)) <= labels, rule["alert"]


# What the endpoint picker of the Gateway API Inference Extension reads from a server of this prefix, without any setting.
PICKER_GAUGES = {"num_requests_waiting": 2, "num_requests_running": 3, "kv_cache_usage_perc": 0.25, "gpu_cache_usage_perc": 0.25}


def test_the_endpoint_picker_gets_what_it_reads():
    series = samples(filled("vllm"))
    for stem, expected in PICKER_GAUGES.items():
        assert list(series[f"vllm:{stem}"].values()) == [expected], stem
    (cache,) = series["vllm:cache_config_info"]
    assert {"block_size": "16", "num_gpu_blocks": "100"}.items() <= dict(cache).items()
    (adapters,) = series["vllm:lora_requests_info"]
    assert {"max_lora": "0"}.items() <= dict(adapters).items()
    # An empty label is no label in Prometheus; the text has them, and the picker reads the text.
    text = filled("vllm").exposition().decode()
    assert 'running_lora_adapters=""' in text
    assert 'waiting_lora_adapters=""' in text


def test_names_of_pickers_stand_under_their_prefix_only():
    series = samples(filled())
    assert "phalanx:cache_config_info" in series
    assert not [name for name in series if "lora" in name or "gpu_cache" in name]


def test_latencies_are_those_of_prometheus_client():
    """Bounds belong to their buckets, and several tokens that come together count each."""
    theirs = CollectorRegistry()
    histogram = Histogram("x", "Seconds.", ["a"], registry=theirs, buckets=ITL_BUCKETS).labels(a="b")
    ours = CollectorRegistry()
    latencies = Latencies("x", "Seconds.", {"a": "b"}, ITL_BUCKETS)
    ours.register(latencies)
    for seconds in (0.0, 0.0005, 0.00051, 0.25, 5.0, 6.0):
        latencies.observe(seconds, 3)
        for _ in range(3):
            histogram.observe(seconds)
    assert _samples(ours) == pytest.approx({name: value for name, value in _samples(theirs).items() if "_created" not in name})


def _samples(registry: CollectorRegistry) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value for family in registry.collect() for sample in family.samples
    }
