# SPDX-License-Identifier: Apache-2.0
"""Deployments: percentiles, objectives, the fewest replicas, and cost."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from phalanx.errors import CapacityError, LayoutError, OptionError
from phalanx.layout import Layout
from phalanx.planner import arrivals, scenario, subject
from phalanx.planner.scenario import Bounds, ReplicaSpec
from phalanx.planner.search import PlanRequest

SHAPE = subject.shape_for("llama-3-8b")


def replica_spec(gpu="H200", **sizes):
    machine, _ = subject.machine_for(gpu)
    request = PlanRequest(dtype="bf16", isl=1, osl=1, max_batch_size=64, max_seq_len=4096)
    return ReplicaSpec.of(SHAPE, machine, request, Layout(**sizes))


ROWS = arrivals.of("poisson:40", isl=1000, osl=100, requests=300, seed=5)


def test_percentiles_are_numpys():
    values = [float(value) for value in numpy.random.default_rng(0).exponential(size=101)]
    for part in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert scenario.percentile(values, part) == pytest.approx(numpy.quantile(values, part))
    assert (scenario.percentile([], 0.5), scenario.percentile([4.0], 0.99)) == (0.0, 4.0)


def test_the_fewest_replicas_hold_and_one_less_do_not():
    replica, bounds = replica_spec(), Bounds(ttft=0.3, tpot=0.02, part=0.95)
    count = scenario.fewest_replicas(replica, ROWS, bounds)
    assert count > 1
    parts = [sum(map(bounds.holds, replica.run(ROWS, each).served)) / len(ROWS) for each in (count - 1, count)]
    assert parts[0] < 0.95 <= parts[1]
    looser = Bounds(ttft=0.6, tpot=0.04, part=0.9)
    assert scenario.fewest_replicas(replica, ROWS, looser) <= count


def test_replicas_of_a_host_share_its_memory():
    machine, _ = subject.machine_for("H200")
    request = PlanRequest(dtype="bf16", isl=1, osl=1, max_batch_size=64, max_seq_len=4096, kv_host_memory=64 << 30)
    one, four = (ReplicaSpec.of(SHAPE, machine, request, Layout(), sharing=sharing) for sharing in (1, 4))
    assert one.options.host_blocks == 64 * 2**30 // (16 * 131072) == 4 * four.options.host_blocks
    assert one.options.copied_blocks == 64
    assert one.copies.block == pytest.approx(16 * 131072 / machine.gpu.pcie_bandwidth)
    assert (one.copies.state, one.options.host_states) == (0, 0)
    assert ReplicaSpec.of(SHAPE, machine, request, Layout(), prefix_caching=False).options.host_blocks == 0
    rows = [arrivals.Arrival(0.0, 1024, 2, (7, 8))] * 3
    report = scenario.document(one, rows, 1, Bounds(), concurrency=1)
    assert (report["asked"]["host_blocks"], report["prefix_hits_on_host"]) == (one.options.host_blocks, 0)
    assert "(0.0% in host memory)" in scenario.text(report)


def test_states_in_host_memory_are_found_in_a_simulation():
    """Four prompts come in turn, and the device keeps the states of two prefixes beside those of slots."""
    machine, shape = subject.machine_for("H200")[0], subject.shape_for("qwen3-next-80b-a3b")
    request = PlanRequest(dtype="fp8", isl=1, osl=1, max_batch_size=4, max_seq_len=4096, kv_host_memory=64 << 30)
    one = ReplicaSpec.of(shape, machine, request, Layout())
    assert (one.options.state_snapshots, one.options.host_states) == (2, (64 << 30) // (4096 * 24_576 + 79_036_416))
    assert one.copies.state == pytest.approx(79_036_416 / machine.gpu.pcie_bandwidth)
    rows = [arrivals.Arrival(float(n), 2048, 2, tuple(range(n % 4 * 4, n % 4 * 4 + 4))) for n in range(12)]
    with_host, without = (
        replica.run(rows) for replica in (one, replace(one, options=replace(one.options, host_blocks=0, host_states=0)))
    )
    assert (with_host.hits, with_host.host_hits, without.hits) == (8 * 2032, 4 * 2032, 0), "two of four stay on the device"
    assert with_host.served[-1].ttft < without.served[-1].ttft


def test_ranks_that_divide_latents_hold_more_in_a_simulation():
    machine, shape = subject.machine_for("H200")[0], subject.shape_for("deepseek-v3")
    request = PlanRequest(dtype="fp8", isl=1, osl=1, max_batch_size=64, max_seq_len=4096)
    one, eight = (ReplicaSpec.of(shape, machine, request, Layout(tp=8, dcp=dcp)) for dcp in (1, 8))
    assert eight.options.block_size == 8 * one.options.block_size
    assert 7.9 * one.kv_tokens < eight.kv_tokens < 8 * one.kv_tokens


def test_an_objective_that_no_number_holds_is_an_error(monkeypatch):
    monkeypatch.setattr(scenario, "MOST_REPLICAS", 20)
    with pytest.raises(CapacityError, match="20 replicas do not hold the objective"):
        scenario.fewest_replicas(replica_spec(), ROWS[:3], Bounds(ttft=1e-6))
    with pytest.raises(OptionError, match="has no objective"):
        scenario.fewest_replicas(replica_spec(), ROWS, Bounds())


def test_the_report_adds_up():
    report = scenario.document(replica_spec(), ROWS, 2, Bounds(ttft=0.5), gpu_hour=3.6, trace="poisson:40", model="llama-3-8b")
    assert report["completed"] == 300
    assert report["asked"]["gpus"] == 2
    spent = 3.6 / 3600 * 2 * report["seconds"]
    assert report["cost_per_million_output_tokens"] == pytest.approx(spent / (300 * 100) * 1e6)
    assert report["goodput_requests_per_second"] == pytest.approx(report["within_slo"] * 300 / report["seconds"])
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queued_ms"):
        spread = report[name]
        assert spread["p50"] <= spread["p90"] <= spread["p99"]
    assert report["e2e_ms"]["mean"] == pytest.approx(report["ttft_ms"]["mean"] + 99 * report["tpot_ms"]["mean"])
    text = scenario.text(report)
    assert "goodput" in text
    assert "per million output tokens" in text


def test_what_cannot_run_is_told_before_it_is_simulated():
    with pytest.raises(CapacityError, match="does not fit; memory: weights"):
        ReplicaSpec.of(subject.shape_for("llama-3-70b"), subject.machine_for("L4")[0], PlanRequest(max_seq_len=2048), Layout())
    with pytest.raises(LayoutError, match="does not divide"):
        replica_spec(tp=3)


def test_requests_beyond_max_seq_len_are_refused():
    rows = [arrivals.Arrival(0.0, 1000, 100), arrivals.Arrival(0.0, 4000, 96), arrivals.Arrival(0.0, 4000, 97)]
    short, exact, long = replica_spec().run(rows).served
    assert (short.refused, exact.refused) == ("", "")
    assert long.refused.startswith("a request of 4000 + 97 tokens is too long; max_seq_len is 4096")


def test_a_dense_model_is_not_simulated_in_groups():
    with pytest.raises(LayoutError, match="ep 2 splits experts, and the model has none"):
        replica_spec(dp=2)


def test_a_request_longer_than_a_groups_cache_does_not_fit():
    shape, (machine, _) = subject.shape_for("gpt-oss-120b"), subject.machine_for("L40S")
    with pytest.raises(CapacityError, match="does not fit; memory: weights"):
        ReplicaSpec.of(shape, machine, PlanRequest(max_batch_size=64, max_seq_len=120_000, fraction=0.4), Layout(dp=2))
