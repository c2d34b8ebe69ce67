# SPDX-License-Identifier: Apache-2.0
"""Measured throughput, and the same bursts through the scheduler at predicted costs; and the coefficient that only they tell of."""

from __future__ import annotations

import math

from scipy.optimize import minimize_scalar

from benchmarks.plan.history import FittedCoefficients
from benchmarks.plan.priced import costs_of_row
from benchmarks.plan.rows import Row, rows
from phalanx.bench.prediction import arrivals, simulate
from phalanx.engine.scheduler import SchedulerOptions

UNGATED = {"deepseek-v2-lite": "one model of latent attention: its decode rows are in the fit, its prompts are not"}
"""Models whose throughput is printed and not gated, each with the reason."""

HOST_BOUND = "qwen3-30b-a3b"
"""The model whose steps of prompts take the GPU less than the host needs to launch them."""


def batch_rows() -> list[Row]:
    """Throughput rows of present kernels."""
    return [row for row in rows() if row.kind == "batch" and not row.unlike and row.model not in UNGATED]


def simulated(row: Row, coefficients: FittedCoefficients) -> float:
    """Output tokens per second of a batch row, with the KV cache that its start gave."""
    costs = costs_of_row(row, coefficients)
    options = SchedulerOptions(
        num_blocks=row.kv_tokens // 16, block_size=16, max_batch_size=row.max_batch_size, max_num_tokens=8192, max_seq_len=4096,
        depth=max(row.pp, 2), pipeline_stages=row.pp, prefix_caching=False,
    )  # fmt: skip
    work = row.workload
    burst = arrivals.of("burst", isl=work.input_len, osl=work.output_len, requests=work.requests)
    return work.requests * work.output_len / simulate.run(costs, options, burst).seconds


def eager_experts(values: dict[str, float]) -> float:
    """`c_eager_experts` by which the bursts of HOST_BOUND take as long as measured, with all other coefficients as they are."""
    chosen = [row for row in batch_rows() if row.model == HOST_BOUND]

    def loss(value: float) -> float:
        now = FittedCoefficients.from_json({**values, "c_eager_experts": value})
        return sum(math.log(simulated(row, now) / row.measured) ** 2 for row in chosen)

    return round(float(minimize_scalar(loss, bounds=(values["c_eager"], 3000.0), method="bounded", options={"xatol": 20}).x), 0)
