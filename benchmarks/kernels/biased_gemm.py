# SPDX-License-Identifier: Apache-2.0
"""The experts of gpt-oss behind their router's GEMM on one GPU: choice, sort, both GEMMs and the weighted sum, in MXFP4 and bf16.

Figures: [microseconds, TB/s of the weights of the experts that have tokens, TFLOP/s], by shape, weights and tokens. Timed in a CUDA
graph over copies of the weights that no cache holds, with routing drawn on the device, uniform. --sweep: each GEMM alone, with
several tilings: microseconds, the fastest first; one whose values differ from the rule's ends the run.

    python -m benchmarks.kernels.biased_gemm --out DIR [--only gpt-oss-120b] [--tokens 1,64,1024] [--weights mxfp4,bf16] [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import BIASED_EXPERT_SHAPES, ExpertShape
from phalanx.config.experts import ClampedSwiGlu
from phalanx.kernels.capabilities import gpu
from phalanx.kernels.moe import biased_heuristics, dispatch, heuristics
from phalanx.kernels.moe.heuristics import BLOCK_K, ExpertTiling
from phalanx.kernels.moe.tensors import ExpertTensors, TrafficPattern

COLD = 256 << 20
"""Bytes of weights that are read before any is read again, at least: an H200's L2 cache has 60 MiB."""
REPLAYS = 7
SCALE = 120
"""Of all blocks: a GEMM's outputs are about as large as its inputs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--only", default="gpt-oss-120b,gpt-oss-120b-tp4")
    parser.add_argument("--tokens", default="1,8,64,512,4096")
    parser.add_argument("--weights", default="mxfp4", help="of mxfp4, bf16")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    names, counts = arguments.only.split(","), [int(count) for count in arguments.tokens.split(",")]
    device, figures = torch.device("cuda"), dict[str, Any]()
    for name, weights in itertools.product(names, arguments.weights.split(",")):
        figures[f"{name} {weights}"] = layer_rows(BIASED_EXPERT_SHAPES[name], weights, counts, device)
        print(name, weights, figures[f"{name} {weights}"], flush=True)
        for count in counts if arguments.sweep else ():
            for gated in (True, False):
                rows = sweep(BIASED_EXPERT_SHAPES[name], weights, count, gated, device)
                figures[f"{name} {weights} T={count} {'gate_up' if gated else 'down'}"] = rows
                print(name, weights, count, gated, rows[:4], flush=True)
    harness.write("kernels_biased_gemm", figures, arguments.out)
    return 0


def random_experts(shape: ExpertShape, weights: str, device: torch.device) -> ExpertTensors:
    sizes = (shape.experts * 2 * shape.inner, shape.hidden), (shape.experts * shape.hidden, shape.inner)
    biases = [torch.randn(rows, device=device).bfloat16() for rows, _ in sizes]
    parts: list[Tensor] = []
    for rows, columns in sizes:
        if weights == "mxfp4":
            parts.append(torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device))
            parts.append(torch.full((rows, -(-columns // BLOCK_K) * 4), SCALE, dtype=torch.uint8, device=device))
        else:
            parts.append(torch.randn(rows, columns, dtype=torch.bfloat16, device=device) / columns**0.5)
    gate_up, *first, down, second = parts if weights == "mxfp4" else (parts[0], parts[1], None)
    return ExpertTensors(
        shape.experts, 0, gate_up, down, first[0] if first else None, second, gate_up_bias=biases[0], down_bias=biases[1],
        swiglu=ClampedSwiGlu(1.702, 7.0),
    )  # fmt: skip


def layer_rows(shape: ExpertShape, weights: str, counts: list[int], device: torch.device) -> dict[str, list[float]]:
    """Tokens -> [us, TB/s, TFLOP/s]."""
    pattern = TrafficPattern.power_law(shape.experts, 0.0, 0, device)
    options: dict[str, Any] = {"top_k": shape.top_k, "num_experts": shape.experts, "renormalize": True, "pattern": pattern}
    copies, rows = [random_experts(shape, weights, device)], dict[str, list[float]]()
    nbytes = sum(each.nbytes for each in tensors_of(copies[0]))
    for count in counts:
        xs = [torch.randn(count, shape.hidden, device=device).bfloat16() for _ in range(8)]
        chosen = [dispatch.routed_experts(x, None, copies[0], **options)[1].ids.unique().numel() for x in xs]
        touched = nbytes * sum(chosen) / len(chosen) / shape.experts
        while len(copies) < len(xs) and len(copies) * touched < COLD:
            copies.append(random_experts(shape, weights, device))
        calls = [
            partial(dispatch.routed_experts, x, None, copies[i % len(copies)], **options) for i, x in enumerate(xs)
        ]  # fmt: skip
        us = harness.graph_us(calls, replays=REPLAYS, discarded=1)
        flops = 6.0 * count * shape.top_k * shape.hidden * shape.inner
        rows[str(count)] = [round(us, 2), round(touched / us / 1e6, 3), round(flops / us / 1e6, 1)]
    return rows


def tensors_of(experts: ExpertTensors) -> list[Tensor]:
    """Weights and scales."""
    every = experts.gate_up, experts.down, experts.gate_up_scale, experts.down_scale
    return [each for each in every if each is not None]


# ---- tilings ---------------------------------------------------------------------------------------------------------


def candidates(tokens: int, gated: bool) -> Iterator[ExpertTiling]:
    for rows, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 6)):
        if tokens >= 64 and (warps == 2 or (gated and rows == 128 and warps == 4)):
            continue  # spills
        for parts in (1,) if gated or tokens > 32 else (1, 2, 4):
            yield ExpertTiling(rows, tokens, warps, stages, 4 if tokens <= 32 else 8, parts)


def sweep(shape: ExpertShape, weights: str, count: int, gated: bool, device: torch.device) -> list[list[Any]]:
    """[us, the tiling] of each that the GPU can launch, the fastest first."""
    from triton.runtime.errors import OutOfResources

    from phalanx.kernels.moe.biased_gemm import biased_gemm
    from phalanx.kernels.moe.sort_by_expert import sort_by_expert

    experts = [random_experts(shape, weights, device) for _ in range(2)]
    size, hardware = heuristics.tokens_of_tile(count, shape.top_k, shape.experts), gpu(device)
    busy = min(shape.experts, count * shape.top_k)
    outputs, inputs = (shape.inner, shape.hidden) if gated else (shape.hidden, shape.inner)
    rule = biased_heuristics.select(
        busy, size, outputs, inputs, gated=gated, mxfp4=weights == "mxfp4", num_sms=hardware.num_sms, sm=hardware.sm
    )
    ids = torch.rand(count, shape.experts, device=device).argsort(1)[:, : shape.top_k].to(torch.int32).contiguous()
    tiles = sort_by_expert(ids, first=0, experts=shape.experts, tokens=size)
    x = torch.randn(count if gated else ids.numel(), inputs, device=device).bfloat16()

    def launch(tiling: ExpertTiling, which: int) -> Tensor:
        each = experts[which]
        operands = (
            (each.gate_up, each.gate_up_scale, each.gate_up_bias) if gated else (each.down, each.down_scale, each.down_bias)
        )  # fmt: skip
        return biased_gemm(
            x, *operands, tiles, tiling, top_k=shape.top_k, experts=shape.experts, gated=gated, swiglu=each.swiglu
        )  # fmt: skip

    def values(tiling: ExpertTiling) -> Tensor:
        output = launch(tiling, 0).float()
        return output if gated else output.sum(0)

    wanted, timed = values(rule), list[list[Any]]()
    for tiling in dict.fromkeys([rule, *candidates(size, gated)]):
        try:
            error = float((values(tiling) - wanted).norm() / wanted.norm())
        except OutOfResources:
            continue
        if not error < 1e-2:
            raise SystemExit(f"{tiling} gives other values than {rule}: relative error {error}")
        us = harness.graph_us([partial(launch, tiling, which) for which in (0, 1)], replays=REPLAYS, discarded=1)
        timed.append([round(us, 2), "rule" if tiling == rule else "", *tiling])
    return sorted(timed)


if __name__ == "__main__":
    sys.exit(main())
