# SPDX-License-Identifier: Apache-2.0
"""Fit the planner's coefficients to the committed results, and write them with their residuals into the package.

`python -m benchmarks.plan.fit --write` writes src/phalanx/plan/data/{collectives,coefficients}.json; without it, prints.
What is fitted: decode figures on H200 (rows.py), times of single layers (models_lengths.json, models_long_steps.*.json) and of
their experts (kernels_moe.json). Throughput figures are not: they are predictions. Memory: the KV tokens of every start of a dense
model, as a linear program that no start falls below. Residuals by leaving one group out (a model, a layout, a number of requests, a
strategy) give the width of the intervals.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, linprog

from benchmarks.plan.rows import REFERENCE_GBPS, RESULTS, Row, Start, rows, starts
from phalanx.hardware import catalogue
from phalanx.plan import burst, collectives, cost, footprint, graphs
from phalanx.plan.coefficients import Coefficients
from phalanx.plan.collectives import all_reduce_points
from phalanx.plan.cost import Costs, Machine, Work
from phalanx.plan.families import known, shape_of
from phalanx.plan.footprint import Split

DATA = Path(__file__).resolve().parents[2] / "src/phalanx/plan/data"
FITTED = (
    "e_bytes", "e_bytes_16", "landed", "tflops_per_watt", "sharpness", "passes", "c_layer", "c_one", "c_step", "c_hop",
    "e_far", "e_far_fp8", "e_experts", "e_experts_flops", "c_moe", "passes_experts",
)  # fmt: skip
START = {
    "e_bytes": 0.88,
    "e_bytes_16": 0.9,
    "landed": 0.3,
    "tflops_per_watt": 1.75,
    "sharpness": 1.6,
    "passes": 1.0,
    "c_layer": 17.0,
    "c_one": 12.0,
    "c_step": 50.0,
    "c_hop": 100.0,
    "e_far": 0.67,
    "e_far_fp8": 0.28,
    "e_experts": 0.88,
    "e_experts_flops": 0.55,
    "c_moe": 15.0,
    "passes_experts": 1.0,
}
LEAST = {
    "passes": 0.0,
    "tflops_per_watt": 1.0,
    "landed": 0.0,
    "sharpness": 0.8,
    "c_step": 0.0,
    "c_hop": 0.0,
    "c_one": 1.0,
    "c_layer": 1.0,
    "c_moe": 0.0,
    "passes_experts": 0.0,
    "e_far_fp8": 0.1,
}
MOST = {
    "e_bytes": 1.0,
    "e_bytes_16": 1.0,
    "landed": 0.9,
    "tflops_per_watt": 2.2,
    "sharpness": 4.0,
    "passes": 8.0,
    "c_layer": 60.0,
    "c_one": 60.0,
    "c_step": 2000.0,
    "c_hop": 2000.0,
    "e_far": 1.0,
    "e_far_fp8": 1.0,
    "e_experts": 1.0,
    "e_experts_flops": 1.0,
    "c_moe": 60.0,
    "passes_experts": 8.0,
}
LAYER_WEIGHT = 0.7


@dataclasses.dataclass(frozen=True)
class Layer:
    """The measured time of one layer. us; all_reduces: whether its two are in it; experts: of its experts alone, router and sum
    included."""

    name: str
    model: str
    tp: int
    work: Work
    us: float
    all_reduces: bool
    experts: bool = False


def collectives_document() -> dict[str, Any]:
    """Measured all-reduces with residual, norm and FP8, hidden 8192, in bf16: AUTO is the best of ours in each cell, that with rows
    that have owners among them, as the runtime chooses; NCCL has its kernels behind it."""
    worlds: dict[str, dict[str, Any]] = {"AUTO": {}, "NCCL": {}}
    for world in (2, 4):
        auto: list[tuple[float, float]] = []
        nccl: list[tuple[float, float]] = []
        with (RESULTS / f"allreduce/benchmark.tp{world}.sm90.csv").open(encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if row["fusion"] != "RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE" or int(row["hidden_size"]) != 8192:
                    continue
                (nccl if row["strategy"] == "NCCL" else auto).append((float(row["size"]), float(row["time (us)"])))
        with (RESULTS / f"comm_rs_norm_ag.tp{world}.sm90.csv").open(encoding="utf-8") as lines:
            owned = [(float(row["tokens"]) * 16384, float(row["us"])) for row in csv.DictReader(lines) if row["what"] == "OWNED"]
        # From 128 tokens on rows have owners, and sizes between theirs are not those of whole rows.
        auto = [point for point in auto if point[0] < 128 * 16384] + owned
        worlds["AUTO"][str(world)], worlds["NCCL"][str(world)] = all_reduce_points(auto), all_reduce_points(nccl)
    return {
        "what": "One all-reduce with residual add, RMSNorm and FP8 quantization on 4 x H200, by bytes of one rank's tensor, us.",
        "all_reduce": {"sm": 90, "link_bandwidth": catalogue.gpu("H200").link_bandwidth, "worlds": worlds,
                       "source": "benchmarks/results: allreduce/benchmark.tp*.sm90.csv, comm_rs_norm_ag.tp*.sm90.csv, 2026-11-21"},
    }  # fmt: skip


def layers() -> list[Layer]:
    """Single layers: decodes of many lengths without all-reduces, long steps with them."""
    found = []
    lengths = json.loads((RESULTS / "models_lengths.json").read_text(encoding="utf-8"))["us"]
    for label in ("now", "eddfb04"):
        for name, us in lengths[label].items():
            heads, count, _, context, kind = name.split()
            if kind != "alike":
                continue
            model, tp = ("llama-3-8b", 1) if heads == "32/8" else ("llama-3-70b", 4)
            rows_of = int(count)
            work = Work(rows_of, rows_of, rows_of * float(context), longest=float(context))
            found.append(Layer(f"lengths {label} {name}", model, tp, work, us, False))
    for tp, model, file in ((2, "llama-3-70b", "tp2"), (4, "llama-3-70b", "tp4"), (4, "llama-3.1-405b", "tp4.llama-3.1-405b")):
        document = json.loads((RESULTS / f"models_long_steps.{file}.json").read_text(encoding="utf-8"))
        for tokens, times in document["steps"].items():
            work = Work(int(tokens), 0, 0.0, int(tokens) * document["prompt"] / 2)
            found.append(Layer(f"long {model} tp{tp} {tokens}", model, tp, work, min(times["whole_us"], times["landed_us"]), True))
    return found + expert_layers()


def expert_layers() -> list[Layer]:
    """Experts of one layer in FP8, each token's drawn uniformly, by tokens."""
    document = json.loads((RESULTS / "kernels_moe.json").read_text(encoding="utf-8"))
    models = {"mixtral-8x7b": "mixtral-8x7b", "qwen3-30b": "qwen3-30b-a3b"}
    return [
        Layer(f"experts {model} {tokens}", model, 1, Work(int(tokens), 0), cell[0], False, True)
        for label, model in models.items()
        for tokens, cell in document[f"{label} fp8 uniform"].items()
    ]


