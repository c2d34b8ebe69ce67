# SPDX-License-Identifier: Apache-2.0
"""Predictions that are committed before anything of the kind is measured: `python -m benchmarks.planner.predict` writes `CASES` to
benchmarks/results/NAME.json, with the commit of the coefficients, and never over an older file. `--measured REPORT ...` puts the
figures of reports of `phalanx bench all --json REPORT` beside every committed prediction of their engine, in NAME_measured.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from phalanx.bench.workloads import parse
from phalanx.config.options import EngineOptions
from phalanx.layout import Layout
from phalanx.layout.cache import kv_dtype
from phalanx.planner import burst, coefficients, search, subject
from phalanx.planner.burst import Limits
from phalanx.planner.cost import Costs
from phalanx.planner.search import Figure, PlanRequest

NAMES = (
    "plan_predictions",
    "plan_predictions_2026_11_24",
    "plan_predictions_2026_11_25",
    "plan_predictions_2026_11_25b",
    "plan_predictions_2026_11_26",
    "plan_predictions_2026_11_26_four",
    "plan_predictions_2026_11_26_graphs",
    "plan_predictions_2026_11_27",
    "plan_predictions_2026_11_28",
)
"""Results with predictions, the oldest first. The first was made by 852df57 with cases of its own: H100, which no coefficient was
fitted to; contexts of 2k to 32k and mixtures of experts, which were not in the fit then. The second was made by f5d9ba6: long
contexts, 405B, mixtures on two GPUs, MXFP4 and latent attention. The third was made by 4e08781: batch sizes, slots and layouts
between those that were measured. The fourth, by 6b9968f, is like it, by the coefficients and widths that
the third one's misses led to. The fifth has the mixtures on two GPUs again, for an engine that no longer gathers the residual, and
two groups of experts with AUTO's exchange. The sixth is of four GPUs: layouts of which no row of a mixture is measured, and dense
models whose rows on four are of older kernels. The seventh is of engines that replay long prompts of mixtures from graphs, and of
experts split by number without the faults of the rows that there are. The eighth is of batch sizes and layouts of mixtures between
those that are measured, of latent attention whose prompts are expanded for all heads at once, and of 70B and mixtures on H100. The
ninth is of pipelines whose steps hold equal shares of the decodes: no throughput of a pipeline is measured since they do."""


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
    max_batch_size: int = 512


SLOTS: int = EngineOptions.model_fields["max_batch_size"].default
FRACTION = PlanRequest.fraction
"""Of the free memory, the KV cache's part in every prediction: KV tokens of a start with another one are not compared."""
DECODES = ("decode-1", "decode-64", "decode-256")
BATCH = "batch-512x1000x1000"
FEWER = "batch-256x512x512"


def _of(group: str, model: str, layout: Layout, *workloads: str, gpu: str = "H200") -> Case:
    return Case(group, gpu, model, "fp8", "fp8", layout, workloads)


PP2, TP2_PP2 = Layout(pp=2), Layout(tp=2, pp=2)
CASES = (
    *(_of("pipelines", "llama-3-70b", PP2, *DECODES, BATCH, FEWER, gpu=gpu) for gpu in ("H100", "H200")),
    *(_of("pipelines", "llama-3-8b", PP2, *DECODES, BATCH, gpu=gpu) for gpu in ("H100", "H200")),
    *(_of("pipelines", "mixtral-8x7b", PP2, *DECODES, BATCH, gpu=gpu) for gpu in ("H100", "H200")),
    *(_of("pipelines", "qwen3-30b-a3b", PP2, *DECODES, BATCH, gpu=gpu) for gpu in ("H100", "H200")),
    *(_of("pipelines", model, TP2_PP2, *DECODES, BATCH) for model in ("llama-3-70b", "mixtral-8x22b", "qwen3-235b-a22b")),
)
"""max_batch_size is of each replica."""


