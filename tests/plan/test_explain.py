# SPDX-License-Identifier: Apache-2.0
"""What a plan says is what the engine takes: the command and the YAML are read back by the option models."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from phalanx.config import EngineOptions
from phalanx.config.sources import build_options, read_sources
from phalanx.plan import explain, search, subject
from phalanx.plan.search import PlanRequest


def planned(model="llama-3-70b", gpu="H100", nodes=2, **options):
    shape, machine = subject.shape_for(model), subject.machine_for(gpu, nodes=nodes)[0]
    request = PlanRequest(**{"dtype": "fp8", "kv_cache_dtype": "fp8", **options})
    return model, shape, machine, request, search.search(shape, machine, request)


@pytest.mark.parametrize("model", ["llama-3-70b", "mixtral-8x22b"])
def test_command_and_yaml_are_the_plans_options(model, tmp_path):
    name, _, machine, request, result = planned(model)
    for plan in result.plans:
        words = shlex.split(explain.command(name, machine, request, plan)[0])
        assert words[:3] == ["phalanx", "serve", model]
        flags = {words[at].removeprefix("--"): words[at + 1] for at in range(3, len(words), 2)}
        by_flags = build_options(EngineOptions, read_sources({**flags, "model": model}, environ={}))
        file = tmp_path / "options.yaml"
        file.write_text(explain.yaml(explain.options(name, machine, request, plan)))
        by_file = build_options(EngineOptions, read_sources({}, file=file, environ={}))
        assert by_flags == by_file
        layout = plan.layout
        assert (by_file.tensor_parallel_size, by_file.pipeline_parallel_size) == (layout.tp, layout.pp)
        assert (by_file.expert_parallel_size, by_file.moe_expert_parallel_size) == (layout.ep, layout.moe_ep)
        assert by_file.world_size == layout.split.world
        assert by_file.nnodes == -(-layout.split.world // machine.gpus_per_node)
        assert by_file.max_seq_len == request.isl + request.osl


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
    model, _, machine, request, result = planned()
    document = json.loads(json.dumps(explain.as_json(model, machine, request, result)))
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