def prompt_attention() -> tuple[float, float]:
    """Parts of the bf16 peak that attention of prompts reaches with a cache in 16 bit and in FP8: the median of the cells of 1,024
    tokens and more."""
    document = json.loads((RESULTS / "kernels_attention_prefill.json").read_text(encoding="utf-8"))
    peak = catalogue.gpu("H200").bf16_flops / 1e12
    reached: dict[str, list[float]] = {"bf16": [], "e4m3": []}
    for name, cell in document.items():
        if name != "about" and not name.endswith("1x128") and "64x128" not in name:
            reached[name.split()[0]].append(cell["chosen"][1] / peak)
    return float(np.median(reached["bf16"])), float(np.median(reached["e4m3"]))


NS_LONG_ROW = 1.6
"""Nanoseconds of one row's attention for each token beyond 1,500: between the 1.5 and 1.7 that one request of 16,384 tokens (70B
TP2, 13.0 ms) and of 32,768 (8B with an FP8 cache, 5.89 ms) leave, measured with the peers' method on 2026-11-22; not in the
results."""


def row_slope() -> float:
    """Nanoseconds of one row's attention for each token of its context: the median over heads and dtypes of the cells of one
    request."""
    document = json.loads((RESULTS / "kernels_attention.json").read_text(encoding="utf-8"))
    slopes = []
    for name, cell in document.items():
        if name.endswith("R=1 T=1500"):
            short = document[name.replace("T=1500", "T=200")]
            slopes.append((cell["chosen"][0] - short["chosen"][0]) * 1e3 / 1300)
    return float(np.median(slopes))


