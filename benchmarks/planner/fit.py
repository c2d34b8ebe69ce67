# SPDX-License-Identifier: Apache-2.0
"""Fit the planner's coefficients to the committed results, and write them with their residuals into the package.

`python -m benchmarks.planner.fit --write` writes src/phalanx/planner/data/{collectives,coefficients}.json; without it, prints.
What is fitted: decode and throughput figures on H200 (rows.py, throughput.py), times of single layers (models_lengths.json,
models_long_steps.*.json) and of their experts (kernels_moe.json). Attention of decodes is taken from the kernel alone
(kernels_attention_batches.json). Not fitted: rows of `rows.HELD_OUT`, and rows of older engines. Memory: fit_memory.py. Residuals
by leaving one group out (a model, a layout), and the errors of predictions that were committed before their figures, give the width
of the intervals.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from benchmarks import harness
from benchmarks.planner import fit_memory, widths
from benchmarks.planner.history import FittedCoefficients, fitted, returns_tokens
from benchmarks.planner.priced import costs_of, machine, predicted
from benchmarks.planner.rows import HELD_OUT, REFERENCE_GBPS, RESULTS, Row, one_name, rows, shape_named
from benchmarks.planner.throughput import Burst, batch_rows, bursts, eager_experts, host_bound, simulated
from phalanx.hardware import catalogue
from phalanx.layout import Layout, graphs
from phalanx.planner import collectives, cost, search
from phalanx.planner.collectives import Curve
from phalanx.planner.cost import Costs, Work
from phalanx.tables.exchange import CHALLENGER
from phalanx.tables.exchange import INCUMBENT as GATHER

DATA = Path(__file__).resolve().parents[2] / "src/phalanx/planner/data"
FITTED = {
    "e_bytes": (0.2, 0.88, 1.0), "e_bytes_16": (0.2, 0.9, 1.0), "gemm_rs_hidden_part": (0.0, 0.3, 0.9),
    "tflops_per_watt": (1.0, 1.75, 2.2), "sharpness": (0.8, 1.6, 4.0), "passes": (0.0, 1.0, 8.0), "c_layer": (1.0, 17.0, 60.0),
    "c_one": (1.0, 12.0, 60.0), "c_step": (0.0, 50.0, 2000.0), "c_hop": (0.0, 100.0, 2000.0), "e_experts": (0.2, 0.88, 1.0),
    "e_experts_flops": (0.2, 0.55, 1.0), "c_moe": (0.0, 15.0, 60.0), "passes_experts": (0.0, 1.0, 8.0),
    "sharpness_experts": (0.8, 1.7, 4.0), "c_few": (1.0, 15.0, 60.0), "c_norm": (0.0, 1.0, 8.0),
    "c_gather": (0.0, 20.0, 100.0), "c_expert": (0.0, 0.1, 2.0), "c_moe_hidden": (0.0, 1.0, 10.0),
    "ns_pair": (0.0, 2.0, 20.0),
}  # fmt: skip
"""Coefficient -> the least that it may be, where the fit begins, the most."""
ALONE = {
    "c_latent": ("deepseek-v2-lite", (0.0, 60.0)), "mxfp4": ("gpt-oss-120b", (1.0, 5.0)), "c_query": ("deepseek-v2", (0.0, 60.0)),
    "block_experts": ("deepseek-v3", (1.0, 3.0)),
}  # fmt: skip
"""Coefficients of few models, each fitted to the rows of one with all others fixed, in this order: model, least and most."""
FITTED_KINDS = ("dense", "experts", "contexts")
"""Of rows that the common fit has: not those of latent attention, nor of MXFP4."""
LAYER_WEIGHT = 0.7
FUSION, HIDDEN_SIZES = "RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE", (8192, 4096, 2048)
"""Of the all-reduces that make the curves, the longest rows first."""
ROUTED_FUSION = "RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE"
"""Of those in front of experts in FP8: the router reads the norm in 16 bit."""
LONG_STEP = 4096
"""Tokens of a step whose GEMMs over experts compute rather than read."""


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


def curve_points(rows: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Measured (bytes, us) as a curve's points: rising in bytes, the least time of each."""
    least: dict[float, float] = {}
    for size, us in rows:
        least[size] = min(us, least.get(size, us))
    return [[size, round(least[size], 3)] for size in sorted(least)]


