# SPDX-License-Identifier: Apache-2.0
"""Predictions that are committed before anything of the kind is measured: `python -m benchmarks.plan.predict` writes
benchmarks/results/plan_predictions.json, with the commit of the coefficients. `--measured FILE ...` puts the figures of reports of
`phalanx bench all --json FILE` beside them, in benchmarks/results/plan_predictions_measured.json.

H100: a GPU that was never measured. Contexts of 2k to 32k on H200: the fit saw 200 tokens a row, and layers of 1,500. Mixtures of
experts: no row of them is in the fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from phalanx.bench.workloads import parse
from phalanx.plan import burst, search, subject
from phalanx.plan.burst import Limits
from phalanx.plan.cost import Costs
from phalanx.plan.search import Figure, Layout, Wanted

NAME = "plan_predictions"
MEASURED = "plan_predictions_measured"


@dataclass(frozen=True)
class Case:
    """One engine and its workloads, as `phalanx bench` names them."""

    group: str
    gpu: str
    model: str
    dtype: str
    kv: str
    layout: Layout
    workloads: tuple[str, ...]


DECODES = ("decode-1", "decode-64", "decode-256")
LONG = ("decode-1x2048x32", "decode-1x8192x32", "decode-1x32768x32", "decode-16x8192x32", "decode-8x32768x32")
CASES = (
    Case("H100", "H100", "llama-3-8b", "bf16", "model", Layout(1, 1, 1, 1), (*DECODES, "batch-512x1000x1000")),
    Case("H100", "H100", "llama-3-8b", "bf16", "fp8", Layout(1, 1, 1, 1), (*DECODES, "batch-512x1000x1000")),
    Case("H100", "H100", "llama-3-8b", "fp8", "fp8", Layout(1, 1, 1, 1), (*DECODES, "batch-512x1000x1000")),
    Case("contexts", "H200", "llama-3.1-8b", "bf16", "model", Layout(1, 1, 1, 1), LONG),
    Case("contexts", "H200", "llama-3.1-8b", "bf16", "fp8", Layout(1, 1, 1, 1), LONG),
    Case("contexts", "H200", "llama-3.1-70b", "fp8", "fp8", Layout(2, 1, 1, 1), LONG),
    Case("experts", "H200", "mixtral-8x7b", "fp8", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64", "batch-512x1000x1000")),
    Case("experts", "H200", "mixtral-8x22b", "fp8", "model", Layout(2, 1, 1, 1), ("decode-1", "decode-64")),
    Case("experts", "H200", "qwen3-30b-a3b", "fp8", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64", "batch-512x1000x1000")),
    Case("experts", "H200", "qwen3-235b-a22b", "fp8", "fp8", Layout(2, 1, 1, 1), ("decode-1", "decode-64")),
    Case("experts", "H200", "gpt-oss-120b", "bf16", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64", "batch-512x1000x1000")),
    Case("experts", "H200", "deepseek-v2-lite", "fp8", "model", Layout(1, 1, 1, 1), ("decode-1", "decode-64")),
)


def predicted(case: Case) -> dict[str, Any]:
    """KV tokens, and each workload's figure with its interval: ms per token, or output tokens per second."""
    shape, machine = subject.shape_for(case.model), subject.machine_for(case.gpu)[0]
    kv_size = 1 if case.kv == "fp8" else 2
    longest = max(parse(name).seq_len for name in case.workloads)
    wanted = Wanted(dtype=case.dtype, kv_cache_dtype=case.kv, max_seq_len=max(4096, longest))
    _, kv_tokens, _ = search.memory(shape, machine, wanted, case.layout.split, 512, kv_size)
    costs = Costs(shape, case.dtype, kv_size, case.layout.split, machine)
    half = search.half_width(shape, machine, case.layout, costs)
    figures = {}
    for name in case.workloads:
        work = parse(name)
        if work.kind == "decode":
            value = 1e3 * burst.decode_round(costs, work.requests, work.input_len + work.output_len / 2)
        else:
            value = burst.run(
                costs, work.requests, work.input_len, work.output_len, Limits(512, 8192, kv_tokens)
            ).output_tokens_per_second
        figures[name] = Figure.of(value, half, costs.label).as_json()
    return {
        "group": case.group, "gpu": case.gpu, "model": case.model, "dtype": case.dtype, "kv_cache_dtype": case.kv,
        "layout": case.layout.as_json(), "kv_tokens": kv_tokens, "figures": figures,
    }  # fmt: skip


