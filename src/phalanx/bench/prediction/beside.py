# SPDX-License-Identifier: Apache-2.0
"""What the planner would have said of a bench figure: it stands beside each in a report."""

from __future__ import annotations

from typing import Any

from phalanx.bench.roofline import kv_tokens
from phalanx.bench.workloads import Workload
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import concrete_kv_cache_dtype
from phalanx.engine.messages import EngineFacts
from phalanx.errors import PhalanxError
from phalanx.layout.cache import kv_dtype
from phalanx.planner import burst, search, subject
from phalanx.planner.burst import Limits
from phalanx.planner.cost import Costs
from phalanx.planner.search import Figure


def predicted(model: ModelShape, facts: EngineFacts, workload: Workload, options: EngineOptions) -> dict[str, Any] | None:
    """ms per token of a decode workload, output tokens per second of a batch workload, with interval and label; None on a machine
    that neither the catalogue nor a calibration knows, and with skewed routing, which has no price. Replicas share the requests
    evenly."""
    if options.expert_traffic:
        return None
    try:
        machine, _ = subject.machine_for("CPU" if facts.device.startswith("cpu") else None)
    except PhalanxError:
        return None
    layout = facts.layout
    requests, slots = -(-workload.requests // layout.replicas), facts.max_batch_size // layout.replicas
    tokens = kv_tokens(model, facts, workload.input_len + workload.output_len) // layout.replicas
    kv = kv_dtype(concrete_kv_cache_dtype(options.kv_cache_dtype, model), facts.dtype)
    strategy = "NCCL" if options.allreduce_strategy == "NCCL" else "AUTO"
    machine = machine.deterministic if options.deterministic else machine
    costs = Costs(model, facts.dtype, kv, layout, machine, strategy, options.expert_exchange, options.quantize_activations)
    if workload.kind == "decode":
        value = 1e3 * burst.decode_round(costs, requests, workload.mean_context, slots)
    else:
        limits = Limits(slots, facts.max_num_tokens, tokens)
        one = burst.run(costs, requests, workload.input_len, workload.output_len, limits)
        value = workload.requests / requests * one.output_tokens_per_second
    half = search.width(costs, workload.input_len + workload.output_len / 2).half
    return Figure.of(value, half, costs.label).as_json()
