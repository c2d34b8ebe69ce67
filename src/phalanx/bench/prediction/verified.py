# SPDX-License-Identifier: Apache-2.0
"""The best plans run here, each beside its prediction: `phalanx plan MODEL --verify --verify_plans N`. On GPUs, and on CPU ranks as
well."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from phalanx.bench import offline
from phalanx.bench.workloads import Workload, params, prompts
from phalanx.config import EngineOptions
from phalanx.config.sources import RawOptions
from phalanx.errors import PhalanxError
from phalanx.hardware import probe
from phalanx.planner import explain
from phalanx.planner.cost import MachineModel
from phalanx.planner.search import Plan, PlanRequest
from phalanx.serve.llm import LLM

SHAPE_NAMES = {
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b", "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
}  # fmt: skip
"""Models whose dummy weights `phalanx bench` makes."""

FIGURES = ("output_tokens_per_second", "ms_per_token", "ttft_ms")


def run(
    model: str, machine: MachineModel, request: PlanRequest, plans: Sequence[Plan], device: str = "auto"
) -> list[dict[str, Any]]:
    """Start each plan's engine with dummy weights (one replica of it), run the asked burst, and set the figures side by side.

    A plan that does not start is a row with its error.
    """
    if device == "auto" and not probe.usable_machine().gpus:
        device = "cpu"
    return [_row(model, machine, request, plan, device) for plan in plans]


def _row(model: str, machine: MachineModel, request: PlanRequest, plan: Plan, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"layout": plan.layout.as_json(), "name": plan.layout.name, "predicted": plan.as_json()}
    try:
        return {**row, "measured": measure(model, machine, request, plan, device)}
    except PhalanxError as error:
        return {**row, "error": str(error)}


def measure(model: str, machine: MachineModel, request: PlanRequest, plan: Plan, device: str = "auto") -> dict[str, float]:
    """Figures of the burst as the plan defines them, and KV tokens of the start. One replica runs with its share of the requests;
    output tokens per second are of all replicas."""
    share = -(-request.concurrency // plan.layout.replicas)
    values = {
        **explain.layout_options(machine, plan),
        "replicas": 1,
        "dtype": request.dtype,
        "kv_cache_dtype": request.kv_cache_dtype,
    }
    values |= {"max_batch_size": plan.max_batch_size, "max_num_tokens": request.max_num_tokens, "max_seq_len": request.seq_len}
    values |= {"model": SHAPE_NAMES.get(model, model), "enable_prefix_caching": False, "device": device}
    if device == "cpu":
        values |= {"dtype": "fp32", "kv_cache_dtype": "model"}
    known = {name: value for name, value in values.items() if name in EngineOptions.model_fields}
    workload = Workload("burst", "batch", share, request.isl, request.osl, repeats=1)
    with offline.target(RawOptions(known, {})) as subject, offline.engine(subject) as (llm, _):
        ids = prompts(workload, llm.facts.vocab_size, 0)
        offline.seconds_of(llm, ids[: min(share, 8)], min(4, request.osl))
        begin = time.perf_counter()
        times = asyncio.run(burst_times(llm, ids, request.osl))
        kv_tokens = float(llm.facts.kv_tokens)
    return {**figures(begin, times, request.osl, request.concurrency / share), "kv_tokens": kv_tokens}


async def burst_times(llm: LLM, ids: Sequence[Sequence[int]], osl: int) -> list[tuple[float, float]]:
    """All requests at once; when each had its first and its last token, by `time.perf_counter`."""

    async def one(prompt: Sequence[int]) -> tuple[float, float]:
        first = last = 0.0
        async for _ in llm.generate_async(list(prompt), params(osl)):
            last = time.perf_counter()
            first = first or last
        return first, last

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in ids]
    return [task.result() for task in tasks]


def figures(begin: float, times: Sequence[tuple[float, float]], osl: int, copies: float) -> dict[str, float]:
    """By the definitions of a plan: time per token is (end - first token) / (tokens - 1), mean over requests; TTFT the median
    request's. times: of first and last token, in seconds; copies: replicas that do the same."""
    per_token = [(last - first) / max(osl - 1, 1) for first, last in times]
    seconds = max(last for _, last in times) - begin
    return {
        "output_tokens_per_second": copies * len(times) * osl / seconds,
        "ms_per_token": 1e3 * statistics.mean(per_token),
        "ttft_ms": 1e3 * (statistics.median(first for first, _ in times) - begin),
    }


def text(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each plan: measured, predicted, the difference, and whether it lies in the interval."""
    lines = ["", "measured here beside predicted:"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']}: did not run: {row['error']}")
            continue
        for name in FIGURES:
            predicted, measured = row["predicted"][name], row["measured"][name]
            if not measured:  # one token a request has no time per token
                continue
            inside = "inside" if predicted["low"] <= measured <= predicted["high"] else "outside"
            lines.append(
                f"{row['name']}: {name} measured {measured:,.2f}, predicted {predicted['value']:,.2f} "
                f"({predicted['value'] / measured - 1:+.1%}, {inside} {predicted['low']:,.2f}-{predicted['high']:,.2f})"
            )
        kv = row["measured"]["kv_tokens"]
        lines.append(f"{row['name']}: KV tokens measured {kv:,.0f}, predicted {row['predicted']['kv_tokens']:,}")
    return "\n".join(lines)
