# SPDX-License-Identifier: Apache-2.0
"""The best plans run here, each beside its prediction: `phalanx plan MODEL --verify N`. On GPUs, and on CPU ranks as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.bench import offline
from phalanx.bench.workloads import Workload
from phalanx.config import EngineOptions
from phalanx.config.sources import RawOptions
from phalanx.errors import OptionError, PhalanxError
from phalanx.plan import explain
from phalanx.plan.cost import Machine
from phalanx.plan.search import Plan, Wanted

SHAPES = {
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b", "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
}  # fmt: skip
"""Models whose dummy weights `phalanx bench` makes."""


def run(model: str, machine: Machine, wanted: Wanted, plans: Sequence[Plan], device: str = "auto") -> list[dict[str, Any]]:
    """Start each plan's engine with dummy weights (one replica of it), run the asked burst, and set the figures side by side.

    A plan that does not start is a row with its error. Raises OptionError for replicas' share of no request.
    """
    return [_row(model, machine, wanted, plan, device) for plan in plans]


def _row(model: str, machine: Machine, wanted: Wanted, plan: Plan, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"layout": plan.layout.as_json(), "name": plan.layout.name, "predicted": plan.as_json()}
    try:
        return {**row, "measured": measure(model, machine, wanted, plan, device)}
    except PhalanxError as error:
        return {**row, "error": str(error)}


def measure(model: str, machine: Machine, wanted: Wanted, plan: Plan, device: str = "auto") -> dict[str, float]:
    """Output tokens per second, ms per token and ms to the first token of the burst, and KV tokens of the start; of all replicas
    together, of which one runs."""
    share = -(-wanted.concurrency // plan.layout.replicas)
    if share < 1:
        raise OptionError(f"{plan.layout.name} has no request for each replica")
    chosen = explain.options(model, machine, wanted, plan)
    values = {**chosen, "model": SHAPES.get(model, model), "enable_prefix_caching": False, "device": device}
    if device == "cpu":
        values |= {"dtype": "fp32", "kv_cache_dtype": "model"}
    known = {name: value for name, value in values.items() if name in EngineOptions.model_fields}
    workload = Workload("burst", "batch", share, wanted.isl, wanted.osl, repeats=1)
    with offline.target(RawOptions(known, {})) as subject, offline.engine(subject) as (llm, _):
        from phalanx.bench.workloads import prompts

        ids = prompts(workload, llm.facts.vocab_size, 0)
        offline.seconds_of(llm, ids[: min(share, 8)], min(4, wanted.osl))
        first = offline.seconds_of(llm, ids, 1)
        all_tokens = offline.seconds_of(llm, ids, wanted.osl) if wanted.osl > 1 else first
        return {
            "output_tokens_per_second": wanted.concurrency * wanted.osl / all_tokens,
            "ms_per_token": 1e3 * (all_tokens - first) / max(wanted.osl - 1, 1), "last_first_token_ms": first * 1e3,
            "kv_tokens": float(llm.facts.num_blocks * llm.facts.block_size),
        }  # fmt: skip


def text(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each plan: measured, predicted, the difference, and whether it lies in the interval."""
    lines = ["", "measured here beside predicted:"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']}: did not run: {row['error']}")
            continue
        for name in ("output_tokens_per_second", "ms_per_token"):
            predicted, measured = row["predicted"][name], row["measured"][name]
            inside = "inside" if predicted["low"] <= measured <= predicted["high"] else "outside"
            lines.append(
                f"{row['name']}: {name} measured {measured:,.2f}, predicted {predicted['value']:,.2f} "
                f"({predicted['value'] / measured - 1:+.1%}, {inside} {predicted['low']:,.2f}-{predicted['high']:,.2f})"
            )
        kv = row["measured"]["kv_tokens"]
        lines.append(f"{row['name']}: KV tokens measured {kv:,.0f}, predicted {row['predicted']['kv_tokens']:,}")
    return "\n".join(lines)
