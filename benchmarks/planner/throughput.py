# SPDX-License-Identifier: Apache-2.0
"""Measured throughput, the same bursts through the scheduler at predicted costs, and their steps in short, for the fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from scipy.optimize import minimize_scalar

from benchmarks.planner.history import FittedCoefficients, captured_few, costs_of, scheduler_of
from benchmarks.planner.priced import costs_of_row
from benchmarks.planner.rows import Row, rows
from phalanx.engine.limits import SchedulerOptions, depth_of
from phalanx.planner import arrivals, simulate
from phalanx.planner.cost import Costs, Work

PROMPT_STEPS, DECODE_STEPS = 8, 6
"""So many steps of each kind stand for a burst in the fit."""

UNGATED = {
    "deepseek-v2-lite": "one model of latent attention: its decode rows are in the fit, its prompts are not",
    "gpt-oss-120b": "all its rows are below the prediction, by 4.1 to 6.9 percent: its prompts are not in the fit",
}
"""Models whose throughput is printed and not gated, each with the reason."""

HOST_BOUND = "qwen3-30b-a3b"
"""The model whose steps of prompts take the GPU less than the host needs to launch them."""


def host_bound(row: Row) -> bool:
    """Whether the row's steps of prompts took what the host of the day needed to launch them: they say nothing of a GPU."""
    return row.model == HOST_BOUND and captured_few(row) and row.ep == 1


def batch_rows() -> list[Row]:
    """Throughput rows of present kernels."""
    return [row for row in rows() if row.kind == "batch" and not row.unlike and row.model not in UNGATED]


def simulated(row: Row, coefficients: FittedCoefficients) -> float:
    """Output tokens per second of a batch row, with the KV cache that its start gave."""
    return _simulated(row, costs_of_row(row, coefficients))


def _simulated(row: Row, costs: Costs, observe: Callable[[Work], None] | None = None) -> float:
    options = SchedulerOptions(
        num_blocks=row.kv_tokens // 16, block_size=16, max_batch_size=row.max_batch_size, max_num_tokens=8192, max_seq_len=4096,
        depth=depth_of(row.pp, returns_tokens=costs.returns_tokens), pipeline_stages=row.pp, returns_tokens=costs.returns_tokens,
        prefix_caching=False,
    )  # fmt: skip
    work = row.workload
    burst = arrivals.of("burst", isl=work.input_len, osl=work.output_len, requests=work.requests)
    result = simulate.run(costs, options, burst, scheduler_of=scheduler_of(row), observe=observe)
    return work.requests * work.output_len / result.seconds


@dataclass(frozen=True)
class Burst:
    """A throughput row by few of its steps. steps: work, and how many steps of the burst it stands for; scale: by which the
    scheduler's simulation took longer than the sum of their slowest stages, at the coefficients that the steps were taken with."""

    row: Row
    steps: tuple[tuple[Work, int], ...]
    scale: float

    def throughput(self, coefficients: FittedCoefficients) -> float:
        """Output tokens per second."""
        costs = costs_of_row(self.row, coefficients)
        seconds = self.scale * sum(max(costs.step_seconds(work)) * count for work, count in self.steps)
        return self.row.workload.requests * self.row.workload.output_len / seconds


def bursts(coefficients: FittedCoefficients, chosen: Iterable[Row]) -> list[Burst]:
    """Of these rows; equal ones share a simulation."""
    of_rows: list[Burst] = []
    by_key: dict[tuple[object, ...], Burst] = {}
    for row in chosen:
        key = (row.name, row.kv_tokens, row.max_batch_size, costs_of(row))
        if key not in by_key:
            by_key[key] = _burst(row, coefficients)
        of_rows.append(replace(by_key[key], row=row))
    return of_rows


def _burst(row: Row, coefficients: FittedCoefficients) -> Burst:
    costs = costs_of_row(row, coefficients)
    every: list[Work] = []
    throughput = _simulated(row, costs, every.append)
    steps: list[tuple[Work, int]] = []
    for kind, most in (([w for w in every if w.pairs], PROMPT_STEPS), ([w for w in every if not w.pairs], DECODE_STEPS)):
        kind.sort(key=lambda work: work.pairs or work.kv_tokens)
        parts = min(most, len(kind))
        bounds = [len(kind) * part // parts for part in range(parts + 1)] if parts else []
        steps += [(kind[(first + last) // 2], last - first) for first, last in itertools.pairwise(bounds)]
    seconds = sum(max(costs.step_seconds(work)) * count for work, count in steps)
    return Burst(row, tuple(steps), row.workload.requests * row.workload.output_len / throughput / seconds)


def eager_experts(values: dict[str, float]) -> float:
    """`c_eager_experts` by which the bursts of HOST_BOUND take as long as measured, with all other coefficients as they are."""
    chosen = [row for row in batch_rows() if row.model == HOST_BOUND]

    def loss(value: float) -> float:
        now = FittedCoefficients.from_json({**values, "c_eager_experts": value})
        return sum(math.log(simulated(row, now) / row.measured) ** 2 for row in chosen)

    return round(float(minimize_scalar(loss, bounds=(values["c_eager"], 3000.0), method="bounded", options={"xatol": 20}).x), 0)
