# SPDX-License-Identifier: Apache-2.0
"""Every product kernel and its variants beside torch's, on one GPU: shapes of Llama-3-70B in FP8 (TP4, TP2) and of 8B in bf16.

fp8, sixteen: up to 64 tokens, where the weight's bytes are the time; TB/s are of the weight. many: 128 tokens and more; PFLOP/s.
Each variant is verified against the sum in fp64 (fp32 for many rows), then timed in a CUDA graph over enough copies of the weight
that none is in a cache: median of 9 replays.

    python benchmarks/kernels/products.py --out DIR [--parts fp8,sixteen,many] [--shapes tp4,tp2] [--tokens 1,8,64]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

from benchmarks import record
from phalanx.kernels import reference
from phalanx.kernels.products.choice import WIDEST_TO_QUANTIZE, OneRow
from phalanx.kernels.products.one_row import one_row
from phalanx.kernels.products.one_row_fp8 import one_row_fp8

SHAPES = {
    "tp4": {"qkv": (2560, 8192), "o": (8192, 2048), "gate_up": (14336, 8192), "down": (8192, 7168)},
    "tp2": {"qkv": (5120, 8192), "o": (8192, 4096), "gate_up": (28672, 8192), "down": (8192, 14336)},
    "tp1": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)},
}
COLD = 600 << 20
REPLAYS = 9
WRONG = 5e-3
"""Of the norm; rounding to bf16 makes about 1.7e-3."""
BF16 = torch.bfloat16

FEW = 64
"""The most tokens for which a weight's bytes are the time."""

ONE_ROW_FP8 = [
    OneRow(4, 2048, 4), OneRow(4, 2048, 2), OneRow(2, 4096, 4), OneRow(2, 4096, 2), OneRow(2, 8192, 4), OneRow(1, 8192, 4),
    OneRow(2, 16384, 8),
]  # fmt: skip
ONE_ROW = [OneRow(1, 2048, 4), OneRow(2, 2048, 4), OneRow(1, 4096, 4), OneRow(2, 16384, 16)]


class Product(NamedTuple):
    """x [T, in] and the copies of weight [out, in], both with scales where they are in e4m3; wanted: their product."""

    x: Tensor
    x_scale: Tensor | None
    weights: list[Tensor]
    scale: Tensor | None
    wanted: Tensor
    wide: Tensor