def rising(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """The points, none above one of more bytes: where a larger message was faster, the smaller one's time has noise in it."""
    least, kept = math.inf, []
    for size, us in reversed(points):
        least = min(least, us)
        kept.append([size, least])
    return kept[::-1]


def collectives_document() -> dict[str, Any]:
    """Measured all-reduces with residual, norm and FP8 in bf16, by hidden size: AUTO is the best of ours in each cell, that with
    rows that have owners among them, as the runtime chooses; ROUTED the same with the norm in 16 bit beside it; NCCL has its
    kernels behind it. As many bytes of shorter rows take no longer: where not all strategies were measured for these, the longest
    rows' time is the least."""
    worlds: dict[str, dict[str, dict[str, Any]]] = {"AUTO": {}, collectives.ROUTED: {}, "NCCL": {}}
    for world in (2, 4):
        for hidden in HIDDEN_SIZES:
            auto, nccl = _all_reduces(world, hidden)
            for strategy, points in (("AUTO", auto), (collectives.ROUTED, _routed(world, hidden)), ("NCCL", nccl)):
                curves = worlds[strategy].setdefault(str(world), {})
                if curves:
                    longest = Curve(tuple(map(tuple, curves[str(HIDDEN_SIZES[0])])), "table", "")
                    first = longest.points[0][0]
                    points = [(size, min(us, longest.us(size)) if size >= first else us) for size, us in points]
                curves[str(hidden)] = curve_points(points)
    return {
        "what": "One all-reduce with residual add, RMSNorm and FP8 quantization on 4 x H200, by bytes of one rank's tensor, us.",
        "all_reduce": {"sm": 90, "link_bandwidth": catalogue.gpu("H200").link_bandwidth, "worlds": worlds,
                       "source": "benchmarks/results: allreduce/benchmark.tp*.sm90.csv, comm_rs_norm_ag.tp*.sm90.csv, 2026-11-21"},
        "expert_exchange": _expert_exchange(),
    }  # fmt: skip


def _all_reduces(world: int, hidden: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(bytes, us) of AUTO and of NCCL."""
    auto: list[tuple[float, float]] = []
    nccl: list[tuple[float, float]] = []
    with (RESULTS / f"allreduce/benchmark.tp{world}.sm90.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["fusion"] != FUSION or row["op"] != "all_reduce" or int(row["hidden_size"]) != hidden:
                continue
            (nccl if row["strategy"] == "NCCL" else auto).append((float(row["size"]), float(row["time (us)"])))
    if hidden != max(HIDDEN_SIZES):
        return auto, nccl
    with (RESULTS / f"comm_rs_norm_ag.tp{world}.sm90.csv").open(encoding="utf-8") as lines:
        owned = [(float(row["tokens"]) * 16384, float(row["us"])) for row in csv.DictReader(lines) if row["what"] == "OWNED"]
    # From 128 tokens on rows have owners, and sizes between theirs are not those of whole rows.
    return [point for point in auto if point[0] < 128 * 16384] + owned, nccl


def _routed(world: int, hidden: int) -> list[tuple[float, float]]:
    with (RESULTS / f"allreduce/benchmark.tp{world}.sm90.csv").open(encoding="utf-8") as lines:
        return [
            (float(row["size"]), float(row["time (us)"]))
            for row in csv.DictReader(lines)
            if row["fusion"] == ROUTED_FUSION and row["op"] == "all_reduce" and int(row["hidden_size"]) == hidden
            and row["strategy"] != "NCCL"
        ]  # fmt: skip


def _expert_exchange() -> dict[str, Any]:
    """Dispatch and combine of two dp indices in a CUDA graph, by the bytes of one's tokens in 16 bit."""
    document = json.loads((RESULTS / "comm_expert_exchange.ep2.sm90.json").read_text(encoding="utf-8"))
    names = {
        (GATHER, "bf16"): GATHER, (CHALLENGER, "bf16"): f"{CHALLENGER} 16 bit", (CHALLENGER, "e4m3"): f"{CHALLENGER} e4m3",
    }  # fmt: skip
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
    for row in document["rows"]:
        if name := names.get((row["exchange"], row["payload"])):
            points[name].append((2.0 * row["tokens"] * row["hidden"], row["us"]))
    return {
        "sm": 90, "link_bandwidth": catalogue.gpu("H200").link_bandwidth, "world": 2,
        "points": {name: rising(curve_points(each)) for name, each in points.items()},
        "source": f"benchmarks/results: comm_expert_exchange.ep2.sm90.json, {document['about']['date']}",
    }  # fmt: skip


def layers() -> list[Layer]:
    """Single layers: decodes of many lengths without all-reduces, long steps with them."""
    single_layers = []
    lengths = json.loads((RESULTS / "models_lengths.json").read_text(encoding="utf-8"))["us"]
    for label in ("now", "eddfb04"):
        for name, us in lengths[label].items():
            heads, count, _, context, kind = name.split()
            if kind != "alike":
                continue
            model, tp = ("llama-3-8b", 1) if heads == "32/8" else ("llama-3-70b", 4)
            rows_of = int(count)
            work = Work(rows_of, rows_of, rows_of * float(context), longest=float(context))
            single_layers.append(Layer(f"lengths {label} {name}", model, tp, work, us, False))
    document = json.loads((RESULTS / "models_layers.tp2.json").read_text(encoding="utf-8"))
    for tokens, times in document["us"].items():
        work = Work(int(tokens), int(tokens), int(tokens) * float(document["context"]), longest=document["context"])
        single_layers.append(Layer(f"layers llama-3-70b tp2 {tokens}", "llama-3-70b", 2, work, times["with"], True))
    for tp, model, file in ((2, "llama-3-70b", "tp2"), (4, "llama-3-70b", "tp4"), (4, "llama-3.1-405b", "tp4.llama-3.1-405b")):
        document = json.loads((RESULTS / f"models_long_steps.{file}.json").read_text(encoding="utf-8"))
        for tokens, times in document["steps"].items():
            work = Work(int(tokens), 0, 0.0, int(tokens) * document["prompt"] / 2)
            single_layers.append(
                Layer(f"long {model} tp{tp} {tokens}", model, tp, work, min(times["whole_us"], times["landed_us"]), True)
            )
    return single_layers + expert_layers()


def expert_layers() -> list[Layer]:
    """Experts of one layer in FP8, each token's drawn uniformly, by tokens."""
    document = json.loads((RESULTS / "kernels_moe.json").read_text(encoding="utf-8"))
    models = {"mixtral-8x7b": "mixtral-8x7b", "qwen3-30b": "qwen3-30b-a3b"}
    return [
        Layer(f"experts {model} {tokens}", model, 1, Work(int(tokens), 0), cell[0], False, True)
        for label, model in models.items()
        for tokens, cell in document[f"{label} fp8 uniform"].items()
    ]


PROMPTS = ("8x1024", "1x2048", "1x1024+16384")
"""Rows and tokens of each, and tokens before these."""


def prompt_attention(file: str, kernel: str) -> tuple[float, float]:
    """Parts of the bf16 peak that a kernel for attention of prompts reaches with a cache in 16 bit and in FP8: the median over
    PROMPTS and ratios of heads."""
    document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    peak = catalogue.gpu("H200").bf16_flops / 1e12
    reached: dict[str, list[float]] = {"bf16": [], "e4m3": []}
    for name, cell in document.items():
        if name.split()[-1] in PROMPTS:
            reached[name.split()[0]].append(cell[kernel][1] / peak)
    return float(np.median(reached["bf16"])), float(np.median(reached["e4m3"]))


def row_slopes() -> tuple[float, float]:
    """Nanoseconds of one row's attention for each token of its context, up to LONG_ROW and beyond, in the chain of a layer: the
    median over heads and dtypes, and the least, as bytes, which take longer with more heads, are priced apart."""
    document = json.loads((RESULTS / "kernels_attention_merge.json").read_text(encoding="utf-8"))
    short, long = [], []
    for name in document:
        heads, _, tokens = name.rpartition(" 1x")
        if tokens == "2048":
            cells = [document[f"{heads} 1x{context}"] for context in (200, 2048, 32768)]
            least, middle, most = (cell[cell["chosen"]][1] for cell in cells)
            short.append((middle - least) * 1e3 / 1848)
            long.append((most - middle) * 1e3 / (32768 - 2048))
    return float(np.median(short)), min(long)


def far_attention(kind: str) -> float:
    """The part of the memory bandwidth that attention of decodes reaches beyond FAR_ROW tokens: the median over the cells of
    several rows of 8,192 tokens and more, beyond the time of 8 rows of 200."""
    document = json.loads((RESULTS / "kernels_attention_batches.json").read_text(encoding="utf-8"))
    reached = []
    for name, cell in document.items():
        size = re.fullmatch(rf"({kind} \S+) (\d+)x(\d+)", name)
        if size is not None and int(size[2]) >= 4 and int(size[3]) >= 8192:
            us, terabytes = cell["chosen"]
            reached.append(us * terabytes / (us - document[f"{size[1]} R=8 T=200"]["chosen"][0]))
    return float(np.median(reached)) * 1e12 / catalogue.gpu("H200").memory_bandwidth


def latent_attention(heads: int) -> float:
    """The part of the peak in 16 bit that absorbed attention over latents reaches with so many heads, and 256 rows of 1,500
    tokens."""
    document = json.loads((RESULTS / "kernels_latent.json").read_text(encoding="utf-8"))
    us, *_ = document[f"bf16 {heads} heads 256x1500"]["chosen"]
    latent = shape_named("deepseek-v2").latent
    assert latent is not None
    flops = 2.0 * heads * (latent.cached + latent.kv_rank) * 256 * 1500
    return float(flops / (us * 1e-6) / catalogue.gpu("H200").flops("bf16"))


def attention_errors(coefficients: FittedCoefficients) -> list[float]:
    """Errors of a layer of 8B with rows of 2,048 tokens and more, where its attention takes what the kernel alone does and all else
    what is predicted: the width of contexts comes from them."""
    document = json.loads((RESULTS / "kernels_attention_batches.json").read_text(encoding="utf-8"))
    errors_of = []
    for name, cell in document.items():
        size = re.fullmatch(r"(e4m3|bf16) (\d+)/(\d+) (\d+)x(\d+)", name)
        if size is None:
            continue
        rows_of, context = int(size[4]), int(size[5])
        shape = dataclasses.replace(shape_named("llama-3-8b"), num_heads=int(size[2]), num_kv_heads=int(size[3]))
        costs = Costs(shape, "bf16", "fp8" if size[1] == "e4m3" else "bf16", Layout(), machine(coefficients))
        with_rows, without = (
            costs.seconds(Work(rows_of, rows_of, rows_of * float(length), longest=length)) for length in (context, 0)
        )
        # The chain of a layer has the attention of short rows in it.
        short = document[f"{size[1]} {size[2]}/{size[3]} R=8 T=200"]["chosen"][0]
        measured = 1e6 * without / shape.num_layers + cell["chosen"][0] - short
        errors_of.append(1e6 * with_rows / shape.num_layers / measured - 1)
    return errors_of


def uncapped() -> float:
    """The part of the peak that FP8 GEMMs of 8,192 tokens reach before the power limit binds: those of a rank of four of 70B."""
    document = json.loads((RESULTS / "kernels_power.json").read_text(encoding="utf-8"))
    gemms, _, _, _ = cost._stage_gemms(shape_named("llama-3-70b"), "fp8", Layout(tp=4), 0)
    operations = sum(gemm.flops for gemm in gemms) * document["tokens"]
    peak = catalogue.gpu("H200").flops("fp8")
    return float(operations / (document["ranks"]["4"]["one behind another"]["first_us"] * 1e-6) / peak)


def decode_attention(kind: str) -> tuple[float, float]:
    """The part of the memory bandwidth that attention of decodes reaches beyond its start-up, and picoseconds for each query head
    and cached token: the slopes of time over both, of the cells of 64 requests and more, all as long as each other. kind: of the
    cache, "bf16" or "e4m3"."""
    document = json.loads((RESULTS / "kernels_attention_batches.json").read_text(encoding="utf-8"))
    cells = []
    for name, cell in document.items():
        parts = name.split()
        if parts[0] != kind or len(parts) != 4 or int(parts[2].removeprefix("R=")) < 64:
            continue
        us, terabytes = cell["chosen"]
        heads, requests, tokens = int(parts[1].partition("/")[0]), int(parts[2][2:]), int(parts[3][2:])
        cells.append((1.0, us * terabytes * 1e6, requests * tokens * heads, us))
    table = np.array(cells)
    times = table[:, -1]
    _, slope, of_head = np.linalg.lstsq(table[:, :-1] / times[:, None], np.ones_like(times), rcond=None)[0]
    return float(1e6 / slope / catalogue.gpu("H200").memory_bandwidth), float(of_head * 1e6)


def predicted_layer(layer: Layer, coefficients: FittedCoefficients) -> float:
    """us of one layer, or of its experts."""
    costs = costs_of(layer.model, "fp8", True, layer.tp, 1, "AUTO", coefficients)
    if layer.experts:
        return costs.experts_seconds(layer.work.tokens) * 1e6
    head = costs._head_seconds(max(layer.work.rows, 1)) * 1e6 + coefficients.c_step
    us = (costs.seconds(layer.work) * 1e6 - head) / costs.shape.num_layers
    if not layer.all_reduces and layer.tp > 1:
        us -= costs._all_reduces_us(layer.work.tokens, 1, 0)
    return us


def fit(
    chosen: Sequence[Row], layer_rows: Sequence[Layer], burst_rows: Sequence[Burst], base: dict[str, float],
    start: dict[str, float] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Least squares of logarithms of predicted over measured, a soft loss. start: coefficients to begin at."""
    names = list(FITTED)

    def coefficients(values: Sequence[float]) -> FittedCoefficients:
        return FittedCoefficients.from_json({**base, **dict(zip(names, values, strict=True))})

    def residuals(values: Sequence[float]) -> list[float]:
        now = coefficients(values)
        terms = [np.log(predicted(row, now) / row.measured) for row in chosen]
        # Where no row says anything of a coefficient, it stays near that of its like.
        terms.append(0.2 * np.log(now.e_bytes_16 / now.e_bytes))
        likes = (
            (now.e_experts, now.e_bytes), (now.e_experts_flops, now.e_flops), (now.c_moe + 1, FITTED["c_moe"][1]),
            (now.passes_experts + 1, now.passes + 1),
        )  # fmt: skip
        terms += [0.02 * np.log(value / like) for value, like in likes]
        terms += [np.log(burst.throughput(now) / burst.row.measured) for burst in burst_rows]
        return terms + [LAYER_WEIGHT * np.log(predicted_layer(layer, now) / layer.us) for layer in layer_rows]

    least, begin, most = zip(*FITTED.values(), strict=True)
    at = begin if start is None else [min(max(start[name], low), high) for name, (low, _, high) in FITTED.items()]
    close = 1e-8 if start is None else 1e-4  # from a solution on, a row left out moves it little: errors stay within 0.0001
    done = least_squares(residuals, at, bounds=(least, most), loss="soft_l1", f_scale=0.05, x_scale=begin, ftol=close)
    return {**base, **{name: round(float(value), 5) for name, value in zip(names, done.x, strict=True)}}


def fit_alone(name: str, chosen: Sequence[Row], values: dict[str, float]) -> float:
    """The coefficient that explains the rows of its model best, with all others as they are."""
    _, bounds = ALONE[name]

    def loss(value: float) -> float:
        return float(np.sum(np.log(1 + np.array(errors(chosen, {**values, name: value}))) ** 2))

    return round(float(minimize_scalar(loss, bounds=bounds, method="bounded").x), 4)


def mxfp4_flops(values: dict[str, float]) -> float:
    """`mxfp4_flops` by which the experts of one layer of gpt-oss-120b take as long as they do for LONG_STEP tokens."""
    measured = json.loads((RESULTS / "kernels_biased_gemm.json").read_text(encoding="utf-8"))["gpt-oss-120b mxfp4"]

    def miss(value: float) -> float:
        now = FittedCoefficients.from_json({**values, "mxfp4_flops": value})
        costs = costs_of("gpt-oss-120b", "bf16", False, 1, 1, "AUTO", now)
        return abs(math.log(costs.experts_seconds(LONG_STEP) * 1e6 / measured[str(LONG_STEP)][0]))

    return round(float(minimize_scalar(miss, bounds=(1.0, 5.0), method="bounded").x), 4)


def c_return(values: dict[str, float]) -> float:
    """`c_return` by which pipelines that return tokens on the device take as long as measured, with all others as they are. Their
    rows are in no other fit: no row outside of them tells it."""
    decodes = [row for row in fitted_rows() if returns_tokens(row)]
    batches = [row for row in batch_rows() if row.file not in HELD_OUT and returns_tokens(row)]

    def loss(value: float) -> float:
        now = FittedCoefficients.from_json({**values, "c_return": value})
        ratios = [predicted(row, now) / row.measured for row in decodes] + [simulated(row, now) / row.measured for row in batches]
        return sum(math.log(ratio) ** 2 for ratio in ratios)

    return round(float(minimize_scalar(loss, bounds=(0.0, 20.0), method="bounded", options={"xatol": 0.01}).x), 4)


def fitted_rows() -> list[Row]:
    """Decode rows that the coefficients describe and that are not held out."""
    return [row for row in rows() if row.kind == "decode" and row.file not in HELD_OUT and not row.unlike]


def in_common(row: Row) -> bool:
    """Whether the row is one of the common fit, as far as its kind and layout go."""
    return kind(row) in FITTED_KINDS and not returns_tokens(row)


def kind(row: Row) -> search.Kind:
    context = row.workload.input_len + row.workload.output_len / 2
    return search.kind(shape_named(row.model), context)


def errors(chosen: Sequence[Row], values: dict[str, float]) -> list[float]:
    now = FittedCoefficients.from_json(values)
    return [predicted(row, now) / row.measured - 1 for row in chosen]


def summary(relative_errors: Sequence[float]) -> dict[str, float]:
    sizes = np.abs(relative_errors)
    return {"rows": len(sizes), "mean": round(float(sizes.mean()), 4), "q90": round(float(np.quantile(sizes, 0.9)), 4),
            "max": round(float(sizes.max()), 4)}  # fmt: skip


def leave_out(
    decodes: list[Row], layer_rows: list[Layer], burst_rows: list[Burst], base: dict[str, float], values: dict[str, float],
    group: Callable[[Row], object],
) -> tuple[list[float], list[float]]:  # fmt: skip
    """The error of each decode row and of each burst under coefficients that were fitted without its group. values: where each fit
    begins."""
    left_out_errors, of_bursts = [0.0] * len(decodes), [0.0] * len(burst_rows)
    for value in sorted({group(row) for row in decodes}, key=str):
        outside = [row for row in decodes if group(row) != value]
        layouts = {(one_name(row.model), row.tp) for row in outside}
        kept = [layer for layer in layer_rows if (one_name(layer.model), layer.tp) in layouts]
        without = fit(outside, kept, [burst for burst in burst_rows if group(burst.row) != value], base, values)
        indices = [index for index, row in enumerate(decodes) if group(row) == value]
        now = errors([decodes[index] for index in indices], without)
        for index, error in zip(indices, now, strict=True):
            left_out_errors[index] = error
        print(f"  without {value}: {summary(now)}", flush=True)
        coefficients = FittedCoefficients.from_json(without)
        for index, burst in enumerate(burst_rows):
            if group(burst.row) == value:
                of_bursts[index] = burst.throughput(coefficients) / burst.row.measured - 1
    return left_out_errors, of_bursts


def frontends() -> dict[str, dict[str, Any]]:
    """What a request takes beside its steps, and one streamed token, as plan_served_*.json measured them: the median of the runs on
    GPUs, and of those without."""
    runs = [run for path in sorted(RESULTS.glob("plan_served_*.json")) for run in json.loads(path.read_text("utf-8"))["runs"]]
    sides = {"gpu": [run for run in runs if _gpu_of(run) != "CPU"], "cpu": [run for run in runs if _gpu_of(run) == "CPU"]}
    return {
        side: {
            "path_ms": round(1e3 * float(np.median([run["frontend"]["path"] for run in of_side])), 3),
            "event_us": round(1e6 * float(np.median([run["frontend"]["event"] for run in of_side])), 1),
            "machine": f"{'a CPU' if side == 'cpu' else _gpu_of(of_side[0])}, {len(of_side)} runs",
        }
        for side, of_side in sides.items()
    }


def _gpu_of(run: dict[str, Any]) -> str:
    return str(run["gpu"] if isinstance(run["gpu"], str) else run["gpu"]["name"])


def measured_base() -> dict[str, float]:
    """The coefficients that come from measurements of kernels."""
    bf16, fp8 = prompt_attention("kernels_attention_prefill.json", "chosen")
    long_bf16, long_fp8 = prompt_attention("kernels_attention_long_prompts.json", "warp-specialized")
    short, long = row_slopes()
    (bf16_read, bf16_head), (fp8_read, fp8_head) = decode_attention("bf16"), decode_attention("e4m3")
    return {
        "e_flops": round(uncapped(), 4),
        "e_kv": round(bf16_read, 4),
        "e_kv_fp8": round(fp8_read, 4),
        "ps_head": round(bf16_head, 4),
        "ps_head_fp8": round(fp8_head, 4),
        "e_far": round(far_attention("bf16"), 4),
        "e_far_fp8": round(far_attention("e4m3"), 4),
        "e_prompt": round(bf16, 4),
        "e_prompt_fp8": round(fp8, 4),
        "e_long_prompt": round(long_bf16, 4),
        "e_long_prompt_fp8": round(long_fp8, 4),
        "e_latent": round(latent_attention(64), 4),
        "e_latent_few": round(latent_attention(32), 4),
        "ns_row": round(short, 3),
        "ns_long_row": round(long, 3),
        "c_eager": graphs.HOST_SECONDS * 1e6,
        "c_call": 0.0,
    }


def show(decodes: Sequence[Row], layer_rows: Sequence[Layer], values: dict[str, float]) -> None:
    """Every row and layer, predicted and measured."""
    now = FittedCoefficients.from_json(values)
    for row in decodes:
        guess = predicted(row, now)
        print(f"{row.file[:32]:32} {row.name:60} {guess:8.2f} {row.measured:8.2f} {guess / row.measured - 1:+6.1%}")
    for layer in layer_rows:
        guess = predicted_layer(layer, now)
        print(f"{layer.name:40} {guess:9.1f} {layer.us:9.1f} {guess / layer.us - 1:+6.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    (DATA / "collectives.json").write_text(_compact(collectives_document()), encoding="utf-8")
    collectives._document.cache_clear()
    before = fitted()  # steps of bursts are taken with these, and launched by the host as fast as they say
    base, every, layer_rows = {**measured_base(), "c_eager_experts": before.c_eager_experts}, fitted_rows(), layers()
    common_rows = [row for row in batch_rows() if row.file not in HELD_OUT and in_common(row) and not host_bound(row)]
    burst_rows = bursts(before, common_rows)
    alone = {name: [row for row in every if row.model.partition(":")[0] == model] for name, (model, _) in ALONE.items()}
    decodes = [row for row in every if in_common(row)]
    common = fit(decodes, layer_rows, burst_rows, base)
    common["mxfp4_flops"] = mxfp4_flops(common)
    values = dict(common)
    for name, chosen in alone.items():
        values[name] = fit_alone(name, chosen, values)
    values["c_eager_experts"] = eager_experts(values)
    values["c_return"] = c_return(values)
    print(values)
    show(every, layer_rows, values)
    for name, chosen in alone.items():
        print(ALONE[name][0], summary(errors(chosen, values)))
    groups: dict[str, Callable[[Row], object]] = {"model": lambda r: one_name(r.model), "layout": lambda r: (r.tp, r.pp)}
    left_out_errors = {name: leave_out(decodes, layer_rows, burst_rows, base, common, group) for name, group in groups.items()}
    without_group = {name: of_decodes for name, (of_decodes, _) in left_out_errors.items()}
    now = FittedCoefficients.from_json(values)
    rows_of: list[dict[str, Any]] = [
        {"name": row.name, "file": row.file, "model": one_name(row.model), "layout": [row.tp, row.pp],
         "kind": kind(row), "fit": error,
         "model_left_out": without_group["model"][index], "layout_left_out": without_group["layout"][index]}
        for index, (row, error) in enumerate(zip(decodes, errors(decodes, values), strict=True))
    ]  # fmt: skip
    experts = [row["model_left_out"] for row in rows_of if row["kind"] == "experts"]
    residuals = {
        "fit": summary([row["fit"] for row in rows_of]),
        **{f"without its {name}": summary(without_group[name]) for name in groups},
        "throughput, fit": summary([each.throughput(now) / each.row.measured - 1 for each in burst_rows]),
        **{f"throughput, without its {name}": summary(of_bursts) for name, (_, of_bursts) in left_out_errors.items()},
        "experts, without its model": summary(experts),
        "latent, fit": summary(errors([row for row in every if kind(row) == "latent"], values)),
    }
    print(json.dumps(residuals, indent=1))
    history = {"c_gather": values.pop("c_gather")}
    document = {
        "what": "Coefficients of planner/cost.py and planner/footprint.py, by benchmarks/planner/fit.py from benchmarks/results. "
        "Residuals: parts of the measured figure, of decode rows; without: fitted without the row's group.",
        "machines": {
            "H200": {"sm": 90, "reference_GBps": REFERENCE_GBPS, "coefficients": values, "history": history, "residuals": residuals}
        },
        "memory": fit_memory.memory(),
        "frontend": frontends(),
        "intervals": widths.intervals(rows_of, attention_errors(now), [row.model for row in every]),
    }
    print(json.dumps(document["intervals"], indent=1))
    print(document["memory"])
    if options.write:
        harness.write("plan_fit", {"rows": rows_of})  # first: it names the commit, which the next line changes
        (DATA / "coefficients.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _compact(document: dict[str, Any]) -> str:
    text = json.dumps(document, indent=1)
    return re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
