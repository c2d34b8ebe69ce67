# SPDX-License-Identifier: Apache-2.0
"""What the planner would have said of a bench figure: it stands beside each in a report."""

from __future__ import annotations

from typing import Any

from phalanx.bench.workloads import Workload
from phalanx.config.model import ModelShape
from phalanx.engine.messages import EngineFacts
from phalanx.errors import PhalanxError
from phalanx.plan import burst, search, subject
from phalanx.plan.burst import Limits
from phalanx.plan.cost import Costs
from phalanx.plan.memory import KvFormat
from phalanx.plan.search import Figure, PlannedLayout
from phalanx.plan.shape import Shape


def predicted(model: ModelShape, facts: EngineFacts, workload: Workload, strategy: str = "AUTO") -> dict[str, Any] | None:
    """ms per token of a decode workload, output tokens per second of a batch workload, with interval and label; None on a machine
    that neither the catalogue nor a calibration knows."""
    pp, ep, tp = facts.layout
    try:
        machine, _ = subject.machine_for("CPU" if facts.device.startswith("cpu") else None)
    except PhalanxError:
        return None
    shape, layout = Shape.of(model), PlannedLayout(tp, pp, ep, 1)
    tokens = facts.num_blocks * facts.block_size
    kv_bytes = sum(rank.bytes.get("kv", 0) for rank in facts.ranks)
    elements = shape.kv_elements(tp) * shape.num_layers * tp * tokens
    each = kv_bytes / elements if elements else 2.0
    itemsize = max(round(each), 1)
    kv = KvFormat(itemsize, max(round((each - itemsize) * shape.head_dim), 0))
    costs = Costs(shape, facts.dtype, kv, layout.split, machine, "NCCL" if strategy == "NCCL" else "AUTO")
    if workload.kind == "decode":
        value = 1e3 * burst.decode_round(costs, workload.requests, workload.mean_context, facts.max_batch_size)
    else:
        limits = Limits(facts.max_batch_size, facts.max_num_tokens, tokens)
        value = burst.run(costs, workload.requests, workload.input_len, workload.output_len, limits).output_tokens_per_second
    half = search.width(shape, machine, layout, costs, workload.input_len + workload.output_len / 2).half
    return Figure.of(value, half, costs.label).as_json()