def uncapped() -> float:
    """The part of the peak that FP8 GEMMs of 8,192 tokens reach before the power limit binds: those of a rank of four of 70B."""
    document = json.loads((RESULTS / "kernels_power.json").read_text(encoding="utf-8"))
    config = known("llama-3-70b")
    assert config is not None
    gemms, _, _, _ = cost._stage_gemms(shape_of(config), "fp8", Split(4), 0)
    operations = sum(gemm.flops for gemm in gemms) * document["tokens"]
    peak = catalogue.gpu("H200").flops("fp8")
    return float(operations / (document["ranks"]["4"]["one behind another"]["first_us"] * 1e-6) / peak)


def decode_attention(kind: str) -> float:
    """The part of the memory bandwidth that attention of decodes reaches beyond its start-up: the slope of time over bytes of the
    cells of 64 requests and more, all as long as each other. kind: of the cache, "bf16" or "e4m3"."""
    document = json.loads((RESULTS / "kernels_attention.json").read_text(encoding="utf-8"))
    cells = []
    for name, cell in document.items():
        parts = name.split()
        if parts[0] != kind or len(parts) != 4 or int(parts[2].removeprefix("R=")) < 64:
            continue
        us, terabytes = cell["chosen"]
        cells.append((us * terabytes * 1e6, us))
    sizes, times = np.array([size for size, _ in cells]), np.array([us for _, us in cells])
    weights = 1 / times
    slope = np.polyfit(sizes, times, 1, w=weights)[0]
    return float(1e6 / slope / catalogue.gpu("H200").memory_bandwidth)


def machine(coefficients: Coefficients, bandwidth: float = REFERENCE_GBPS) -> Machine:
    gpu = catalogue.gpu("H200")
    return Machine(gpu, gpu.link, gpu.gpus_per_node, 1, None, coefficients, "table", bandwidth / REFERENCE_GBPS)


def predicted(row: Row, coefficients: Coefficients) -> float:
    """ms per token of a decode row."""
    costs = costs_of(row.model, row.dtype, row.kv_fp8, row.tp, row.pp, row.strategy, coefficients, row.bandwidth, row.moe_ep)
    context = row.workload.input_len + row.workload.output_len / 2
    return 1e3 * burst.decode_round(costs, row.workload.requests, context, row.max_batch_size)


def predicted_layer(layer: Layer, coefficients: Coefficients) -> float:
    """us of one layer, or of its experts."""
    costs = costs_of(layer.model, "fp8", True, layer.tp, 1, "AUTO", coefficients)
    if layer.experts:
        return costs.experts_seconds(layer.work.tokens) * 1e6
    head = costs._head_seconds(max(layer.work.rows, 1)) * 1e6 + coefficients.c_step
    us = (costs.seconds(layer.work) * 1e6 - head) / costs.shape.num_layers
    if not layer.all_reduces and layer.tp > 1:
        us -= 2 * costs._all_reduce().us(layer.work.tokens * costs.shape.hidden_size * 2)
    return us


def costs_of(
    model: str, dtype: str, kv_fp8: bool, tp: int, pp: int, strategy: str, coefficients: Coefficients,
    bandwidth: float = REFERENCE_GBPS, moe_ep: int = 1,
) -> Costs:  # fmt: skip
    config = known(model)
    assert config is not None
    return Costs(shape_of(config), dtype, 1 if kv_fp8 else 2, Split(tp, pp, 1, moe_ep), machine(coefficients, bandwidth), strategy)


