# SPDX-License-Identifier: Apache-2.0
"""GEMM kernels and their tilings beside torch's, and the kernels that read GEMM outputs, on one GPU: shapes of Llama-3-70B in FP8
(TP4, TP2) and of 8B in bf16.

one: one token; TB/s are of the weight. torch: row-wise (scales by row and column) against tensor-wise (without scales); TB/s of the
weight up to 128 tokens, PFLOP/s beyond. chain: the same two with the kernel that reads the output, which applies the scales, or
with one that does where no reader does. rows: the readers alone, by how their programs are tiled; TB/s of what they read and write.

Each variant is verified (GEMMs against the sum in fp64, fp32 for many tokens), then timed in a CUDA graph over enough copies of
the weight that none is in a cache: median of 9 replays.

    python -m benchmarks.kernels.gemm --out DIR [--parts one,torch,chain,rows] [--shapes tp4,tp2,8b] [--tokens 8,64]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from phalanx.kernels import reference
from phalanx.kernels.gemm.apply_scales import apply_scales
from phalanx.kernels.gemm.gemv import gemv
from phalanx.kernels.gemm.gemv_fp8 import gemv_fp8
from phalanx.kernels.gemm.heuristics import GEMV_QUANT_MAX_INPUTS, GemvTiling
from phalanx.kernels.ops import quantize_fp8, rope_kv_cache, silu_and_mul
from phalanx.kernels.scaled_tensors import Unscaled

SHAPES = {name: harness.SHAPES[name] for name in ("tp4", "tp2")} | {"8b": {**harness.SHAPES["8b"], "head": harness.LM_HEAD_8B}}
HEAD_DIM = 128
COLD = 400 << 20
REPLAYS = 9
WRONG = 5e-3
"""Of the output's norm; rounding to bf16 makes about 1.7e-3."""
WRONG_FP8 = 5e-2
"""Of outputs in e4m3: a value next to a rounding bound is off by 6 to 12 percent of itself."""
FEW = 128
"""The most tokens for which reading the weight bounds the time."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

GEMV_FP8 = [
    GemvTiling(4, 2048, 4), GemvTiling(4, 2048, 2), GemvTiling(2, 4096, 4), GemvTiling(2, 4096, 2), GemvTiling(2, 8192, 4),
    GemvTiling(1, 8192, 4), GemvTiling(2, 16384, 8),
]  # fmt: skip
GEMV = [GemvTiling(1, 2048, 4), GemvTiling(2, 2048, 4), GemvTiling(1, 4096, 4), GemvTiling(2, 16384, 16)]


class Candidate(NamedTuple):
    """act: from one of the case's tensors, such as a weight, to the output."""

    act: Callable[[Tensor], Tensor]
    wanted: Tensor
    wrong: float = WRONG


class Case(NamedTuple):
    """Some candidates on the same tensors. work: bytes / 1e6 (TB/s), or operations / 1e9 (PFLOP/s), of one act."""

    tensors: list[Tensor]
    work: float
    candidates: dict[str, Candidate]


class Gemm(NamedTuple):
    """x [T, in] and the copies of weight [out, in], both with scales where they are in e4m3. fp32: the output without scales;
    wanted: with them."""

    x: Tensor
    rows: Tensor
    weights: list[Tensor]
    columns: Tensor
    fp32: Tensor
    wanted: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--parts", default="one,torch,chain,rows")
    parser.add_argument("--shapes", default="tp4,tp2,8b")
    parser.add_argument("--tokens", default="8,64,128,256,512,1024,8192")
    arguments = parser.parse_args()
    tokens = [int(count) for count in arguments.tokens.split(",")]
    figures: dict[str, Any] = {}
    for part in arguments.parts.split(","):
        begin = time.monotonic()
        for title, case in PARTS[part]([name for name in arguments.shapes.split(",") if name in SHAPES], tokens):
            result = measure(case)
            figures.setdefault(part, {})[title] = result
            print(f"{part:6} {title}")
            for label, row in result.items():
                print(f"         {label:34} {f'{row[0]:9.2f} us {row[1]:7.3f}' if isinstance(row, list) else row}", flush=True)
        figures.setdefault(part, {})["seconds"] = round(time.monotonic() - begin, 1)
        harness.write("kernels_gemm", figures, arguments.out)
        print(f"{part}: {figures[part]['seconds']} s", flush=True)
    return 0


def one(shapes: list[str], _: list[int]) -> Iterator[tuple[str, Case]]:
    for shape in shapes:
        for name, size in SHAPES[shape].items():
            p = make(shape != "8b", 1, size)
            yield f"{shape} {name} {size}", Case(p.weights, p.weights[0].nbytes / 1e6, dict(gemv_candidates(p)))