Candidate = Callable[[Tensor], Tensor]
"""From a weight to the product."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--parts", default="fp8,sixteen,many")
    parser.add_argument("--shapes", default="tp4,tp2")
    parser.add_argument("--layers", default="qkv,o,gate_up,down,head")
    parser.add_argument("--tokens", default="1,8,64,128,256,512,8192")
    asked = parser.parse_args()
    parts, tokens = asked.parts.split(","), [int(count) for count in asked.tokens.split(",")]
    few = [count for count in tokens if count <= FEW]
    jobs = [("fp8", shapes, True, count) for shapes in asked.shapes.split(",") for count in few if "fp8" in parts]
    jobs += [("sixteen", "8b", False, count) for count in few if "sixteen" in parts]
    jobs += [("many", "tp4", True, count) for count in tokens if count not in few and "many" in parts]
    figures: dict[str, Any] = {}
    print(f"{'part':8} {'shape':12} {'T':>5}  {'best variant':44} {'us':>8} {'rate':>6}   {'torch':>8} {'tensor':>8}")
    with ThreadPoolExecutor(12) as pool:
        for part, shapes, fp8, count in jobs:
            for name, size in SHAPES[shapes].items():
                if name in asked.layers.split(","):
                    found = measure(pool, part, fp8, count, size)
                    figures.setdefault(part, {})[f"{shapes} {name} {size} T={count}"] = found
                    print(line(part, f"{shapes} {name}", count, found), flush=True)
            record.write("kernels_products", figures, asked.out)
    return 0


def line(part: str, shape: str, tokens: int, found: dict[str, Any]) -> str:
    timed = {label: row for label, row in found.items() if isinstance(row, list)}
    best = min((label for label in timed if not label.startswith("torch")), key=lambda label: timed[label][0], default="-")
    ours, torchs = timed.get(best, [0.0, 0.0]), [timed.get(label, [0.0])[0] for label in ("torch", "torch tensor")]
    faults = [f"\n    {label}: {row}" for label, row in found.items() if not isinstance(row, list)]
    text = f"{part:8} {shape:12} {tokens:5}  {best:44} {ours[0]:8.2f} {ours[1]:6.2f}   {torchs[0]:8.2f} {torchs[1]:8.2f}"
    return text + "".join(faults)


def measure(pool: ThreadPoolExecutor, part: str, fp8: bool, tokens: int, size: tuple[int, int]) -> dict[str, Any]:
    """Of each candidate: microseconds, TB/s or PFLOP/s, and the relative error; or what is wrong with it."""
    product = make(fp8, tokens, size)
    candidates = dict(in_fp8(product) if fp8 else in_sixteen(product))
    compile_ahead(pool, list(candidates.values()), product.weights[0])
    work = 2.0 * tokens * size[0] * size[1] / 1e9 if part == "many" else product.weights[0].nbytes / 1e6
    found: dict[str, Any] = {}
    for label, candidate in candidates.items():
        try:
            error = off(candidate(product.weights[0]), product.wide if label == "torch tensor" else product.wanted)
            if not error < WRONG:
                found[label] = f"wrong: {error:.1e}"
                continue
            microseconds = seconds(candidate, product.weights) * 1e6
            found[label] = [round(microseconds, 2), round(work / microseconds, 3), float(f"{error:.1e}")]
        except Exception as fault:  # a variant that this GPU cannot run is reported, and the others go on
            found[label] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
    return found


def make(fp8: bool, tokens: int, size: tuple[int, int]) -> Product:
    outputs, inputs = size
    torch.manual_seed(0)
    x, first = torch.randn(tokens, inputs, device="cuda"), torch.randn(outputs, inputs, device="cuda", dtype=BF16)
    x_scale = scale = None
    if fp8:
        x, x_scale = reference.quantize_fp8(x)
        scale = torch.rand(outputs, device="cuda") + 0.5
        first = (first * 16).to(torch.float8_e4m3fn)
    else:
        x = x.to(BF16)
    exact = torch.float64 if tokens <= 64 else torch.float32
    wide = x.to(exact) @ first.to(exact).t()
    wanted = wide * x_scale * scale if x_scale is not None and scale is not None else wide
    copies = [first.clone() for _ in range(max(1, COLD // first.nbytes))]
    return Product(x, x_scale, [first, *copies], scale, wanted.float(), wide.float())


def in_fp8(p: Product) -> Iterator[tuple[str, Candidate]]:
    yield from torchs_fp8(p)
    if len(p.x) > 1:
        return
    assert p.scale is not None
    assert p.x_scale is not None
    x16 = (p.x.float() * p.x_scale).to(BF16)
    for tiling in ONE_ROW_FP8:
        call = partial(one_row_fp8, scale=p.scale, dtype=BF16, tiling=tiling)
        yield f"one row {tuple(tiling)}", partial(call, p.x, p.x_scale)
        if p.x.shape[1] <= WIDEST_TO_QUANTIZE:
            yield f"quantizing row {tuple(tiling)}", partial(call, x16, None)


def in_sixteen(p: Product) -> Iterator[tuple[str, Candidate]]:
    yield "torch", lambda w: F.linear(p.x, w)
    for tiling in ONE_ROW if len(p.x) == 1 else ():
        yield f"one row {tuple(tiling)}", partial(one_row, p.x, **tiling._asdict())


def torchs_fp8(p: Product) -> Iterator[tuple[str, Candidate]]:
    """Row-wise, and without scales: those would be one more kernel."""
    assert p.scale is not None
    assert p.x_scale is not None
    columns, rows, one = p.scale.view(1, -1), p.x_scale, torch.ones((), device="cuda")
    mm = partial(torch._scaled_mm, p.x, out_dtype=BF16, use_fast_accum=True)
    yield "torch", lambda w: mm(w.t(), scale_a=rows, scale_b=columns)
    yield "torch tensor", lambda w: mm(w.t(), scale_a=one, scale_b=one)


def compile_ahead(pool: ThreadPoolExecutor, candidates: list[Candidate], weight: Tensor) -> None:
    """All at once: a launch only asks for its kernel here."""

    def ask(kernel: JITFunction[Any], grid: Any) -> Any:
        return partial(kernel.run, grid=grid, warmup=True)

    with mock.patch.object(JITFunction, "__getitem__", ask), AsyncCompileMode(pool, ignore_errors=True):
        for candidate in candidates:
            with contextlib.suppress(Exception):  # said when it is measured
                candidate(weight)


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def seconds(candidate: Candidate, weights: list[Tensor]) -> float:
    """For one product, in a graph of one with each copy of the weight."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        candidate(weights[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for weight in weights:
                candidate(weight)
        finally:
            graph.capture_end()
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(weights))
    return statistics.median(times)


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(status)
