# SPDX-License-Identifier: Apache-2.0
"""Experts with biases or of 4 bits behind their router's GEMM on one GPU: choice, sort, both GEMMs and the weighted sum, of gpt-oss
in MXFP4 and bf16, of any model in int4 (groups of 32, or of 128: int4-128) and NVFP4.

Figures: [microseconds, TB/s of the weights of the experts that have tokens, TFLOP/s], by shape, weights and tokens. Timed in a CUDA
graph over copies of the weights that no cache holds, with routing drawn on the device, uniform. --sweep: each GEMM alone, with
several tilings, then the fastest of both together with the sum: microseconds, the fastest first; a tiling whose values differ from
the rule's ends the run.

    python -m benchmarks.kernels.biased_gemm --out DIR [--only gpt-oss-120b] [--tokens 1,64,1024] [--weights mxfp4,bf16] [--sweep]
    python -m benchmarks.kernels.biased_gemm --out DIR --only qwen3-30b,mixtral-8x7b --weights int4,int4-128,nvfp4
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
from benchmarks.harness import BIASED_EXPERT_SHAPES, EXPERT_SHAPES, ExpertShape
from phalanx.config.experts import ClampedSwiGlu
from phalanx.kernels.capabilities import gpu
from phalanx.kernels.gemm import int4_packing
from phalanx.kernels.moe import biased_heuristics, dispatch, nvfp4_packing
from phalanx.kernels.moe.heuristics import BLOCK_K, ExpertTiling
from phalanx.kernels.moe.tensors import ExpertChoice, ExpertTensors, Routing, TrafficPattern

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
    parser.add_argument("--weights", default="mxfp4", help="of mxfp4, bf16, int4, int4-128, nvfp4")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tile", type=int, default=0, help="tokens of a tile in a sweep, if not the rule's")
    arguments = parser.parse_args()
    names, counts = arguments.only.split(","), [int(count) for count in arguments.tokens.split(",")]
    device, figures, shapes = torch.device("cuda"), dict[str, Any](), BIASED_EXPERT_SHAPES | EXPERT_SHAPES
    for name, weights in itertools.product(names, arguments.weights.split(",")):
        figures[f"{name} {weights}"] = layer_rows(shapes[name], weights, counts, device)
        print(name, weights, figures[f"{name} {weights}"], flush=True)
        for count in counts if arguments.sweep else ():
            layer = Layer(shapes[name], weights, count, device, arguments.tile)
            both = [sweep(layer, weights, gated) for gated in (True, False)]
            rows = {"gate_up": both[0], "down": both[1], "both": sweep_pairs(layer, *both)}
            figures[f"{name} {weights} T={count} tile={layer.size}"] = rows
            for part, timed in rows.items():
                rule = [row for row in timed if row[1] == "rule"]
                print(name, weights, count, part, *rule, *timed[:4], sep="\n  ", flush=True)
    harness.write("kernels_biased_gemm", figures, arguments.out)
    return 0


def random_experts(shape: ExpertShape, weights: str, device: torch.device) -> ExpertTensors:
    sizes = (shape.experts * 2 * shape.inner, shape.hidden), (shape.experts * shape.hidden, shape.inner)
    if weights not in ("mxfp4", "bf16"):
        gate_up, down = (packed(shape.experts, rows // shape.experts, columns, weights, device) for rows, columns in sizes)
        return ExpertTensors(shape.experts, 0, gate_up.words, down.words, packed=(gate_up, down))
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


def packed(experts: int, outputs: int, inputs: int, weights: str, device: torch.device) -> Any:
    """Random values, whose scales make outputs about as large as inputs, in the memory of an `Int4Weight` or `Nvfp4Weight`."""
    if weights == "nvfp4":
        words, scales, rows = nvfp4_packing.sizes(outputs, inputs)
        codes = torch.randint(0, 256, (experts, *words), dtype=torch.uint8, device=device)
        table = torch.full((experts, *scales), 0x38, dtype=torch.uint8, device=device)  # 1.0
        of_rows = torch.full((experts, *rows), 0.3 / inputs**0.5, device=device)
        return nvfp4_packing.Nvfp4Weight(codes, table, of_rows, outputs, inputs)
    group = 128 if weights.endswith("-128") else 32
    one = int4_packing.packed(
        torch.randint(0, 16, (outputs, inputs), device=device),
        torch.full((outputs, -(-inputs // group)), 0.2 / inputs**0.5, device=device), None, group, torch.bfloat16,
    )  # fmt: skip
    words, scales = (each.expand(experts, *each.shape).contiguous() for each in (one.words, one.scales))
    return one._replace(words=words, scales=scales)


def layer_rows(shape: ExpertShape, weights: str, counts: list[int], device: torch.device) -> dict[str, list[float]]:
    """Tokens -> [us, TB/s, TFLOP/s]."""
    pattern = TrafficPattern.power_law(shape.experts, 0.0, 0, device)
    choice = ExpertChoice(shape.top_k, shape.experts, True, pattern=pattern)
    copies, rows = [random_experts(shape, weights, device)], dict[str, list[float]]()
    nbytes = sum(each.nbytes for each in tensors_of(copies[0]))
    for count in counts:
        xs = [torch.randn(count, shape.hidden, device=device).bfloat16() for _ in range(8)]
        chosen = [dispatch.routed_experts(x, None, copies[0], choice)[1].ids.unique().numel() for x in xs]
        touched = nbytes * sum(chosen) / len(chosen) / shape.experts
        while len(copies) < len(xs) and len(copies) * touched < COLD:
            copies.append(random_experts(shape, weights, device))
        calls = [
            partial(dispatch.routed_experts, x, None, copies[i % len(copies)], choice) for i, x in enumerate(xs)
        ]  # fmt: skip
        us = harness.graph_us(calls, replays=REPLAYS, discarded=1)
        flops = 6.0 * count * shape.top_k * shape.hidden * shape.inner
        rows[str(count)] = [round(us, 2), round(touched / us / 1e6, 3), round(flops / us / 1e6, 1)]
    return rows


def tensors_of(experts: ExpertTensors) -> list[Tensor]:
    """Weights and scales."""
    if experts.packed is not None:
        return [tensor for weight in experts.packed for tensor in weight if isinstance(tensor, Tensor)]
    every = experts.gate_up, experts.down, experts.gate_up_scale, experts.down_scale
    return [each for each in every if each is not None]


# ---- tilings ---------------------------------------------------------------------------------------------------------


def candidates(tokens: int, gated: bool, weights: str) -> Iterator[ExpertTiling]:
    few = tokens <= 16 and weights != "bf16"
    for rows, warps, stages in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 6, 8)):
        if rows * (2 if gated else 1) < 16 * warps or (rows > 64 if few else rows < 32 or warps == 1):
            continue  # an instruction has 16 rows
        if tokens >= 64 and (warps == 2 or (gated and rows == 128 and warps == 4)):
            continue  # spills
        for parts in (1,) if gated or tokens > 32 else (1, 2, 4):
            yield ExpertTiling(rows, tokens, warps, stages, 4 if tokens <= 32 else 8, parts)


class Layer:
    """Calls of the GEMMs of a layer's experts, each with a routing of its own: of few tokens, the experts of all calls together are
    more than the L2 cache holds."""

    def __init__(self, shape: ExpertShape, weights: str, count: int, device: torch.device, tokens: int = 0) -> None:
        from phalanx.kernels.moe.sort_by_expert import sort_by_expert

        self.shape, self.in_4_bits, self.hardware = shape, weights != "bf16", gpu(device)
        self.size = tokens or biased_heuristics.tile_pairs(count, shape.top_k, shape.experts, in_4_bits=self.in_4_bits)
        self.busy, self.experts = min(shape.experts, count * shape.top_k), random_experts(shape, weights, device)
        calls = max(2, min(16, shape.experts // self.busy))
        order = torch.rand(count, shape.experts, device=device).argsort(1).to(torch.int32)
        self.ids = [order.roll(-self.busy * call, 1)[:, : shape.top_k].contiguous() for call in range(calls)]
        self.tiles = [sort_by_expert(ids, first=0, experts=shape.experts, pairs=self.size) for ids in self.ids]
        self.x = torch.randn(count, shape.hidden, device=device).bfloat16()
        self.inner = torch.randn(count * shape.top_k, shape.inner, device=device).bfloat16()
        self.weights = torch.rand(count, shape.top_k, device=device)
        self.out = torch.empty_like(self.x)

    def rule(self, gated: bool) -> ExpertTiling:
        outputs, inputs = (self.shape.inner, self.shape.hidden) if gated else (self.shape.hidden, self.shape.inner)
        return biased_heuristics.select(
            self.busy, self.size, outputs, inputs, gated=gated, in_4_bits=self.in_4_bits, num_sms=self.hardware.num_sms,
            sm=self.hardware.sm,
        )  # fmt: skip

    def gemm(self, tiling: ExpertTiling, gated: bool, call: int, x: Tensor | None = None) -> Tensor:
        from phalanx.kernels.moe.biased_gemm import biased_gemm

        each, x = self.experts, x if x is not None else self.x if gated else self.inner
        gate_up, down = each.packed or (each.gate_up, each.down)
        operands = (gate_up, each.gate_up_scale, each.gate_up_bias) if gated else (down, each.down_scale, each.down_bias)
        return biased_gemm(
            x, *operands, self.tiles[call], tiling, top_k=self.shape.top_k, experts=self.shape.experts,
            activation=each.activation if gated else "", swiglu=each.swiglu,
        )  # fmt: skip

    def both(self, first: ExpertTiling, second: ExpertTiling, call: int) -> Tensor:
        """And the weighted sum."""
        from phalanx.kernels.moe.combine import combine

        sums = self.gemm(second, False, call, self.gemm(first, True, call))
        routing = Routing(self.weights, self.ids[call])
        return combine(sums, routing, first=0, experts=self.shape.experts, out=self.out)

    def us(self, function: Callable[[int], Tensor]) -> float:
        calls = [partial(function, call) for call in range(len(self.ids))]
        return round(harness.graph_us(calls * 2, replays=REPLAYS, discarded=1), 2)


def sweep(layer: Layer, weights: str, gated: bool) -> list[list[Any]]:
    """[us, the tiling] of each that the GPU can launch, the fastest first."""
    from triton.runtime.errors import OutOfResources

    def values(tiling: ExpertTiling) -> Tensor:
        output = layer.gemm(tiling, gated, 0).float()
        return output if gated else output.sum(0)

    rule, timed = layer.rule(gated), list[list[Any]]()
    every = list(dict.fromkeys([rule, *candidates(layer.size, gated, weights)]))
    harness.compile_ahead([partial(values, tiling) for tiling in every])
    wanted = values(rule)
    for tiling in every:
        try:
            error = float((values(tiling) - wanted).norm() / wanted.norm())
        except OutOfResources:
            continue
        if not error < 1e-2:
            raise SystemExit(f"{tiling} gives other values than {rule}: relative error {error}")
        timed.append([layer.us(partial(layer.gemm, tiling, gated)), "rule" if tiling == rule else "", *tiling])
    return sorted(timed)


def sweep_pairs(layer: Layer, first: list[list[Any]], second: list[list[Any]]) -> list[list[Any]]:
    """[us of both GEMMs and the sum, both tilings] of the fastest of each, and of the rule."""
    pairs = [(layer.rule(True), layer.rule(False))]
    for one, other in itertools.product(first[:3], second[:3]):
        pairs.append((ExpertTiling(*one[2:]), ExpertTiling(*other[2:])))
    every = list(dict.fromkeys(pairs))
    harness.compile_ahead([partial(layer.both, *each, 0) for each in every])
    return sorted([layer.us(partial(layer.both, *each)), *each] for each in every)


if __name__ == "__main__":
    sys.exit(main())
