# SPDX-License-Identifier: Apache-2.0
"""The burst against the engine's own scheduler on the same clock, and what must hold of any burst."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.limits import SchedulerOptions, depth_of
from phalanx.layout import Layout
from phalanx.layout.graphs import graph_sizes
from phalanx.planner import arrivals, burst, simulate, subject
from phalanx.planner.burst import Limits
from phalanx.planner.cost import Costs, Work

MACHINE, _ = subject.machine_for("H200")
SHAPE = subject.shape_for("llama-3-70b")


def costs(tp=4, pp=1):
    return Costs(SHAPE, "fp8", "fp8", Layout(tp=tp, pp=pp), MACHINE)


@pytest.mark.parametrize(
    ("tp", "pp", "requests", "isl", "osl", "kv"),
    [(4, 1, 64, 1000, 200, 400_000), (2, 1, 100, 700, 150, 40_000), (1, 2, 96, 900, 200, 400_000), (2, 4, 64, 600, 200, 400_000),
     (4, 1, 1, 128, 64, 10_000), (4, 1, 3, 9000, 30, 100_000), (1, 3, 256, 300, 20, 400_000), (2, 4, 32, 3000, 20, 400_000)],
)  # fmt: skip
def test_the_burst_is_what_the_scheduler_makes_of_it(tp, pp, requests, isl, osl, kv):
    step_costs, slots = costs(tp, pp), 64
    options = SchedulerOptions(
        num_blocks=kv // 16, block_size=16, max_batch_size=slots, max_num_tokens=8192, max_seq_len=16384,
        depth=depth_of(pp, returns_tokens=step_costs.returns_tokens), pipeline_stages=pp, returns_tokens=step_costs.returns_tokens,
        prefix_caching=False,
    )  # fmt: skip
    real = simulate.run(step_costs, options, arrivals.of("burst", isl=isl, osl=osl, requests=requests))
    fast = burst.run(step_costs, requests, isl, osl, Limits(slots, 8192, kv))
    assert fast.seconds == pytest.approx(real.seconds, rel=0.02 if pp == 1 else 0.1 if osl > 20 else 0.24)
    ttft = sorted(each.ttft for each in real.served)[(requests - 1) // 2]
    assert fast.ttft_s == pytest.approx(ttft, rel=0.05 if pp == 1 else 0.3)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 500), st.sampled_from([(4, 1), (2, 2), (1, 4)]))
def test_every_request_ends_and_more_take_longer(requests, isl, osl, split):
    step_costs, limits = costs(*split), Limits(128, 8192, 500_000)
    one, more = burst.run(step_costs, requests, isl, osl, limits), burst.run(step_costs, requests + 7, isl, osl, limits)
    assert 0 < one.ttft_s <= one.seconds * (1 + 1e-9)
    # How many steps share a pipeline is a whole number: some more requests may change it, and gain by that, at most 11.5 percent in
    # 30,000 bursts of few tokens.
    assert more.seconds >= one.seconds * (1 - (1e-9 if split[1] == 1 else 0.13))
    assert one.output_tokens_per_second == pytest.approx(requests * osl / one.seconds)


def test_groups_hold_whole_requests():
    shape = subject.shape_for("mixtral-8x7b")
    groups = Costs(shape, "fp8", "fp8", Layout(dp=2), MACHINE)
    # 3,300 tokens are three requests, but each group's 1,650 are one.
    assert burst.run(groups, 8, 1000, 100, Limits(8, 8192, 3300)).running == 2


def test_a_small_cache_runs_in_turns():
    roomy, tight = (burst.run(costs(), 64, 1000, 100, Limits(64, 8192, kv)) for kv in (100_000, 11_000))
    assert (roomy.running, tight.running) == (64, 10)
    assert tight.seconds > 1.5 * roomy.seconds


def test_padding_is_that_of_the_captured_graphs():
    captured = [size.tokens for size in graph_sizes(256, 0)[0]]
    assert [burst.computed_rows(costs(), rows, 256) for rows in (1, 3, 9, 65, 250, 256)] == [1, 4, 16, 80, 256, 256]
    assert all(burst.computed_rows(costs(), rows, 256) in captured for rows in range(1, 257))
    largest = costs().graph_tokens
    assert largest in (size.tokens for size in graph_sizes(256, largest)[1])
    assert [burst.computed_tokens(costs(), tokens, 1e12) for tokens in (7, 100, 200, largest, largest + 1)] == [
        (32, False), (128, False), (256, False), (largest, False), (largest + 1, True)
    ]  # fmt: skip


def test_prompts_of_latent_attention_are_replayed_up_to_their_pairs():
    """A step of as many tokens is eager where its contexts are long, and both take about as long there: what heads compute over
    latents, and the host."""
    shape, kv = subject.shape_for("deepseek-v2"), "bf16"
    latent = Costs(shape, "fp8", kv, Layout(tp=2), MACHINE)
    most = latent.graph_pairs
    assert burst.computed_tokens(latent, 128, most) == (128, False)
    assert burst.computed_tokens(latent, 128, most + 1) == (128, True)
    assert costs().graph_pairs == float("inf")
    replayed, eager = (latent.seconds(Work(128, 1, 0.0, 128 * 64, eager=eager)) for eager in (False, True))
    assert replayed < 0.5 * eager
    at_limit, eager = (latent.seconds(Work(1024, 1, 0.0, most, eager=eager)) for eager in (False, True))
    assert 0.5 * eager < at_limit < 1.5 * eager


def test_a_cpu_replays_no_graphs():
    cpu_machine = replace(MACHINE, gpu=replace(MACHINE.gpu, sm=0))
    on_cpu = replace(costs(), machine=cpu_machine)
    assert [burst.computed_rows(on_cpu, rows, 256) for rows in (1, 3, 9)] == [1, 3, 9]
    assert burst.computed_tokens(on_cpu, 100, 0) == (100, True)
