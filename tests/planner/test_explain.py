# SPDX-License-Identifier: Apache-2.0
"""What a plan says is what the engine takes: the command and the YAML are read back by the option models."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from phalanx.cli import main
from phalanx.config import EngineOptions
from phalanx.config.model import ModelShape
from phalanx.config.sources import build_options, read_sources
from phalanx.layout.families import known
from phalanx.planner import explain, search, subject
from phalanx.planner.search import PlanRequest


def planned(model="llama-3-70b", gpu="H100", nodes=2, **options):
    shape, machine = subject.shape_for(model), subject.machine_for(gpu, nodes=nodes)[0]
    request = PlanRequest(**{"dtype": "fp8", "kv_cache_dtype": "fp8", **options})
    return model, shape, machine, request, search.search(shape, machine, request)


def test_ranks_that_divide_latents_are_in_the_command_and_the_simulation():
    name, shape, machine, request, result = planned(
        "deepseek-v3", "H200", 1, isl=65536, osl=1024, concurrency=64, tp_size=8, kv_cache_dtype="model", slo_ttft=1e3
    )
    text = explain.text(name, shape, machine, request, result)
    assert result.plans[0].layout.dcp == 8
    assert "--tp_size 8 --pp_size 1 --dcp_size 8" in text
    assert "--tp_size 8 --dcp_size 8" in next(line for line in text.splitlines() if line.startswith("to simulate"))
    assert "decode_context_parallel_size: 8" in text
    assert "tp 8 pp 1 dcp 8" in text


@pytest.mark.parametrize("model", ["llama-3-70b", "mixtral-8x22b"])
def test_command_and_yaml_are_the_plans_options(model, tmp_path):
    name, shape, machine, request, result = planned(model)
    checkpoint = {"llama-3-70b": "meta-llama/Meta-Llama-3-70B", "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1"}[model]
    for plan in result.plans:
        words = shlex.split(explain.command(name, shape, machine, request, plan)[0])
        assert words[:3] == ["phalanx", "serve", checkpoint]
        flags = {words[at].removeprefix("--"): words[at + 1] for at in range(3, len(words), 2)}
        by_flags = build_options(EngineOptions, read_sources({**flags, "model": checkpoint}, environ={}))
        file = tmp_path / "options.yaml"
        file.write_text(explain.yaml(explain.options(name, shape, machine, request, plan)))
        by_file = build_options(EngineOptions, read_sources({}, file=file, environ={}))
        assert by_flags == by_file
        layout = plan.layout
        assert (by_file.tensor_parallel_size, by_file.pipeline_parallel_size) == (layout.tp, layout.pp)
        assert (by_file.expert_parallel_size, by_file.moe_expert_parallel_size) == (layout.dp, layout.moe_ep)
        assert by_file.decode_context_parallel_size == layout.dcp
        assert by_file.world_size == layout.world
        assert by_file.nnodes == -(-layout.world // machine.gpus_per_node)
        assert (by_file.dtype, by_file.kv_cache_dtype) == ("fp8", "fp8")
        assert (by_file.max_batch_size, by_file.max_num_tokens) == (256, None)
        fits = plan.kv_tokens // layout.dp
        assert by_file.max_seq_len == (None if fits >= shape.max_positions else fits // 16 * 16)


LIMITS = [
    ("llama-3-70b", "H100", 4, {}, {}),
    ("meta-llama/meta-llama-3-70b-instruct", "H100", 4, {"concurrency": 300}, {"max_batch_size": 304}),
    ("llama-3.1-8b", "RTX-4090", 1, {"max_seq_len": 4096}, {"max_seq_len": 4096}),
    ("llama-3.1-8b", "RTX-4090", 1, {}, {"max_seq_len": "held"}),  # its 131,072 positions are more than the cache holds
    ("llama-3-70b", "H100", 4, {"max_batch_size": 64, "max_num_tokens": 4096}, {"max_batch_size": 64, "max_num_tokens": 4096}),
    ("gpt-oss-120b", "H100", 2, {}, {}),
    ("deepseek-v3", "H200", 8, {}, {}),
    ("qwen3-8b", "H100", 1, {"dtype": "fp8"}, {"dtype": "fp8"}),
    ("qwen3-8b", "H100", 1, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
]


@pytest.mark.parametrize(("model", "gpu", "count", "values", "limits"), LIMITS)
def test_limits_and_dtypes_are_those_that_were_asked_for_or_that_a_start_needs(model, gpu, count, values, limits):
    shape, machine = subject.shape_for(model), subject.machine_for(gpu, gpus_per_node=count)[0]
    request = PlanRequest(**{"dtype": "bf16", **values})
    (plan, *_) = search.search(shape, machine, request).plans
    chosen = explain.options(model, shape, machine, request, plan)
    if limits.get("max_seq_len") == "held":
        assert request.isl + request.osl < chosen["max_seq_len"] <= plan.kv_tokens
        limits = {"max_seq_len": chosen["max_seq_len"]}
    assert {name: value for name, value in chosen.items() if name not in explain.layout_options(machine, plan)} == {
        "model": explain.checkpoint_of(model), **limits,
    }  # fmt: skip


def test_the_checkpoint_of_a_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    names = {
        "llama-3.1-405B": "meta-llama/Llama-3.1-405B", "meta-llama/Meta-Llama-3-405B": "meta-llama/Llama-3.1-405B",
        "deepseek-ai/deepseek-r1": "deepseek-ai/DeepSeek-R1", "mistralai/Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
        str(tmp_path / "config.json"): str(tmp_path), str(tmp_path): str(tmp_path), "org/Other": "org/Other", "demo": "demo",
    }  # fmt: skip
    assert {name: explain.checkpoint_of(name) for name in names} == names


@pytest.mark.parametrize(
    ("model", "dtype", "words"),
    [
        ("gpt-oss-20b", "bf16", "MXFP4"),
        ("deepseek-v3", "bf16", "FP8"),
        ("llama-3-8b", "fp8", "FP8"),
        ("llama-3-8b", "bf16", "bf16"),
    ],
)
def test_weights_are_said_as_they_are_stored(model, dtype, words):
    name, shape, machine, request, result = planned(model, dtype=dtype)
    text = explain.text(name, shape, machine, request, result)
    assert f"GB in {words}\n" in text
    assert f"weights in {words}," in text


def test_an_objective_is_of_a_steady_load_and_the_command_simulates_it(capsys):
    """A burst of 64 misses it, and half a minute of such requests, one by one, does not."""
    values = {"dtype": "bf16", "kv_cache_dtype": "model", "slo_ttft": 0.5}
    model, shape, machine, request, result = planned(nodes=1, **values)
    best = result.plans[0]
    assert best.ttft_ms.value > 1000
    (line,) = (line for line in explain.text(model, shape, machine, request, result).splitlines() if "to simulate" in line)
    assert main(shlex.split(line.partition(": phalanx ")[2].replace("--requests 500", "--requests 200"))) == 0
    mean, median = (
        float(word) for word in next(row for row in capsys.readouterr().out.splitlines() if "ttft_ms" in row).split()[1:3]
    )
    assert median < 500
    assert mean == pytest.approx(best.steady.ttft_s * 1e3, rel=0.35)
    missed = replace(request, slo_ttft=0.01)
    text = explain.text(model, shape, machine, missed, search.search(shape, machine, missed))
    assert "nearest: --slo_ttft " in text.split("no layout fits\n")[1].splitlines()[0]
    assert "phalanx plan simulate poisson:" in text


def test_the_text_has_the_tree_the_plans_and_the_reasons():
    model, shape, machine, request, result = planned()
    text = explain.text(model, shape, machine, request, result)
    assert "  -> under 80 GB: tp 2 or 4 in one node" in text
    assert f"chosen: {result.plans[0].layout.name}" in text
    assert "tp 16 spans nodes: 160 all-reduces a token over 50 GB/s" in text
    for plan in result.plans:
        assert f"{plan.kv_tokens:,}" in text
    assert text.count("derived") >= 2


def test_json_has_every_layout_in_the_form_for_programs():
    model, shape, machine, request, result = planned()
    document = json.loads(json.dumps(explain.as_json(model, shape, machine, request, result)))
    assert len(document["plans"]) == len(result.plans)
    assert len(document["rejected"]) == len(result.rejected)
    assert all(isinstance(plan["range_checked"], bool) for plan in document["plans"])
    assert "as many replicas as the GPUs hold" in document["replicas"]
    for plan in document["plans"]:
        assert {"tp", "pp", "ep", "replicas"} <= set(plan["layout"])
        for name in ("ms_per_token", "ttft_ms", "output_tokens_per_second"):
            figure = plan[name]
            assert set(figure) == {"value", "low", "high", "label"}
            assert figure["low"] < figure["value"] < figure["high"]
        sizes = plan["bytes_per_gpu"]
        assert sum(sizes[kind] for kind in ("weights", "activations_and_context", "graphs", "kv", "unused")) == sizes["capacity"]
    assert all(set(each) == {"layout", "reason"} and each["reason"] for each in document["rejected"])


@pytest.mark.parametrize(("weights", "branch"), [(16e9, 0), (20e9, 1), (79e9, 1), (141e9, 2), (320e9, 3), (810e9, 3)])
def test_the_branch_of_the_tree(weights, branch):
    assert explain.branch(weights) == branch


def test_the_reason_of_a_plan_that_leads_because_it_is_surer():
    shape, machine = subject.shape_for("mixtral-8x7b"), replace(subject.machine_for("H200")[0], gpus_per_node=4)
    request = PlanRequest(dtype="fp8", kv_cache_dtype="fp8")
    plans = search.search(shape, machine, request).plans
    (line,) = (line for line in explain.tree(shape, request, plans) if "chosen" in line)
    assert "tp 4 pp 1, within" in line
    assert "of the best tokens per second, which predictions do not tell apart, and surer" in line
    (line,) = (line for line in explain.tree(shape, request, plans[1:2]) if "chosen" in line)
    assert line.endswith("the best tokens per second of all that fit")


@pytest.mark.parametrize(
    ("model", "gpus", "nodes", "sizes", "one"),
    [
        ("llama-3.1-70b", 2, 1, {"tp_size": 2}, 163_840),  # 80 layers of 8 heads of keys and values of 128, in 8 bit
        ("llama-3.1-70b", 4, 1, {"tp_size": 2}, 163_840),  # two replicas of one host share its memory
        ("llama-3.1-70b", 2, 2, {"tp_size": 2, "pp_size": 2}, 81_920),  # a stage on each host
        ("gpt-oss-120b", 1, 1, {}, 36_864),  # 36 layers of 8 heads of 64: half of them in a group with a window
        ("deepseek-v3", 8, 1, {"tp_size": 8, "ep_size": 1}, 8 * 35_136),  # each rank has all latents
    ],
)
def test_host_memory_is_told_in_tokens_and_in_the_command(model, gpus, nodes, sizes, one):
    shape, machine = subject.shape_for(model), subject.machine_for("H200", gpus_per_node=gpus, nodes=nodes)[0]
    request = PlanRequest("bf16" if "oss" in model else "fp8", "fp8", kv_host_memory=one << 20, **sizes)
    result = search.search(shape, machine, request)
    text = explain.text(model, shape, machine, request, result)
    assert f"\nnote: {one << 20:,} bytes of each host keep 1,048,576 tokens of prefixes" in text
    assert f" --kv_host_memory {one << 20}" in text
    assert "kv_host_memory" not in explain.text(model, shape, machine, replace(request, kv_host_memory=0), result)


def test_host_memory_of_a_model_with_states_is_told_in_tokens_and_states(capsys):
    """Of Qwen3-Next on two GPUs, each 24,576 bytes of a token on both (a head of keys and values each), and 79 MB of a state."""
    memory, plan = 100 * (4096 * 24_576 + 79_036_416), ["plan", "qwen3-next-80b-a3b", "--gpu", "H200", "--gpus_per_node", "2"]
    assert main([*plan, "--tp_size", "2", "--kv_host_memory", str(memory)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"note: {memory:,} bytes of each host keep 409,600 tokens of prefixes" in text
    assert "and 100 states of prefixes, of which a hit needs one" in text
    assert main([*plan, "--kv_host_memory", "99"]) == 1
    assert "holds not a single KV block and a state" in capsys.readouterr().err


def test_the_price_of_deterministic_is_printed():
    name, shape, machine, request, result = planned("llama-3-8b", "H200", 1, dtype="bf16", deterministic=True, tp_size=1)
    text = explain.text(name, shape, machine, request, result)
    (line,) = (line for line in text.splitlines() if line.startswith("--deterministic: time per token"))
    assert "output tokens per second" in line
    assert "--deterministic" in next(line for line in text.splitlines() if line.startswith("phalanx serve")).split()
    assert "deterministic: True" in text
    assert result.plans[0].output_tokens_per_second.label == "estimated"
    without = explain.text(*planned("llama-3-8b", "H200", 1, dtype="bf16", tp_size=1))
    assert "deterministic" not in without


def test_the_gain_of_quantized_activations_is_printed_and_stands_in_the_command():
    name, shape, machine, request, result = planned(gpu="H200", nodes=1, dtype="int4", quantize_activations=True)
    text = explain.text(name, shape, machine, request, result)
    (line,) = (line for line in text.splitlines() if line.startswith("--quantize_activations: time per token"))
    assert "output tokens per second +" in line
    assert "--quantize_activations" in explain.command(name, shape, machine, request, result.plans[0])[0]


def test_a_copy_in_fp8_of_4_bits_stands_beside_the_plan():
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    awq = ModelShape.from_config({**known("llama-3-70b"), "quantization_config": quantization})
    for gpu, words in (("H200", r"note: a copy of .* \(--dtype fp8\): [\d,]+ output .* 7\d\.\d GB of weights"), ("A100-80", "")):
        machine, _ = subject.machine_for(gpu, gpus_per_node=1)
        request = PlanRequest(dtype="bf16", kv_cache_dtype="model", tp_size=1)
        result = search.search(awq, machine, request)
        lines = [line for line in explain.text("x", awq, machine, request, result).splitlines() if "a copy of" in line]
        assert len(lines) == (1 if words else 0)
        assert all(re.search(words, line) for line in lines)
    machine, _ = subject.machine_for("L40S", gpus_per_node=1)
    request = PlanRequest(dtype="bf16", kv_cache_dtype="model", tp_size=1, concurrency=4, isl=512, osl=64)
    result = search.search(awq, machine, request)
    assert re.search(r"note: a copy .* does not run so: .*", explain.text("x", awq, machine, request, result))
    copied = search.search(awq, subject.machine_for("H200", gpus_per_node=1)[0], replace(request, dtype="fp8"))
    text = explain.text("x", awq, subject.machine_for("H200", gpus_per_node=1)[0], replace(request, dtype="fp8"), copied)
    assert "--dtype fp8, a copy of 4 bits: time per token" in text
    assert "weights in FP8" in text