def gemv_candidates(p: Gemm) -> Iterator[tuple[str, Candidate]]:
    if p.x.dtype == BF16:
        yield "torch", Candidate(lambda w: F.linear(p.x, w), p.wanted)
        for tiling in GEMV:
            yield f"{tuple(tiling)}", Candidate(partial(gemv, p.x, **tiling._asdict()), p.wanted)
        return
    yield "torch", Candidate(partial(row_wise, p), p.wanted)
    x16 = (p.x.float() * p.rows).to(BF16)
    for tiling in GEMV_FP8:
        act = partial(gemv_fp8, scale=p.columns, dtype=BF16, tiling=tiling)
        yield f"{tuple(tiling)}", Candidate(partial(act, p.x, p.rows), p.wanted)
        if p.x.shape[1] <= GEMV_QUANT_MAX_INPUTS:
            yield f"{tuple(tiling)} quantizing", Candidate(partial(act, x16, None), p.wanted, WRONG_FP8)


def cublas(shapes: list[str], tokens: list[int]) -> Iterator[tuple[str, Case]]:
    for shape in set(shapes) & {"tp4"}:
        for count in tokens:
            for name, size in SHAPES[shape].items():
                p = make(True, count, size)
                candidates = {
                    "row-wise": Candidate(partial(row_wise, p), p.wanted),
                    "tensor-wise": Candidate(partial(read_as, itemgetter(0), sums, p), p.fp32),
                }
                yield f"{shape} {name} {size} T={count}", Case(p.weights, work(p), candidates)


def chain(shapes: list[str], tokens: list[int]) -> Iterator[tuple[str, Case]]:
    for shape in [name for name in shapes if name != "8b"]:
        for count in [count for count in tokens if count <= 1024]:
            for name, size in SHAPES[shape].items():
                p = make(True, count, size)
                read, wanted, wrong = reader(name, p)
                candidates = {
                    "row-wise": Candidate(partial(read_as, read, row_wise, p), wanted, wrong),
                    "sums": Candidate(partial(read_as, read, sums, p), wanted, wrong),
                }
                yield f"{shape} {name} {size} T={count}", Case(p.weights, work(p), candidates)


def read_as(read: Callable[[Any], Tensor], multiply: Callable[[Gemm, Tensor], Any], p: Gemm, weight: Tensor) -> Tensor:
    return read(multiply(p, weight))


