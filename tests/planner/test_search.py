# SPDX-License-Identifier: Apache-2.0
"""Every layout is judged, reasons bind, what is asked is held; and more of anything never makes the best plan worse."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import CapacityError, OptionError
from phalanx.layout import Layout
from phalanx.layout.families import layer_tensors
from phalanx.layout.weights import tensor_bytes
from phalanx.planner import explain, search, subject
from phalanx.planner.search import PlanRequest, Rejected
from tests.support.layout_hybrid import hybrid

LLAMA, MIXTRAL = subject.shape_for("llama-3-70b"), subject.shape_for("mixtral-8x22b")


def machine(gpu="H100", **options):
    return subject.machine_for(gpu, **options)[0]


def request(**options):
    return PlanRequest(**{"dtype": "fp8", "kv_cache_dtype": "fp8", "isl": 512, "osl": 512, "concurrency": 32, **options})


def test_every_layout_of_sixteen_gpus_is_a_plan_or_rejected():
    result = search.search(LLAMA, machine(nodes=2), request())
    names = [plan.layout for plan in result.plans] + [each.layout for each in result.rejected]
    assert len(set(names)) == len(names)
    for tp, pp in ((1, 1), (8, 1), (4, 2), (8, 2), (2, 8), (16, 1)):
        assert Layout(tp=tp, pp=pp, replicas=16 // (tp * pp)) in names
    assert all(plan.layout.gpus <= 16 for plan in result.plans)
    rates = [plan.output_tokens_per_second.value for plan in result.plans]
    assert rates == sorted(rates, reverse=True)


def test_tensor_parallelism_over_nodes_is_rejected_by_its_all_reduces():
    result = search.search(LLAMA, machine(nodes=2, network="ib-hdr"), request())
    reason = next(each.reason for each in result.rejected if each.layout.tp == 16)
    assert reason == "tp 16 spans nodes: 160 all-reduces a token over 25 GB/s"


def test_ranks_divide_latents_where_the_cache_then_holds_more_requests():
    """DeepSeek-V3 on 8 H200 at tp 8. Few short requests fit as it is; a size that is asked for is taken."""
    shape, gpus = subject.shape_for("deepseek-v3"), machine("H200")
    many = request(kv_cache_dtype="model", isl=65536, osl=1024, concurrency=64, tp_size=8)
    plans = search.search(shape, gpus, many).plans
    best, undivided = (next(plan for plan in plans if plan.layout == Layout(tp=8, dcp=dcp)) for dcp in (8, 1))
    assert {plan.layout.dcp for plan in plans} == {1, 8}
    assert plans[0].layout.dcp == 8
    assert 7.9 * undivided.kv_tokens < best.kv_tokens < 8 * undivided.kv_tokens
    assert best.max_concurrency > 64 > 8 * undivided.max_concurrency / 2
    assert best.output_tokens_per_second.value > 1.1 * undivided.output_tokens_per_second.value
    few = search.search(shape, gpus, replace(many, isl=1024, concurrency=4))
    assert {plan.layout.dcp for plan in few.plans} == {1}
    reason = next(each.reason for each in few.rejected if each.layout == Layout(tp=8, dcp=8))
    assert reason == "without dcp the cache holds all of 4 requests, and steps are shorter"
    two = search.search(shape, gpus, replace(many, isl=1024, concurrency=4, dcp_size=2)).plans
    assert {plan.layout.dcp for plan in two} == {2}
    assert two[0].ms_per_token.value > few.plans[0].ms_per_token.value
    (llama,) = search.search(LLAMA, machine(), request(dcp_size=2)).rejected
    assert llama.reason == "dcp 2 divides the tokens of latents, and the model caches keys and values"


def test_memory_is_the_reason_where_it_binds():
    verdict = search.examine(LLAMA, machine(), request(dtype="bf16"), Layout(replicas=8))
    assert isinstance(verdict, Rejected)
    assert verdict.reason.startswith("memory: weights 141.1 GB")
    assert verdict.short > 50e9


def test_experts_both_ways():
    result = search.search(MIXTRAL, machine("H200"), request())
    layouts = {(plan.layout.tp, plan.layout.dp, plan.layout.moe_ep) for plan in result.plans}
    assert {(4, 2, 1), (2, 4, 1), (8, 1, 8), (4, 1, 2)} <= layouts
    for plan in result.plans:  # groups of ep are in no fit; experts inside the tensor-parallel group are
        assert (plan.output_tokens_per_second.label == "estimated") == (plan.layout.dp > 1), plan.layout
    assert not any(plan.layout.dp > 1 for plan in search.search(LLAMA, machine(), request()).plans)


def test_a_dense_model_has_no_experts_to_split():
    for layout in (Layout(dp=2), Layout(tp=2, moe_ep=2)):
        verdict = search.examine(LLAMA, machine("H200"), request(), layout)
        assert verdict.reason == f"{'ep' if layout.dp > 1 else 'moe_ep'} 2 splits experts, and the model has none"


def test_asked_sizes_are_ranked_alone_and_say_why_there_are_none():
    result = search.search(LLAMA, machine(), request(tp_size=2))
    assert {plan.layout.tp for plan in result.plans} == {each.layout.tp for each in result.rejected} == {2}
    assert result.plans == sorted(result.plans, key=lambda plan: -plan.output_tokens_per_second.value)
    for sizes, reason, change in (
        ({"tp_size": 3}, "tp 3 does not divide: ", "without --tp_size, tp "),
        ({"tp_size": 1, "ep_size": 2}, "ep 2 splits experts, and the model has none", "without --tp_size and --ep_size, tp "),
        ({"pp_size": 100}, "pp 100 exceeds the model's 80 layers", "without --pp_size, tp "),
        (
            {"tp_size": 8, "pp_size": 2},
            "16 ranks need more than the machine's 8 GPUs",
            "--gpus_per_node 8 --nodes 2 would run as tp 8",
        ),
    ):
        nothing = search.search(LLAMA, machine(), request(**sizes))
        assert nothing.plans == []
        assert [each.reason[: len(reason)] for each in nothing.rejected] == [reason]
        assert any(each.startswith(change) for each in nothing.changes), nothing.changes


def test_a_length_below_the_requests_is_an_error():
    with pytest.raises(OptionError, match="max_seq_len=1023 is too small; a request has 512 \\+ 512 tokens"):
        search.search(LLAMA, machine(), request(max_seq_len=1023))
    assert request(max_seq_len=2048).seq_len == 2048
    assert request().seq_len == 1024


def test_each_data_parallel_group_holds_whole_requests():
    shape = subject.shape_for("gpt-oss-120b")
    options = {"dtype": "bf16", "kv_cache_dtype": "model", "max_batch_size": 8, "concurrency": 8, "fraction": 0.4}
    layout, l40s = Layout(dp=2, replicas=4), machine("L40S")
    roomy = search.examine(shape, l40s, request(**options, isl=60_000, osl=64), layout)
    group_tokens = roomy.kv_tokens // 2  # of each of two groups
    seq_len = group_tokens * 101 // 100  # the windows of a longer request are a smaller part of it
    assert seq_len <= roomy.kv_tokens
    verdict = search.examine(shape, l40s, request(**options, isl=seq_len - 64, osl=64), layout)
    assert isinstance(verdict, Rejected)
    assert f"KV tokens, and a request takes {seq_len:,}" in verdict.reason
    assert verdict.short > 0
    two_thirds = search.examine(shape, l40s, request(**options, isl=group_tokens * 2 // 3, osl=64), layout)
    assert two_thirds.max_concurrency == 4 * 2  # three would be held by the sum of both groups


def test_copies_of_experts_cost_their_memory():
    layout = Layout(tp=8, moe_ep=8, redundant=8)
    bare = search.examine(MIXTRAL, machine("H200"), request(), replace(layout, redundant=0))
    copied = search.examine(MIXTRAL, machine("H200"), request(), layout)
    experts = sum(
        tensor_bytes(MIXTRAL, tensor, "fp8", Layout()) // tensor.experts
        for layer in range(MIXTRAL.num_layers) for tensor in layer_tensors(MIXTRAL, layer) if tensor.experts
    )  # fmt: skip
    assert copied.bytes["weights"] - bare.bytes["weights"] == experts  # one more expert of each layer on each rank
    assert copied.kv_tokens < bare.kv_tokens
    assert copied.layout.name == "tp 8 pp 1 moe_ep 8 + 8 copies"
    assert explain.options("mixtral-8x22b", MIXTRAL, machine("H200"), request(), copied)["redundant_experts"] == 8


def test_copies_need_ranks_that_hold_whole_experts():
    result = search.search(MIXTRAL, machine("H200"), request(redundant_experts=8))
    assert {plan.layout.moe_ep for plan in result.plans} == {2, 4, 8}
    reasons = {each.layout.moe_ep: each.reason for each in result.rejected}
    assert reasons[1].startswith("redundant_experts 8: only ranks of moe_ep above 1")
    three = search.examine(MIXTRAL, machine("H200"), request(), Layout(tp=4, replicas=2, moe_ep=4, redundant=3))
    assert three.reason == "redundant_experts 3 is no multiple of moe_ep 4 up to 24"
    dense = search.search(LLAMA, machine("H200"), request(redundant_experts=2))
    assert not dense.plans
    assert "the model has no experts" in dense.rejected[0].reason


def test_groups_of_experts_need_a_request_each():
    verdict = search.examine(MIXTRAL, machine("H200"), request(max_batch_size=2), Layout(tp=2, dp=4))
    assert verdict.reason == "ep 4 runs requests of its own in each group, and max_batch_size is 2"


def test_objectives_reject_and_say_by_how_much():
    fast = search.search(LLAMA, machine("H200"), request(goal="latency", slo_tpot=0.012))
    assert all(plan.ms_per_token.value <= 12 for plan in fast.plans)
    assert any("is over the objective of 12.0 ms" in each.reason for each in fast.rejected)
    none = search.search(LLAMA, machine("H200"), request(slo_ttft=1e-4))
    assert not none.plans
    assert any(change.startswith("--slo_ttft") for change in none.changes)


def test_where_nothing_fits_the_nearest_changes_do_fit():
    shape, small = subject.shape_for("llama-3.1-405b"), machine(gpus_per_node=4)
    result = search.search(shape, small, request(dtype="bf16", kv_cache_dtype="model"))
    assert not result.plans
    assert "short on each GPU" in result.changes[0]
    assert "--dtype fp8 --gpus_per_node 8 would run as tp 8 pp 1" in result.changes
    assert search.search(shape, machine(gpus_per_node=8), request(kv_cache_dtype="model")).plans
    with pytest.raises(CapacityError, match="no layout fits"):
        search.require(result)


@pytest.mark.parametrize(("model", "gpu", "fraction"), [("llama-3.1-8b", "RTX-4090", 0.9), ("gemma-3-27b", "H100", 0.2)])
def test_the_longest_length_that_fits_is_one_that_fits(model, gpu, fraction):
    shape, alone = subject.shape_for(model), machine(gpu, gpus_per_node=1)
    plan_request = request(dtype="bf16", kv_cache_dtype="model", isl=100_000, osl=1000, concurrency=1, fraction=fraction)
    result = search.search(shape, alone, plan_request)
    assert not result.plans
    length = int(next(c for c in result.changes if c.startswith("requests of at most")).split()[4].replace(",", ""))
    assert search.search(shape, alone, replace(plan_request, isl=length - 128, osl=128)).plans
    assert not search.search(shape, alone, replace(plan_request, isl=length, osl=128)).plans


def test_layers_with_a_window_take_most_of_short_requests():
    """6 of 7 blocks of a short request to Gemma are of windows: how many run at once does not depend on how long others may be."""
    shape, layout = subject.shape_for("gemma-3-27b"), Layout()
    plain, longer = (
        search.examine(shape, machine(), request(isl=1000, osl=200, concurrency=256, dtype="bf16", max_seq_len=length), layout)
        for length in (None, 131_072)
    )
    assert longer.kv_tokens > 5 * plain.kv_tokens
    assert longer.output_tokens_per_second.value == plain.output_tokens_per_second.value
    assert longer.steady == plain.steady


def test_a_length_beyond_the_model_is_an_error():
    with pytest.raises(OptionError, match="its positions end at 8192"):
        search.search(LLAMA, machine(), request(isl=8192, osl=8))


def best(result, goal):
    """Of all plans: the first one is the best known of those that are equally good."""
    assert result.plans
    values = (plan.output_tokens_per_second.value if goal == "throughput" else -plan.ms_per_token.value for plan in result.plans)
    return max(values)


def not_worse(new, old, goal):
    """But for a percent, or one request's part of those that run at once: a replica of fewer slots has more cache, in which one
    more request may run, and each is slower by no more than that."""
    at_once = max(plan.max_concurrency // plan.layout.replicas for plan in old.plans)
    return best(new, goal) >= best(old, goal) - max(0.01, 1 / max(at_once, 1)) * abs(best(old, goal))


cases = st.fixed_dictionaries(
    {
        "concurrency": st.integers(1, 300), "isl": st.integers(1, 3000), "osl": st.integers(2, 1000),
        "goal": st.sampled_from(["throughput", "latency"]),
    }
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(
    cases,
    st.sampled_from([(1, 2), (2, 4), (4, 8)]),
    st.sampled_from(["H200", "H100", "A100-80"]),
    st.sampled_from([LLAMA, MIXTRAL]),
)
def test_more_gpus_never_make_the_best_plan_worse(case, sizes, gpu, shape):
    few, many = (search.search(shape, machine(gpu, gpus_per_node=size), request(**case)) for size in sizes)
    if few.plans:
        assert not_worse(many, few, case["goal"])


@settings(deadline=None, max_examples=25)
@given(cases, st.floats(1.01, 4), st.sampled_from([LLAMA, MIXTRAL]), st.sampled_from([(4, 1), (4, 2)]))
def test_more_bandwidth_never_makes_a_plan_worse(case, factor, shape, size):
    base = machine(gpus_per_node=size[0], nodes=size[1])
    faster = replace(base, gpu=replace(base.gpu, memory_bandwidth=base.gpu.memory_bandwidth * factor))
    wider = replace(base, gpu=replace(base.gpu, link_bandwidth=base.gpu.link_bandwidth * factor))
    others = [faster, wider]
    if base.network is not None:
        others.append(replace(base, network=replace(base.network, bandwidth=base.network.bandwidth * factor)))
    slow = {plan.layout: plan for plan in search.search(shape, base, request(**case)).plans}
    for other in others:
        for plan in search.search(shape, other, request(**case)).plans:
            before = slow[plan.layout]
            # Behind a faster hop first tokens come earlier, so that more of the other prompts lies between a first and a last one.
            earlier = 1e-9 if plan.layout.pp == 1 else 0.01
            assert plan.ms_per_token.value <= before.ms_per_token.value * (1 + earlier)
            assert plan.output_tokens_per_second.value >= before.output_tokens_per_second.value * (1 - 1e-9)
            assert plan.ttft_ms.value <= before.ttft_ms.value * (1 + 1e-9)
            assert plan.kv_tokens == before.kv_tokens


@settings(deadline=None, max_examples=10)
@given(cases, st.floats(0.005, 0.1), st.floats(0.05, 5), st.floats(1, 3))
def test_a_looser_objective_never_loses_a_plan(case, tpot, ttft, looser):
    tight = search.search(LLAMA, machine(gpus_per_node=4), request(**case, slo_tpot=tpot, slo_ttft=ttft))
    loose = search.search(LLAMA, machine(gpus_per_node=4), request(**case, slo_tpot=tpot * looser, slo_ttft=ttft * looser))
    assert {plan.layout for plan in tight.plans} <= {plan.layout for plan in loose.plans}
    if tight.plans:
        assert not_worse(loose, tight, case["goal"])


def test_of_plans_that_are_equally_good_the_best_known_leads():
    """And of these one whose ranks share all experts, as no figure knows how unevenly a model's router fills whole ones."""
    shape, machine = subject.shape_for("mixtral-8x22b"), subject.machine_for("H200")[0]
    plans = search.search(shape, machine, PlanRequest(dtype="fp8")).plans
    better, known = (
        next(plan for plan in plans if plan.output_tokens_per_second.label == label) for label in ("estimated", "derived")
    )
    shared = next(plan for plan in plans if plan.layout.tp == 8 and plan.layout.moe_ep == 1)
    split = next(plan for plan in plans if plan.layout.tp == 8 and plan.layout.moe_ep > 1)

    def times(plan, factor):
        figure = plan.output_tokens_per_second
        return replace(plan, output_tokens_per_second=replace(figure, value=known.output_tokens_per_second.value * factor))

    for factor, leads in ((1.04, known), (1.06, better)):
        assert search._best_known([times(better, factor), known], "throughput").layout == leads.layout
    for factor, leads in ((1.04, shared), (1.06, split)):
        assert search._best_known([times(split, factor), times(shared, 1.0)], "throughput").layout == leads.layout


