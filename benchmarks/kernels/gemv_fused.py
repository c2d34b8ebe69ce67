# SPDX-License-Identifier: Apache-2.0
"""The ops behind one token's GEMVs, in kernels of their own or fused with the GEMV, on one GPU: shapes of Llama-3-70B in FP8 (TP4,
TP2) and of 8B in bf16.

mlp: gate_up, SiLU, down. In FP8 the label says which kernel quantizes the input of `down`: SiLU's kernel, the down GEMV itself, or
a kernel of its own. qkv: the GEMV, RoPE, keys and values into the cache.

Each variant is verified against plain torch, then timed as by `gemm.py`: in a CUDA graph over enough layers that no weight is in a
cache. TB/s are of the weights. (pairs, block, warps) are those of `heuristics.FusedGemvTiling`.

    python -m benchmarks.kernels.gemv_fused --out DIR [--shapes tp4,tp2,8b]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels.gemm import BF16, COLD, FP8, HEAD_DIM, SHAPES, WRONG, WRONG_FP8, Candidate, Case, measure
from phalanx.kernels import reference
from phalanx.kernels.gemm import gemv_fused_kernels, heuristics
from phalanx.kernels.gemm.gemv import gemv as gemv_16bit
from phalanx.kernels.gemm.gemv_fp8 import gemv_fp8
from phalanx.kernels.gemm.heuristics import FusedGemvTiling, GemvTiling
from phalanx.kernels.ops import quantize_fp8, rope_kv_cache, silu_and_mul
from phalanx.kernels.scaled_tensors import GemvArgs

DEVICE = "cuda"
PAIRS_FP8 = [
    FusedGemvTiling(1, 8192, 4),
    FusedGemvTiling(1, 8192, 8),
    FusedGemvTiling(2, 8192, 8),
    FusedGemvTiling(1, 4096, 4),
    FusedGemvTiling(2, 2048, 4),
]
PAIRS = [
    FusedGemvTiling(1, 2048, 4),
    FusedGemvTiling(2, 2048, 4),
    FusedGemvTiling(1, 4096, 4),
    FusedGemvTiling(1, 4096, 8),
    FusedGemvTiling(2, 1024, 4),
]


class Layer(NamedTuple):
    """The parts common to all copies of the weights. x [1, in] and x_scale: None in bf16. sizes: of the weights, which follow one
    another in a copy's bytes; scales: of each, None in bf16."""

    x: Tensor
    x_scale: Tensor | None
    sizes: tuple[tuple[int, int], ...]
    scales: tuple[Tensor | None, ...]

    def weights(self, copy: Tensor) -> list[Tensor]:
        result, at = [], 0
        for rows, columns in self.sizes:
            result.append(copy[at : at + rows * columns].view(rows, columns))
            at += rows * columns
        return result

    def args(self, copy: Tensor) -> GemvArgs:
        """Of the first GEMV."""
        return GemvArgs(self.x, self.x_scale, self.weights(copy)[0], self.scales[0], None, BF16)

    def gemv(self, x: Tensor, x_scale: Tensor | None, copy: Tensor, at: int) -> Tensor:
        """The GEMV number `at` of x, by the kernel without a fused op."""
        weight, scale = self.weights(copy)[at], self.scales[at]
        tiling = heuristics.select_16bit(1, weight.shape[1]) if scale is None else heuristics.select_fp8(1, *weight.shape)
        assert isinstance(tiling, GemvTiling)
        if scale is None:
            return gemv_16bit(x, weight, **tiling._asdict())
        return gemv_fp8(x, x_scale, weight, scale, dtype=BF16, tiling=tiling)

    def exact(self, x: Tensor, copy: Tensor, at: int) -> Tensor:
        """The same by torch, of x in bf16 or dequantized."""
        weight, scale = self.weights(copy)[at].float(), self.scales[at]
        out = x.float() @ (weight if scale is None else weight * scale[:, None]).t()
        return out.to(BF16)