def reader(name: str, p: Gemm) -> tuple[Callable[[Tensor | Unscaled], Tensor], Tensor, float]:
    """The kernel that reads the output in a model, its own output, and how far that may be off."""
    if name == "gate_up":
        wanted = reference.silu_mul_quant_fp8(p.wanted.to(BF16))[0]
        return lambda output: silu_and_mul.silu_mul_quant_fp8(output)[0], wanted, WRONG_FP8
    if name == "qkv":
        rotated = roped(len(p.x), p.wanted.shape[1] // HEAD_DIM)
        wanted = rotated(reference.rope_store, p.wanted.to(BF16))
        return partial(rotated, rope_kv_cache.rope_store), wanted, 2 * WRONG
    return lambda output: apply_scales(output) if isinstance(output, Unscaled) else output, p.wanted, WRONG


def roped(tokens: int, heads: int) -> Callable[[Callable[..., Tensor], Tensor | Unscaled], Tensor]:
    """From (rope_store, QKV output) to the queries, with a fifth of the heads for keys and values."""
    kv_heads = max(1, heads // 10)
    angles, slots = torch.rand(tokens, HEAD_DIM // 2, device="cuda") * 7, torch.arange(tokens, device="cuda")
    caches = [torch.zeros(-(-tokens // 16), 16, kv_heads, HEAD_DIM, device="cuda", dtype=BF16) for _ in range(2)]
    cos, sin = angles.cos(), angles.sin()

    def act(rope_store: Callable[..., Tensor], qkv: Tensor | Unscaled) -> Tensor:
        return rope_store(qkv.view(tokens, heads, HEAD_DIM), cos, sin, *caches, slots, heads - 2 * kv_heads)

    return act


def rows(shapes: list[str], tokens: list[int]) -> Iterator[tuple[str, Case]]:
    for shape in [name for name in shapes if name != "8b"]:
        (width, hidden), qkv = SHAPES[shape]["gate_up"], SHAPES[shape]["qkv"][0]
        for count in tokens:
            gate_up, x = (torch.randn(count, size, device="cuda", dtype=BF16) for size in (width, hidden))
            wanted = reference.silu_mul_quant_fp8(gate_up)[0]
            gated = {
                f"{warps} warps": Candidate(partial(cut, silu_and_mul, "column_warps", warps, gated_rows), wanted, WRONG_FP8)
                for warps in (4, 8, 16, 32)
            }
            yield f"{shape} silu_mul_quant_fp8 {width} T={count}", Case([gate_up] * 8, 1.25 * gate_up.nbytes / 1e6, gated)
            wanted = reference.quantize_fp8(x)[0]
            plain = {
                f"{warps} warps": Candidate(partial(cut, quantize_fp8, "column_warps", warps, quantized_rows), wanted)
                for warps in (4, 8, 16, 32)
            }
            yield f"{shape} quantize_fp8 {hidden} T={count}", Case([x] * 8, 1.5 * x.nbytes / 1e6, plain)
            output = torch.randn(count, qkv, device="cuda", dtype=BF16)
            act = roped(count, qkv // HEAD_DIM)
            wanted = act(reference.rope_store, output)
            rotated_variants = {
                f"{heads} heads": Candidate(partial(rotated_rows, heads, partial(act, rope_kv_cache.rope_store)), wanted)
                for heads in (4, 8, 16, 32)
            }
            yield f"{shape} rope_store {qkv} T={count}", Case([output] * 8, 2.0 * output.nbytes / 1e6, rotated_variants)


def cut(module: Any, name: str, warps: int, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with mock.patch.object(module, name, return_value=warps):
        return act(x)


def gated_rows(gate_up: Tensor) -> Tensor:
    return silu_and_mul.silu_mul_quant_fp8(gate_up)[0]


def quantized_rows(x: Tensor) -> Tensor:
    return quantize_fp8.quantize_fp8(x)[0]


def rotated_rows(heads: int, act: Callable[[Tensor], Tensor], qkv: Tensor) -> Tensor:
    with mock.patch.object(rope_kv_cache, "rope_heads", return_value=heads):
        return act(qkv)


PARTS: dict[str, Callable[[list[str], list[int]], Iterator[tuple[str, Case]]]] = {
    "one": one, "torch": cublas, "chain": chain, "rows": rows,
}  # fmt: skip


def make(fp8: bool, tokens: int, size: tuple[int, int]) -> Gemm:
    outputs, inputs = size
    torch.manual_seed(0)
    x, first = torch.randn(tokens, inputs, device="cuda"), torch.randn(outputs, inputs, device="cuda", dtype=BF16)
    by_row, by_column = torch.ones(tokens, 1, device="cuda"), torch.ones(outputs, device="cuda")
    if fp8:
        x, by_row = reference.quantize_fp8(x)
        by_column = torch.rand(outputs, device="cuda") / 16 + 0.05
        first = (first * 16).to(FP8)
    else:
        x = x.to(BF16)
    exact = torch.float64 if tokens <= FEW // 2 else torch.float32
    fp32 = (x.to(exact) @ first.to(exact).t()).float()
    copies = [first.clone() for _ in range(max(1, COLD // first.nbytes))]
    return Gemm(x, by_row, [first, *copies], by_column, fp32, fp32 * by_row * by_column)


def work(p: Gemm) -> float:
    weight = p.weights[0]
    return weight.nbytes / 1e6 if len(p.x) <= FEW else 2.0 * len(p.x) * weight.numel() / 1e9


def row_wise(p: Gemm, weight: Tensor) -> Tensor:
    return torch._scaled_mm(p.x, weight.t(), p.rows, p.columns.view(1, -1), out_dtype=BF16, use_fast_accum=True)


def sums(p: Gemm, weight: Tensor) -> Unscaled:
    return Unscaled(torch._scaled_mm(p.x, weight.t(), UNIT, UNIT, out_dtype=BF16, use_fast_accum=True), p.rows, p.columns)


UNIT = torch.ones((), device="cuda" if torch.cuda.is_available() else "cpu")


def measure(case: Case) -> dict[str, Any]:
    """Of each candidate: microseconds, TB/s or PFLOP/s, and the relative error; or what is wrong with it."""
    harness.compile_ahead(partial(candidate.act, case.tensors[0]) for candidate in case.candidates.values())
    result: dict[str, Any] = {}
    for label, candidate in case.candidates.items():
        try:
            error = off(candidate.act(case.tensors[0]), candidate.wanted)
            if not error < candidate.wrong:
                result[label] = f"wrong: {error:.1e}"
                continue
            microseconds = seconds(candidate.act, case.tensors) * 1e6
            result[label] = [round(microseconds, 2), round(case.work / microseconds, 3), float(f"{error:.1e}")]
        except Exception as fault:  # a variant that this GPU cannot run is reported, and the others go on
            result[label] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
    return result


def off(result: Tensor, wanted: Tensor) -> float:
    difference, size = result.float() - wanted.float(), wanted.float()
    return float(difference.norm() / size.norm())


def seconds(act: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> float:
    """For one call, in a graph of one for each tensor."""
    return harness.graph_us([partial(act, tensor) for tensor in tensors], replays=REPLAYS) / 1e6


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(status)