def predicted(case: Case) -> dict[str, Any]:
    """KV tokens of a replica, and each workload's figure with its interval: ms per token, or output tokens per second. Replicas
    share the requests evenly."""
    shape, machine = subject.shape_for(case.model), subject.machine_for(case.gpu)[0]
    kv = kv_dtype(case.kv, case.dtype)
    longest = max(parse(name).seq_len for name in case.workloads)
    request = PlanRequest(dtype=case.dtype, kv_cache_dtype=case.kv, max_seq_len=max(4096, longest))
    kv_tokens = search.memory(shape, machine, request, case.layout, case.max_batch_size, kv)[1].kv_tokens
    costs = Costs(shape, case.dtype, kv, case.layout, machine)
    figures = {}
    for name in case.workloads:
        work = parse(name)
        requests = -(-work.requests // case.layout.replicas)
        half = search.width(costs, work.input_len + work.output_len / 2).half
        if work.kind == "decode":
            value = 1e3 * burst.decode_round(costs, requests, work.input_len + work.output_len / 2, case.max_batch_size)
        else:
            limits = Limits(case.max_batch_size, 8192, kv_tokens)
            one = burst.run(costs, requests, work.input_len, work.output_len, limits)
            value = work.requests / requests * one.output_tokens_per_second
        figures[name] = Figure.of(value, half, costs.label).as_json()
    return {
        "group": case.group, "gpu": case.gpu, "model": case.model, "dtype": case.dtype, "kv_cache_dtype": case.kv,
        "layout": case.layout.as_json(), "max_batch_size": case.max_batch_size, "kv_tokens": kv_tokens, "figures": figures,
    }  # fmt: skip


def same_engine(row: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether a report of `phalanx bench` measured the engine of a row of predictions: GPU, model, dtypes and layout. dtype: the
    one that the engine ran in, as "auto" is the checkpoint's. No prediction is of skewed routing."""
    options, layout = report["asked"], row["layout"]
    dtypes = {engine["dtype"] for engine in engines(report)}
    gpu = " ".join(report["about"]["machine"]["gpus"][:1])
    return (
        not options.get("expert_traffic")
        and row["gpu"] in gpu.split()
        and row["model"] == options["model"]
        and dtypes == {row["dtype"]}
        and (row["kv_cache_dtype"] == "fp8") == (options.get("kv_cache_dtype") == "fp8")
        and layout["tp"] == options.get("tensor_parallel_size", 1)
        and layout["pp"] == options.get("pipeline_parallel_size", 1)
        and layout["ep"] == options.get("expert_parallel_size", 1)
        and layout["moe_ep"] == options.get("moe_expert_parallel_size", 1)
        and layout["replicas"] == options.get("replicas", 1)
        and row.get("max_batch_size", 512) == options.get("max_batch_size", SLOTS)
    )


def engines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a report of `phalanx bench all`, or the one of `phalanx bench latency`."""
    return list(report["engines"].values()) if "engines" in report else [report["engine"]]


def beside(rows: list[dict[str, Any]], report: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for each result of a report that was predicted: the figure with its interval, and what was measured."""
    entries = []
    kv_tokens = min(each["kv_tokens"] for each in engines(report)) // report["asked"].get("replicas", 1)
    fraction = report["asked"].get("kv_cache_free_gpu_memory_fraction", FRACTION)
    for row in (row for row in rows if same_engine(row, report)):
        for result in report["results"]:
            figure = row["figures"].get(result["workload"])
            if figure is None or result.get("allreduce_strategy", "AUTO") != "AUTO":
                continue
            value = result.get("tpot_ms") or result["output_tok_s"]
            entries.append({
                "group": row["group"], "gpu": row["gpu"], "model": row["model"], "dtype": row["dtype"],
                "kv_cache_dtype": row["kv_cache_dtype"], "layout": row["layout"], "workload": result["workload"],
                "unit": "ms per token" if result.get("tpot_ms") else "output tokens/s",
                "predicted": figure, "measured": value, "error": figure["value"] / value - 1,
                "inside": figure["low"] <= value <= figure["high"],
                "kv_tokens": {"predicted": row["kv_tokens"], "start_gave": kv_tokens if fraction == FRACTION else None},
                "measured_by": report["about"],
            })  # fmt: skip
    return entries


def groups(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each group's number of figures, mean and largest absolute error, how many lie inside their interval, and the median half
    width of these."""
    by_group: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_group.setdefault(entry["group"], []).append(entry)
    return {name: summary(members) for name, members in by_group.items()}


def summaries(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all figures, of those on a machine that coefficients were fitted on, of each group and of each model."""
    machines = coefficients.document()["machines"]
    measured = [entry for entry in entries if entry["gpu"] in machines]
    models = {name: summary([each for each in entries if each["model"] == name]) for name in {each["model"] for each in entries}}
    parts = {"all": summary(entries), "groups": groups(entries), "models": dict(sorted(models.items()))}
    return parts | ({"measured_machine": summary(measured)} if measured else {})


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Of measured predictions: their number, errors, how many are inside their interval, and its median half width."""
    errors = [abs(entry["error"]) for entry in entries]
    widths = [entry["predicted"]["high"] / entry["predicted"]["value"] - 1 for entry in entries]
    return {
        "figures": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors),
        "inside": sum(entry["inside"] for entry in entries), "median_half_width": statistics.median(widths),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="reports of `phalanx bench all`")
    options = parser.parse_args()
    if options.measured:
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in options.measured]
        if not sum(compare(name, reports) for name in NAMES):
            print("no result of these reports was predicted, or all of them had been measured", file=sys.stderr)
            return 1
        return 0
    if (harness.RESULTS / f"{NAMES[-1]}.json").exists():
        print(f"{NAMES[-1]}.json exists: a prediction is made once; add a name to NAMES", file=sys.stderr)
        return 1
    print(f"written: {harness.write(NAMES[-1], {'rows': [predicted(each) for each in CASES]}).relative_to(harness.ROOT)}")
    return 0


def compare(name: str, reports: list[dict[str, Any]]) -> int:
    """Put the reports beside the predictions of a results file; how many figures are new. The first measurement of a figure
    stays: a later one is of another engine than the one that was predicted."""
    if not (harness.RESULTS / f"{name}.json").is_file():
        return 0
    predictions = json.loads((harness.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    path = harness.RESULTS / f"{name}_measured.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.is_file() else []
    known = {key(entry) for entry in entries}
    new = []
    for entry in (entry for report in reports for entry in beside(predictions["rows"], report)):
        if key(entry) not in known:
            known.add(key(entry))
            new.append(entry)
    for entry in new:
        print(
            f"{entry['gpu']} {entry['model']} {entry['dtype']} kv {entry['kv_cache_dtype']} {entry['workload']:22} "
            f"predicted {entry['predicted']['value']:10,.2f} measured {entry['measured']:10,.2f} "
            f"{entry['error']:+7.1%} {'inside' if entry['inside'] else 'OUTSIDE'}"
        )
    if new:
        figures = entries + new
        harness.write(path.stem, {"predicted_at": predictions["about"]["commit"], **summaries(figures), "figures": figures})
    return len(new)


def key(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What a figure is of."""
    return *(entry[name] for name in ("gpu", "model", "dtype", "kv_cache_dtype", "workload")), *entry["layout"].values()


if __name__ == "__main__":
    sys.exit(main())