def fit(chosen: Sequence[Row], layer_rows: Sequence[Layer], base: dict[str, float]) -> dict[str, float]:
    """Least squares of logarithms of predicted over measured, a soft loss."""
    names = list(FITTED)

    def coefficients(values: Sequence[float]) -> Coefficients:
        return Coefficients.from_json({**base, **dict(zip(names, values, strict=True))})

    def residuals(values: Sequence[float]) -> list[float]:
        now = coefficients(values)
        found = [np.log(predicted(row, now) / row.measured) for row in chosen]
        # Where no row says anything of a coefficient, it stays near that of its like.
        found.append(0.2 * np.log(now.e_bytes_16 / now.e_bytes))
        likes = (
            (now.e_far, now.e_kv), (now.e_far_fp8, now.e_kv_fp8), (now.e_experts, now.e_bytes), (now.e_experts_flops, now.e_flops),
            (now.c_moe + 1, START["c_moe"]), (now.passes_experts + 1, now.passes + 1),
        )  # fmt: skip
        found += [0.02 * np.log(value / like) for value, like in likes]
        return found + [LAYER_WEIGHT * np.log(predicted_layer(layer, now) / layer.us) for layer in layer_rows]

    low = [LEAST.get(name, 0.2) for name in names]
    done = least_squares(
        residuals, [START[name] for name in names], bounds=(low, [MOST[name] for name in names]), loss="soft_l1", f_scale=0.05,
        x_scale=[START[name] for name in names],
    )  # fmt: skip
    return {**base, **{name: round(float(value), 5) for name, value in zip(names, done.x, strict=True)}}


def errors(chosen: Sequence[Row], values: dict[str, float]) -> list[float]:
    now = Coefficients.from_json(values)
    return [predicted(row, now) / row.measured - 1 for row in chosen]


def summary(found: Sequence[float]) -> dict[str, float]:
    sizes = np.abs(found)
    return {"rows": len(sizes), "mean": round(float(sizes.mean()), 4), "q90": round(float(np.quantile(sizes, 0.9)), 4),
            "max": round(float(sizes.max()), 4)}  # fmt: skip


def leave_out(
    decodes: list[Row], layer_rows: list[Layer], base: dict[str, float], group: Callable[[Row], object]
) -> list[tuple[Row, float]]:  # fmt: skip
    """Each group's rows, with their errors under coefficients that were fitted without them."""
    pairs: list[tuple[Row, float]] = []
    for value in sorted({group(row) for row in decodes}, key=str):
        if value == 1 and group is _requests:  # c_one is of these rows alone: without them nothing says what it is
            continue
        outside = [row for row in decodes if group(row) != value]
        models, layouts = {row.model for row in outside}, {(row.model, row.tp) for row in outside}
        kept = [layer for layer in layer_rows if layer.model in models and (layer.model, layer.tp) in layouts]
        values = fit(outside, kept, base)
        now = [row for row in decodes if group(row) == value]
        pairs += zip(now, errors(now, values), strict=True)
        print(f"  without {value}: {summary(errors(now, values))}", flush=True)
    return pairs


def memory() -> dict[str, float]:
    """Coefficients of `footprint.overhead_bytes`: no start took more, and KV tokens are within 1 percent of the start of each
    model and layout that took most; margin: the part of that percent that is left at both ends."""
    hungriest: dict[tuple[Any, ...], tuple[float, float, list[float]]] = {}
    for start in starts():
        if _has_experts(start):  # their workspaces are smaller than these coefficients say: promised too little, never too much
            continue
        taken, slack, features = beside_kv(start)
        key = (start.model, start.dtype, start.tp, start.pp)
        if key not in hungriest or taken > hungriest[key][0]:
            hungriest[key] = taken, slack, features
    above, bounds = [], []
    for taken, slack, features in hungriest.values():
        above += [[-each for each in features] + [slack], [*features, slack]]
        bounds += [-taken, taken + slack]
    done = linprog(
        [0.0] * 5 + [-1.0], A_ub=np.array(above) / 1e9, b_ub=np.array(bounds) / 1e9, bounds=[(0, None)] * 5 + [(None, None)]
    )
    names = footprint.OVERHEADS
    if done.status != 0 or done.x[-1] < 0:
        print("no coefficients keep every start within 1 percent", done.message)
    return {
        **{name: float(round(value, 4)) for name, value in zip(names, done.x, strict=False)},
        "margin": round(float(done.x[-1]), 4),
    }


def _has_experts(row: Row | Start) -> bool:
    return shape_of(known(row.model) or {}).experts is not None


def _requests(row: Row) -> object:
    return row.workload.requests


