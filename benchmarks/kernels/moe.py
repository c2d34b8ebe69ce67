# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer behind its router's GEMM on one GPU: choice, sort, both GEMMs, quantization and the weighted sum.

Figures: [microseconds, TB/s of the weights of the experts that have tokens, TFLOP/s], by shape, weights, routing and tokens. Timed
in a CUDA graph over copies of the weights that no cache holds, with routing drawn on the device, uniform or by a power law.
--sweep: each GEMM alone, with every tiling near the rule's; their kernels are compiled first.

    python -m benchmarks.kernels.moe --out DIR [--only mixtral-8x7b,qwen3-30b] [--tokens 1,64,1024] [--weights fp8,bf16] [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import EXPERT_SHAPES, ExpertShape
from phalanx import kernels
from phalanx.kernels.gemm.block_gemm import per_token_group_quant_fp8
from phalanx.kernels.moe import dispatch, heuristics
from phalanx.kernels.moe.grouped_gemm import grouped_gemm
from phalanx.kernels.moe.heuristics import BLOCK_K, ExpertTiling, TileSize
from phalanx.kernels.moe.sort_by_expert import sort_by_expert
from phalanx.kernels.moe.tensors import ExpertChoice, ExpertTensors, TrafficPattern
from phalanx.kernels.scaled_tensors import FP8

COLD = 256 << 20
"""Bytes of weights that are read before any is read again, at least: an H200's L2 cache has 60 MiB."""
REPLAYS = 7
POWER = 1.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--only", default="mixtral-8x7b,qwen3-30b")
    parser.add_argument("--tokens", default="1,8,64,512,4096")
    parser.add_argument("--weights", default="fp8", help="of bf16, fp8 (a scale per row), block (per row and 128 columns)")
    parser.add_argument("--routing", default="uniform,power", help="of uniform, power (shares fall with the power 1.2)")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    shapes, counts = arguments.only.split(","), [int(count) for count in arguments.tokens.split(",")]
    figures: dict[str, Any] = {}
    for name, weights, routing in itertools.product(shapes, arguments.weights.split(","), arguments.routing.split(",")):
        rows = figures[f"{name} {weights} {routing}"] = layer_rows(EXPERT_SHAPES[name], weights, routing, counts)
        print(name, weights, routing, rows, flush=True)
    if arguments.sweep:
        harness.compile_ahead(small_calls(shapes, counts))
        for name, count, gated in itertools.product(shapes, counts, (True, False)):
            rows = figures[f"{name} tilings T={count} {'gate_up' if gated else 'down'}"] = sweep(EXPERT_SHAPES[name], count, gated)
            print(name, count, gated, rows[:4], flush=True)
    harness.write("kernels_moe", figures, arguments.out)
    return 0


def random_experts(shape: ExpertShape, weights: str) -> ExpertTensors:
    gate_up, down = (
        torch.randn(shape.experts * rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5
        for rows, columns in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    )
    if weights == "bf16":
        return ExpertTensors(shape.experts, 0, gate_up, down)
    quantize = per_token_group_quant_fp8 if weights == "block" else kernels.quantize_fp8
    (first, first_scale), (second, second_scale) = quantize(gate_up), quantize(down)
    if weights == "fp8":
        first_scale, second_scale = first_scale.squeeze(-1), second_scale.squeeze(-1)
    return ExpertTensors(
        shape.experts, 0, first, second, first_scale.contiguous(), second_scale.contiguous(), fp8_gemm=True
    )  # fmt: skip


def layer_rows(shape: ExpertShape, weights: str, routing: str, counts: list[int]) -> dict[str, list[float]]:
    """Tokens -> [us, TB/s, TFLOP/s]."""
    first = random_experts(shape, weights)
    nbytes = first.gate_up.nbytes + first.down.nbytes
    pattern = TrafficPattern.power_law(shape.experts, POWER if routing == "power" else 0.0, 0, torch.device("cuda"))
    choice = ExpertChoice(shape.top_k, shape.experts, True, pattern=pattern)
    rows: dict[str, list[float]] = {}
    copies = [first]
    for count in counts:
        xs = [torch.randn(count, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        chosen = [dispatch.routed_experts(
            x, None, first, choice
        )[1].ids.unique().numel() for x in xs]  # fmt: skip
        touched = nbytes * sum(chosen) / len(chosen) / shape.experts
        while len(copies) < len(xs) and len(copies) * touched < COLD:
            copies.append(random_experts(shape, weights))
        calls = [
            partial(
                dispatch.routed_experts, x, None, copies[number % len(copies)], choice
            )
            for number, x in enumerate(xs)
        ]  # fmt: skip
        us = harness.graph_us(calls, replays=REPLAYS, discarded=1)
        flops = 6.0 * count * shape.top_k * shape.hidden * shape.inner
        rows[str(count)] = [round(us, 2), round(touched / us / 1e6, 3), round(flops / us / 1e6, 1)]
    return rows


# ---- tilings ---------------------------------------------------------------------------------------------------------


def tile_sizes(shape: ExpertShape, count: int) -> set[TileSize]:
    """The rule's size of a tile and its neighbours, with more pairs in the last tile and without."""
    size = heuristics.pairs_of_tile(count, shape.top_k, shape.experts)
    sizes = {size, min(128, 2 * size), max(8, size // 2)}
    return {TileSize(each, extra) for each in sizes for extra in (0, 16, 32) if extra <= each // 2}


def candidates(size: TileSize, gated: bool) -> Iterator[ExpertTiling]:
    tokens, extra = size
    known = set()
    few = tokens <= 16
    for rows, warps, programs in itertools.product((16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 6) if few else (1, 2, 3)):
        stages = min(8, 208 * 1024 // (programs * ((2 if gated else 1) * rows + tokens + extra) * BLOCK_K))
        spills = gated and rows == 128 and warps == 4 and tokens >= 64
        if stages < 2 or spills or (rows < 16 * warps if few else warps < 4 or rows * tokens < 128 * warps * 2):
            continue
        for parts in (1,) if gated or tokens > 32 else (1, 2, 4):
            tiling = ExpertTiling(rows, tokens, warps, stages, 4 if tokens <= 32 else 8, parts, extra)
            if tiling not in known:
                known.add(tiling)
                yield tiling


def operands(experts: int, rows: int, columns: int, gated: bool) -> tuple[Tensor, Tensor]:
    """A weight in e4m3 of any bits but NaN, and its scales."""
    rows = experts * rows * (2 if gated else 1)
    weight = torch.empty(rows, columns, dtype=torch.uint8, device="cuda").random_(0, 120).view(FP8)
    return weight, torch.rand(rows, device="cuda") * 1e-3


def one_gemm(shape: ExpertShape, weight: tuple[Tensor, Tensor], ids: Tensor, tiling: ExpertTiling, gated: bool) -> partial[Tensor]:
    rows = ids.shape[0] if gated else ids.numel()
    x = torch.randn(rows, weight[0].shape[1], device="cuda").to(FP8)
    tiles = sort_by_expert(ids, first=0, experts=shape.experts, pairs=tiling.tokens, extra=tiling.extra)
    return partial(
        grouped_gemm, x, torch.rand(rows, 1, device="cuda"), *weight, tiles, tiling, top_k=shape.top_k, experts=shape.experts,
        gated=gated, dtype=torch.bfloat16,
    )  # fmt: skip


def small_calls(shapes: list[str], counts: list[int]) -> Iterator[Callable[[], Any]]:
    """Every candidate of the sweep, of small operands."""
    every = {
        (EXPERT_SHAPES[name].top_k, gated, tiling._replace(parts=min(2, tiling.parts)))
        for name, count, gated in itertools.product(shapes, counts, (True, False))
        for size in tile_sizes(EXPERT_SHAPES[name], count)
        for tiling in candidates(size, gated)
    }
    for top_k, gated, tiling in sorted(every):
        small = ExpertShape(top_k + 2, 512, 256, top_k)
        rows, columns = (small.inner, small.hidden) if gated else (small.hidden, small.inner)
        ids = torch.rand(32, small.experts, device="cuda").argsort(1)[:, :top_k].to(torch.int32).contiguous()
        yield one_gemm(small, operands(small.experts, rows, columns, gated), ids, tiling, gated)


def sweep(shape: ExpertShape, count: int, gated: bool) -> list[list[Any]]:
    """[us, rows, tokens, warps, stages, beside, parts, extra] of one GEMM, the fastest first; uniform routing."""
    rows, columns = (shape.inner, shape.hidden) if gated else (shape.hidden, shape.inner)
    weights = [operands(shape.experts, rows, columns, gated) for _ in range(4)]
    ids = [
        torch.rand(count, shape.experts, device="cuda").argsort(1)[:, : shape.top_k].to(torch.int32).contiguous() for _ in weights
    ]
    timed = []
    for size in sorted(tile_sizes(shape, count)):
        for tiling in candidates(size, gated):
            calls = [one_gemm(shape, weight, each, tiling, gated) for weight, each in zip(weights, ids, strict=True)]
            timed.append([round(harness.graph_us(calls, replays=4, discarded=1), 2), *tiling])
    return sorted(timed)


if __name__ == "__main__":
    sys.exit(main())
