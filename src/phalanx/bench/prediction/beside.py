# SPDX-License-Identifier: Apache-2.0
"""What the planner would have said of a bench figure: it stands beside each in a report."""

from __future__ import annotations

from typing import Any

from phalanx.bench.workloads import Workload
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.engine.messages import EngineFacts
from phalanx.errors import PhalanxError
from phalanx.plan import burst, search, subject
from phalanx.plan.burst import Limits
from phalanx.plan.cost import Costs
from phalanx.plan.memory import KvFormat
from phalanx.plan.search import Figure, PlannedLayout
from phalanx.plan.shape import Shape


def predicted(model: ModelShape, facts: EngineFacts, workload: Workload, options: EngineOptions) -> dict[str, Any] | None:
    """ms per token of a decode workload, output tokens per second of a batch workload, with interval and label; None on a machine
    that neither the catalogue nor a calibration knows, and with skewed routing, which has no price. Replicas share the requests
    evenly."""
    if options.expert_traffic:
        return None
    pp, ep, tp = facts.layout
    try:
        machine, _ = subject.machine_for("CPU" if facts.device.startswith("cpu") else None)
    except PhalanxError:
        return None
    shape = Shape.of(model)
    layout = PlannedLayout(tp, pp, ep, facts.replicas, options.moe_expert_parallel_size, options.redundant_experts)
    requests, slots = -(-workload.requests // facts.replicas), facts.max_batch_size // facts.replicas
    tokens = facts.num_blocks // facts.replicas * facts.block_size
    kv_bytes = sum(rank.bytes.get("kv", 0) for rank in facts.ranks)
    elements = shape.kv_elements(tp) * shape.num_layers * tp * tokens
    each = kv_bytes / elements if elements else 2.0
    itemsize = max(round(each), 1)
    kv = KvFormat(itemsize, max(round((each - itemsize) * shape.head_dim), 0))
    strategy = "NCCL" if options.allreduce_strategy == "NCCL" else "AUTO"
    costs = Costs(shape, facts.dtype, kv, layout.split, machine, strategy, options.expert_exchange)
    if workload.kind == "decode":
        value = 1e3 * burst.decode_round(costs, requests, workload.mean_context, slots)
    else:
        limits = Limits(slots, facts.max_num_tokens, tokens)
        one = burst.run(costs, requests, workload.input_len, workload.output_len, limits)
        value = workload.requests / requests * one.output_tokens_per_second
    half = search.width(shape, machine, layout, costs, workload.input_len + workload.output_len / 2).half
    return Figure.of(value, half, costs.label).as_json()