def beside_kv(start: Start) -> tuple[float, float, list[float]]:
    """What a start took beside weights, KV cache and what is set aside for graphs, bytes; 1 percent of its KV cache; and the
    features that `footprint.OVERHEADS` multiply."""
    config = known(start.model)
    assert config is not None
    shape, split = shape_of(config), start.split
    per_token = max(footprint.kv_token_bytes(shape, 1 if start.kv_fp8 else 2, start.dtype, split))
    cache = start.kv_tokens * per_token / start.fraction
    taken = catalogue.gpu("H200").memory_bytes - max(footprint.weight_bytes(shape, start.dtype, split)) - cache
    captured = footprint.graph_bytes(start.max_batch_size, start.max_num_tokens, split.pp)
    return taken - captured, 0.01 * cache, footprint.overhead_features(shape, split, start.max_num_tokens)


def intervals(residuals: dict[str, dict[str, float]], decodes: Sequence[Row]) -> dict[str, Any]:
    """Half widths of 90 percent. Of a measured class the 90th percentiles of the residuals. Of others what is known from elsewhere:
    another GPU of the generation 0.1 (public rows of another engine on H100 under a form fitted on H200: 90th percentile 0.093),
    another generation, link or network 0.2. experts: of a mixture that the fit has not seen."""
    models = {(shape_of(known(row.model) or {}).hidden_size, shape_of(known(row.model) or {}).num_layers) for row in decodes}
    return {
        "measured": residuals["fit"]["q90"],
        "table": residuals["fit"]["q90"],
        "layout": residuals["without its layout"]["q90"],
        "model": residuals["without its model"]["q90"],
        "derived": 0.1,
        "estimated": 0.2,
        "experts": residuals["experts, without its model"]["q90"],
        "layouts": sorted([row.tp, row.pp] for row in {(r.tp, r.pp): r for r in decodes}.values()),
        "models": sorted(map(list, models)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    (DATA / "collectives.json").write_text(_compact(collectives_document()), encoding="utf-8")
    collectives._document.cache_clear()
    bf16, fp8 = prompt_attention()
    base = {
        "e_flops": round(uncapped(), 4),
        "e_kv": round(decode_attention("bf16"), 4),
        "e_kv_fp8": round(decode_attention("e4m3"), 4),
        "e_prompt": round(bf16, 4),
        "e_prompt_fp8": round(fp8, 4),
        "ns_row": round(row_slope(), 3),
        "ns_long_row": NS_LONG_ROW,
        "c_eager": graphs.HOST_SECONDS * 1e6,
        "c_call": 0.0,
    }
    decodes, layer_rows = [row for row in rows() if row.kind == "decode"], layers()
    values = fit(decodes, layer_rows, base)
    print(values)
    now = Coefficients.from_json(values)
    for row in decodes:
        guess = predicted(row, now)
        print(f"{row.file[:32]:32} {row.name:60} {guess:8.2f} {row.measured:8.2f} {guess / row.measured - 1:+6.1%}")
    for layer in layer_rows:
        guess = predicted_layer(layer, now)
        print(f"{layer.name:40} {guess:9.1f} {layer.us:9.1f} {guess / layer.us - 1:+6.1%}")
    print("all", summary(errors(decodes, values)))
    groups: dict[str, Callable[[Row], object]] = {
        "model": lambda r: r.model, "layout": lambda r: (r.tp, r.pp), "requests": _requests,
        "strategy": lambda r: r.strategy,
    }  # fmt: skip
    residuals = {"fit": summary(errors(decodes, values))}
    for name, group in groups.items():
        residuals_without = leave_out(decodes, layer_rows, base, group)
        residuals[f"without its {name}"] = summary([error for _, error in residuals_without])
        print(name, residuals[f"without its {name}"])
        if name == "model":
            residuals["experts, without its model"] = summary([error for row, error in residuals_without if _has_experts(row)])
    document = {
        "what": "Coefficients of plan/cost.py and plan/footprint.py, by benchmarks/plan/fit.py from benchmarks/results. Residuals: "
        "parts of the measured figure, of decode rows; without: fitted without the row's group.",
        "machines": {"H200": {"sm": 90, "reference_GBps": REFERENCE_GBPS, "coefficients": values, "residuals": residuals}},
        "memory": memory(),
        "intervals": intervals(residuals, decodes),
    }
    print(document["memory"])
    if asked.write:
        (DATA / "coefficients.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _compact(document: dict[str, Any]) -> str:
    text = json.dumps(document, indent=1)
    return re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
