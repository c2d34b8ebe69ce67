# SPDX-License-Identifier: Apache-2.0
"""A steady load is priced as the simulator has it, whose scheduler is the engine's; and it gets worse with more of everything."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from phalanx.layout import Layout
from phalanx.planner import arrivals, scenario, steady, subject
from phalanx.planner.burst import Limits
from phalanx.planner.search import PlanRequest

CASES = [
    ("llama-3-70b", 4, 4, 1, 64, 1024, 512),
    ("llama-3-70b", 4, 2, 2, 64, 1024, 512),
    ("llama-3-70b", 4, 4, 1, 16, 4000, 200),
    ("llama-3-8b", 1, 1, 1, 32, 1024, 256),
    ("llama-3-8b", 1, 1, 1, 1, 1024, 256),
    ("llama-3.1-8b", 1, 1, 1, 4, 12_000, 1000),  # prompts of several steps
    ("mixtral-8x7b", 4, 4, 1, 64, 1024, 256),
]


def replica(model, count, tp, pp, isl=1024, osl=1024):
    shape, (machine, _) = subject.shape_for(model), subject.machine_for("H100", gpus_per_node=count)
    return scenario.ReplicaSpec.of(shape, machine, PlanRequest(isl=isl, osl=osl, max_batch_size=256), Layout(tp=tp, pp=pp))


@pytest.mark.parametrize(("model", "count", "tp", "pp", "requests", "isl", "osl"), CASES)
def test_as_simulated(model, count, tp, pp, requests, isl, osl):
    spec = replica(model, count, tp, pp, isl, osl)
    load = steady.run(spec.costs, requests, isl, osl, Limits(256, 8192, spec.options.num_blocks * 16))
    number = max(4 * requests, 300)
    trace = arrivals.of(f"poisson:{load.requests_per_second}", isl=isl, osl=osl, requests=number, seed=1)
    served = spec.run(trace).served[number // 3 :]
    assert load.ttft_s == pytest.approx(statistics.fmean(each.ttft for each in served), rel=0.35)
    assert load.ms_per_token == pytest.approx(1e3 * statistics.fmean(each.tpot for each in served), rel=0.2)


def test_more_of_everything_takes_longer():
    spec = replica("llama-3-8b", 1, 1, 1)
    limits = Limits(256, 8192, spec.options.num_blocks * 16)

    def ttft(requests=32, isl=1024, osl=256, limits=limits):
        return steady.run(spec.costs, requests, isl, osl, limits).ttft_s

    assert ttft(requests=16) < ttft() < ttft(requests=64)
    assert ttft(isl=256) < ttft() < ttft(isl=4096) < ttft(isl=16_384)
    assert ttft(requests=250, isl=8000, osl=2, limits=replace(limits, kv_tokens=10**7)) == float(
        "inf"
    )  # prompts come faster than steps
