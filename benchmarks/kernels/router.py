# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture-of-experts layer on one GPU: its GEMM and the choice of experts, by torch's GEMM (our GEMV for one token)
and by `router_gemm` in several tilings.

Microseconds of both kernels together, in a CUDA graph over copies of the weight that no cache holds, each behind the other; x was
just written. Each tiling is verified against torch first.

    python -m benchmarks.kernels.router --out DIR [--only mixtral-8x7b,qwen3-30b] [--tokens 1,64] [--variants none]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from phalanx import kernels
from phalanx.config.experts import Scoring
from phalanx.kernels.moe import heuristics
from phalanx.kernels.moe.heuristics import RouterTiling
from phalanx.kernels.moe.router_gemm import router_gemm
from phalanx.kernels.moe.tensors import RouterLogits
from phalanx.kernels.moe.topk_softmax import topk_softmax

COLD = 128 << 20
"""Bytes of weights that are read before any is read again: an H200's L2 cache has 60 MiB."""
MOST_COPIES = 1200
"""Of small weights, whose copies would else be thousands."""
REPLAYS = 5


class RouterShape(NamedTuple):
    experts: int
    hidden: int
    top_k: int
    scoring: Scoring | None = None
    biased: bool = False


SHAPES = {
    "mixtral-8x7b": RouterShape(8, 4096, 2),
    "qwen3-30b": RouterShape(128, 2048, 8),
    "qwen3-235b": RouterShape(128, 4096, 8),
    "deepseek-v2-lite": RouterShape(64, 2048, 6, Scoring("softmax")),
    "deepseek-v2": RouterShape(160, 5120, 6, Scoring("softmax", 8, 3, 16.0)),
    "deepseek-v3": RouterShape(256, 7168, 8, Scoring("sigmoid", 8, 4, 2.5), True),
    "gpt-oss-120b": RouterShape(128, 2880, 4),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--only", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,16,32,64,128,256,512")
    parser.add_argument("--variants", default="all", help="or none: only what is chosen")
    arguments = parser.parse_args()
    names, counts = arguments.only.split(","), [int(count) for count in arguments.tokens.split(",")]
    all_variants = arguments.variants == "all"
    harness.compile_ahead(small_calls(names, counts, all_variants))
    figures: dict[str, Any] = {}
    for name in names:
        shape = SHAPES[name]
        nbytes = shape.experts * shape.hidden * 2
        copies = [torch.randn(shape.experts, shape.hidden, device="cuda", dtype=torch.bfloat16) / 8]
        copies += [copies[0].clone() for _ in range(min(MOST_COPIES, COLD // nbytes))]
        for count in counts:
            row = figures[f"{name} T={count}"] = measure(shape, copies, count, all_variants)
            best = sorted((us, label) for label, us in row.items() if isinstance(us, float) and label[0] == "(")[:3]
            print(f"{name:18} T={count:<5} torch {row['torch']}  chosen {row.get('chosen')}  best {best}", flush=True)
            for label, fault in row.items():
                if isinstance(fault, str):
                    print("   ", label, fault, flush=True)
        harness.write("kernels_router", figures, arguments.out)
    return 0


def variants(tokens: int, shape: RouterShape) -> Iterator[RouterTiling]:
    sides, blocks, numbers = (16, 32, 64, 128), (128, 256), (1, 2, 4, 8)
    for tile, rows, block, tiles, warps in itertools.product(sides, sides, blocks, numbers, (4, 8)):
        splits = -(-shape.hidden // (block * tiles))
        programs = -(-tokens // tile) * -(-shape.experts // rows) * splits
        fits = tile < 2 * max(16, tokens) and rows < 2 * max(16, shape.experts)
        registers = (tile + rows) * block <= 16384 * warps // 4 and (warps == 4 or tile * rows >= 4096)
        if fits and registers and 24 <= programs <= 300 and splits <= 32:
            yield RouterTiling(tile, rows, block, tiles, warps)


def by_torch(shape: RouterShape, x: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
    logits = kernels.linear(x, weight) if shape.scoring is None else kernels.linear_fp32(x, weight)
    return choice(shape, x, logits, bias)


def by_parts(shape: RouterShape, x: Tensor, bias: Tensor | None, tiling: RouterTiling, weight: Tensor) -> Tensor:
    dtype = x.dtype if shape.scoring is None else torch.float32
    return choice(shape, x, RouterLogits(router_gemm(x, weight, tiling), None, dtype), bias)


def choice(shape: RouterShape, x: Tensor, logits: Tensor | RouterLogits, bias: Tensor | None) -> Tensor:
    return topk_softmax(
        logits, x, shape.top_k, experts=shape.experts, renormalize=True, first=0, local_experts=shape.experts,
        scoring=shape.scoring, bias=bias,
    )[0].ids  # fmt: skip


def small_calls(names: list[str], counts: list[int], all_variants: bool) -> Iterator[Callable[[], Any]]:
    for name, count in itertools.product(names, counts):
        shape = SHAPES[name]
        x = torch.zeros(count, shape.hidden, device="cuda", dtype=torch.bfloat16)
        weight = torch.zeros(shape.experts, shape.hidden, device="cuda", dtype=torch.bfloat16)
        bias = torch.zeros(shape.experts, device="cuda") if shape.biased else None
        chosen = heuristics.select_router(count, shape.experts)
        for tiling in (*(variants(count, shape) if all_variants else ()), *([chosen] if chosen else ())):
            yield partial(by_parts, shape, x, bias, tiling, weight)
        yield partial(by_torch, shape, x, bias, weight)


def measure(shape: RouterShape, copies: list[Tensor], count: int, all_variants: bool) -> dict[str, float | str]:
    x = torch.randn(count, shape.hidden, device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(shape.experts, device="cuda") if shape.biased else None
    wanted = x.double() @ copies[0].double().T
    row: dict[str, float | str] = {"torch": timed(partial(by_torch, shape, x, bias), copies)}
    chosen = heuristics.select_router(count, shape.experts)
    tilings = {"chosen": chosen} if chosen else {}
    tilings |= {str(tuple(each)): each for each in (variants(count, shape) if all_variants else ())}
    for label, tiling in tilings.items():
        try:
            error = (router_gemm(x, copies[0], tiling).sum(0) - wanted).abs().max().item()
            row[label] = f"wrong: {error:.1e}" if not error < 1e-2 else timed(partial(by_parts, shape, x, bias, tiling), copies)
        except Exception as fault:  # a variant that this GPU cannot run is reported, and the others go on
            row[label] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
    return row


def timed(call: Callable[[Tensor], Any], copies: list[Tensor]) -> float:
    return round(harness.graph_us([partial(call, weight) for weight in copies], replays=REPLAYS, discarded=1), 2)


if __name__ == "__main__":
    sys.exit(main())
