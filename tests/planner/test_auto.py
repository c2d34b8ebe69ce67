# SPDX-License-Identifier: Apache-2.0
"""`plan="auto"` gives the layout of the best plan of one engine, and logs why; without a GPU one rank."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from phalanx.config import EngineOptions
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.config.resolve import resolve
from phalanx.errors import CapacityError, OptionError
from phalanx.hardware.probe import Machine
from phalanx.layout.families import known
from phalanx.planner import auto, subject


def options(**changes):
    return EngineOptions.of(**{"model": "llama-3-70b", "plan": "auto", "dtype": "fp8", "max_seq_len": 4096, **changes})


def test_the_layout_of_the_best_plan_and_its_reason(caplog):
    machine, _ = subject.machine_for("H200", gpus_per_node=4)
    with caplog.at_level(logging.INFO, logger="phalanx"):
        chosen = auto.choose(options(), subject.shape_for("llama-3-70b"), machine)
    assert (chosen.tensor_parallel_size, chosen.pipeline_parallel_size, chosen.plan) == (4, 1, "off")
    assert "chosen: tp 4 pp 1" in caplog.text
    assert chosen.replicas == 1


def test_groups_of_experts_where_options_ask_for_them():
    machine, _ = subject.machine_for("H200")
    shape = subject.shape_for("mixtral-8x22b")
    mixtral = options(model="mixtral-8x22b", expert_exchange="ALL_TO_ALL")
    chosen = auto.choose(mixtral, shape, machine)
    assert chosen.expert_parallel_size > 1  # what is exchanged between groups has an effect only there
    resolve(chosen, ModelShape.from_config(known("mixtral-8x22b")), 8)
    assert auto.choose(options(model="mixtral-8x22b"), shape, machine).expert_parallel_size == 1  # as fast, and better known
    moved = auto.choose(options(model="mixtral-8x22b", rebalance_experts_every=60.0, redundant_experts=8), shape, machine)
    assert (moved.moe_expert_parallel_size > 1, moved.expert_parallel_size) == (True, 1)
    resolve(moved, ModelShape.from_config(known("mixtral-8x22b")), 8)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("quantization", [None, ON_LOAD, replace(ON_LOAD, kv=True)])
@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "fp8", "dtype": "fp16"}])
def test_the_planner_prices_the_dtypes_that_the_engine_runs(dtype, quantization, changes):
    shape = replace(ModelShape.from_config(known("llama-3-8b")), dtype=dtype, quantization=quantization)
    given_options = options(**{"dtype": "auto", "plan": "off", **changes})
    engine = resolve(given_options, shape, 1).options
    request = auto.request_of(given_options, shape)
    assert (request.dtype, request.kv_cache_dtype) == (engine.dtype, engine.kv_cache_dtype)
    assert request.max_num_tokens == engine.max_num_tokens


def test_where_nothing_fits_nothing_is_started():
    machine, _ = subject.machine_for("L4", gpus_per_node=2)
    with pytest.raises(CapacityError, match="short on each GPU"):
        auto.choose(options(), subject.shape_for("llama-3-70b"), machine)


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "expert_parallel_size",
        "moe_expert_parallel_size",
        "decode_context_parallel_size",
        "replicas",
        "nnodes",
    ],
)
def test_a_layout_beside_it_is_a_contradiction(name):
    with pytest.raises(OptionError, match=f"beside a layout; {name}=2; .*either the planner or the user"):
        auto.planned(options(**{name: 2}))


def test_without_a_gpu_one_rank(monkeypatch):
    monkeypatch.setattr(auto.probe, "detect_machine", lambda: Machine((), 1, 1, 1))
    chosen = auto.planned(options(model="demo"))
    assert (chosen.world_size, chosen.plan) == (1, "off")