def same_engine(row: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether a report of `phalanx bench` measured the engine of a row of predictions: GPU, model, dtypes and layout."""
    options, layout = report["asked"], row["layout"]
    gpu = " ".join(report["about"]["machine"]["gpus"][:1])
    return (
        row["gpu"] in gpu.split()
        and row["model"] == options["model"]
        and row["dtype"] == options.get("dtype", "auto")
        and (row["kv_cache_dtype"] == "fp8") == (options.get("kv_cache_dtype") == "fp8")
        and layout["tp"] == options.get("tensor_parallel_size", 1)
        and layout["pp"] == options.get("pipeline_parallel_size", 1)
        and layout["ep"] == options.get("expert_parallel_size", 1)
        and layout["moe_ep"] == options.get("moe_expert_parallel_size", 1)
        and layout["replicas"] == options.get("replicas", 1)
    )


def beside(rows: list[dict[str, Any]], report: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for each result of a report that was predicted: the figure with its interval, and what was measured."""
    entries = []
    kv_tokens = min(each["kv_tokens"] for each in report["engines"].values())
    for row in (row for row in rows if same_engine(row, report)):
        for result in report["results"]:
            figure = row["figures"].get(result["workload"])
            if figure is None:
                continue
            value = result.get("tpot_ms") or result["output_tok_s"]
            entries.append({
                "group": row["group"], "gpu": row["gpu"], "model": row["model"], "dtype": row["dtype"],
                "kv_cache_dtype": row["kv_cache_dtype"], "layout": row["layout"], "workload": result["workload"],
                "unit": "ms per token" if result.get("tpot_ms") else "output tokens/s",
                "predicted": figure, "measured": value, "error": figure["value"] / value - 1,
                "inside": figure["low"] <= value <= figure["high"],
                "kv_tokens": {"predicted": row["kv_tokens"], "start_gave": kv_tokens},
                "measured_by": report["about"],
            })  # fmt: skip
    return entries


def groups(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each group's number of figures, mean and largest absolute error, and how many lie inside their interval."""
    names = dict.fromkeys(entry["group"] for entry in entries)
    sizes = {name: [abs(entry["error"]) for entry in entries if entry["group"] == name] for name in names}
    inside = {name: sum(entry["inside"] for entry in entries if entry["group"] == name) for name in names}
    return {
        name: {"figures": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors), "inside": inside[name]}
        for name, errors in sizes.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="reports of `phalanx bench all`")
    options = parser.parse_args()
    if not options.measured:
        print(f"written: {harness.write(NAME, {'rows': [predicted(each) for each in CASES]}).relative_to(harness.ROOT)}")
        return 0
    predictions = json.loads((harness.RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))
    path = harness.RESULTS / f"{MEASURED}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.is_file() else []
    new = [
        entry for file in options.measured for entry in beside(predictions["rows"], json.loads(file.read_text(encoding="utf-8")))
    ]
    if not new:
        print("no result of these reports was predicted", file=sys.stderr)
        return 1
    names = {key(entry) for entry in new}
    figures = [entry for entry in old if key(entry) not in names] + new
    for entry in new:
        print(
            f"{entry['gpu']} {entry['model']} {entry['dtype']} kv {entry['kv_cache_dtype']} {entry['workload']:22} "
            f"predicted {entry['predicted']['value']:10,.2f} measured {entry['measured']:10,.2f} "
            f"{entry['error']:+7.1%} {'inside' if entry['inside'] else 'OUTSIDE'}"
        )
    harness.write(MEASURED, {"predicted_at": predictions["about"]["commit"], "groups": groups(figures), "figures": figures})
    return 0


def key(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What a figure is of."""
    return *(entry[name] for name in ("gpu", "model", "dtype", "kv_cache_dtype", "workload")), *entry["layout"].values()


if __name__ == "__main__":
    sys.exit(main())