def test_intervals_hold_their_value_and_widen_with_what_is_unknown():
    widths = {}
    for gpu in ("H200", "H100", "B200"):
        plan = search.search(LLAMA, machine(gpu, gpus_per_node=4), request()).plans[0]
        figure = plan.output_tokens_per_second
        assert figure.low < figure.value < figure.high
        widths[gpu] = figure.high / figure.value - 1
    assert widths["H200"] <= 0.12
    assert widths["H200"] <= widths["H100"] < widths["B200"]


def cpu_seconds(*words):
    """Of one interpreter with these arguments, its start and its imports with it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def test_a_range_is_called_checked_only_where_it_was():
    def best(name, gpu="H200", **options):
        return search.search(subject.shape_for(name), machine(gpu, gpus_per_node=2), request(**options)).plans[0]

    assert best("llama-3.1-70b").checked
    assert best("mixtral-8x7b").checked
    for unchecked in (
        best("llama-3.1-70b", isl=8000), best("llama-3-8b", "H100"), best("gpt-oss-120b", dtype="bf16", kv_cache_dtype="model"),
        best("deepseek-v2-lite", kv_cache_dtype="model"),
    ):  # fmt: skip
        assert not unchecked.checked
        assert "which was not checked" in explain.RANGES[unchecked.checked]


def test_all_layouts_of_sixteen_gpus_take_less_than_a_second():
    """The whole command, in seconds of CPU. Where the core is slow or has other work, so does it slow the command line's own
    imports, which are some half of it: then these are the measure."""
    seconds = []
    for _ in range(3):
        taken, out = cpu_seconds("-m", "phalanx", "plan", "llama-3-70b", "--gpu", "H100", "--nodes", "2")
        seconds.append(taken)
        assert "tp 16 spans nodes" in out
        if taken < 1.0:
            return
    imports = min(cpu_seconds("-c", "from phalanx.cli import every_verb; every_verb()")[0] for _ in range(3))
    assert min(seconds) < max(1.0, 4 * imports)


def test_a_plan_needs_no_torch():
    code = (
        "import sys; from phalanx.cli import main; main(['plan', 'llama-3-8b', '--gpu', 'H100']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'triton', 'pandas', 'scipy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert "phalanx serve meta-llama/Meta-Llama-3-8B" in done.stdout


def test_a_model_with_a_state_for_each_request_is_planned(monkeypatch):
    """The state takes memory by slots, is read and written in each step, and tokens take half of it: long contexts are faster."""
    mixed = hybrid(monkeypatch, LLAMA)
    for context, faster in ((256, False), (8_000, True)):
        wanted = request(isl=context, osl=64, max_batch_size=32, concurrency=32, tp_size=8)
        plain, plan = (search.search(shape, machine("H200"), wanted).plans[0] for shape in (LLAMA, mixed))
        assert (plan.ms_per_token.value < plain.ms_per_token.value) == faster
        assert plan.bytes["request_state"] == (32 + 16) * 8 * 128 * 128 * 4 * 40 // 8
        assert plan.kv_tokens > 1.5 * plain.kv_tokens
    huge = search.search(mixed, machine("H100"), request(max_batch_size=65_536))
    assert not huge.plans
    assert any("too much" in each.reason for each in huge.rejected)


def test_groups_of_experts_are_no_layout_of_deterministic():
    shape, machine = subject.shape_for("mixtral-8x7b"), subject.machine_for("H200")[0]
    rejected = search.examine(shape, machine, PlanRequest(deterministic=True), Layout(dp=2))
    assert isinstance(rejected, search.Rejected)
    assert "deterministic" in rejected.reason