def make(fp8: bool, *sizes: tuple[int, int]) -> tuple[Layer, list[Tensor]]:
    """A layer, and copies of its weights."""
    torch.manual_seed(0)
    x = torch.randn(1, sizes[0][1], device=DEVICE).to(BF16)
    parts = [torch.randn(rows, columns, device=DEVICE, dtype=BF16) for rows, columns in sizes]
    scales: list[Tensor | None] = [None for _ in sizes]
    x_scale = None
    if fp8:
        x, x_scale = reference.quantize_fp8(x)
        parts = [(part * 16).to(FP8) for part in parts]
        scales = [(torch.rand(rows, device=DEVICE) + 0.5) / (16 * columns**0.5) for rows, columns in sizes]
    else:
        parts = [part / part.shape[1] ** 0.5 for part in parts]
    first = torch.cat([part.flatten().view(torch.uint8) for part in parts]).view(parts[0].dtype)
    copies = [first.clone() for _ in range(max(1, COLD // first.nbytes))]
    return Layer(x, x_scale, sizes, tuple(scales)), [first, *copies]


def mlp(shape: str) -> Case:
    fp8 = shape != "8b"
    layer, copies = make(fp8, SHAPES[shape]["gate_up"], SHAPES[shape]["down"])
    x = layer.x if layer.x_scale is None else layer.x.float() * layer.x_scale
    inner = reference.silu_mul(layer.exact(x, copies[0], 0))
    if fp8:
        values, scale = reference.quantize_fp8(inner)
        inner = values.float() * scale
    wanted, wrong = layer.exact(inner, copies[0], 1), WRONG_FP8 if fp8 else 2 * WRONG

    def apart(copy: Tensor) -> Tensor:
        gate_up = layer.gemv(layer.x, layer.x_scale, copy, 0)
        if fp8:
            return layer.gemv(*silu_and_mul.silu_mul_quant_fp8(gate_up), copy, 1)
        return layer.gemv(silu_and_mul.silu_mul(gate_up), None, copy, 1)

    def together(tiling: FusedGemvTiling, quantize: bool, copy: Tensor) -> Tensor:
        inner = gemv_fused_kernels.gate_up_silu(layer.args(copy), tiling)
        if quantize:
            return layer.gemv(*quantize_fp8.quantize_fp8(inner), copy, 1)
        return layer.gemv(inner, None, copy, 1)

    result = {"apart": Candidate(apart, wanted, wrong)}
    for tiling in PAIRS_FP8 if fp8 else PAIRS:
        result[f"{tuple(tiling)}" + ", down quantizes" * fp8] = Candidate(partial(together, tiling, False), wanted, wrong)
    if fp8:
        chosen = heuristics.select_fused_gemv(1, layer.x.shape[1], fp8=True)
        assert chosen is not None
        result[f"{tuple(chosen)}, a kernel quantizes"] = Candidate(partial(together, chosen, True), wanted, wrong)
    return Case(copies, copies[0].nbytes / 1e6, result)


def qkv(shape: str) -> Case:
    fp8, (outputs, inputs) = shape != "8b", SHAPES[shape]["qkv"]
    layer, copies = make(fp8, (outputs, inputs))
    heads = outputs // HEAD_DIM
    kv_heads = 8 if shape == "8b" else 8 // int(shape[-1])
    angles, slots = torch.rand(1, HEAD_DIM // 2, device=DEVICE) * 7, torch.zeros(1, dtype=torch.int64, device=DEVICE)
    caches = [torch.zeros(1, 16, kv_heads, HEAD_DIM, device=DEVICE, dtype=BF16) for _ in range(2)]
    place = (angles.cos(), angles.sin(), caches[0], caches[1], slots, heads - 2 * kv_heads)
    x = layer.x if layer.x_scale is None else layer.x.float() * layer.x_scale
    wanted = reference.rope_store(layer.exact(x, copies[0], 0).view(1, heads, HEAD_DIM), *place)

    def apart(copy: Tensor) -> Tensor:
        return rope_kv_cache.rope_store(layer.gemv(layer.x, layer.x_scale, copy, 0).view(1, heads, HEAD_DIM), *place)

    def together(tiling: FusedGemvTiling, copy: Tensor) -> Tensor:
        return gemv_fused_kernels.qkv_rope_store(layer.args(copy), *place, None, tiling)

    result = {"apart": Candidate(apart, wanted, 2 * WRONG)}
    for tiling in PAIRS_FP8 if fp8 else PAIRS:
        result[f"{tuple(tiling)}"] = Candidate(partial(together, tiling), wanted, 2 * WRONG)
    return Case(copies, copies[0].nbytes / 1e6, result)


def cases(shapes: list[str]) -> Iterator[tuple[str, Case]]:
    for shape in shapes:
        yield f"{shape} mlp", mlp(shape)
        yield f"{shape} qkv", qkv(shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--shapes", default="tp4,tp2,8b")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    begin = time.monotonic()
    for title, case in cases(arguments.shapes.split(",")):
        figures[title] = measure(case)
        print(title)
        for label, row in figures[title].items():
            print(f"  {label:34} {f'{row[0]:9.2f} us {row[1]:7.3f} TB/s' if isinstance(row, list) else row}", flush=True)
    figures["seconds"] = round(time.monotonic() - begin, 1)
    print(f"{figures['seconds']} s, kept in {harness.write('kernels_gemv_fused', figures, arguments.out).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
