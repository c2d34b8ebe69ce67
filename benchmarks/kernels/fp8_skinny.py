# SPDX-License-Identifier: Apache-2.0
"""Skinny FP8 GEMMs on one Hopper GPU: `kernels/gemm/fp8_skinny.py` in many tilings, beside torch's GEMM without scales. Shapes of
Llama-3-70B on 4, 2 and 1 ranks, and of 8B.

cells: each GEMM alone, over copies of its weight that no cache holds. Each tiling is verified first: against sums in fp32, and that
it gives the same bits again; errors are the largest, in steps of bf16.
chains: a layer's GEMMs with the kernels that read them, and between ranks one that takes as long as an all-reduce: by torch; by the
tilings that `heuristics.select_fp8_skinny` selects; and by tilings picked one GEMM after another, each the one that makes the chain
fastest, of those fastest alone. The difference between chosen and picked is what the heuristic costs.

All in CUDA graphs, medians of 9 replays. A tiling is (rows, stages, programs, warps). Kernels are compiled first, so that nothing
else runs when something is timed.

    python -m benchmarks.kernels.fp8_skinny --out DIR [--shapes tp4,tp2,tp1,8b] [--tokens 4,16,32,64] [--workers 14]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks import harness
from benchmarks.kernels.gemm import UNIT, off, seconds
from phalanx.kernels import silu_mul_quant_fp8
from phalanx.kernels.capabilities import gpu as gpu_of
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.gemm.fp8_skinny import fp8_skinny_gemm
from phalanx.kernels.gemm.heuristics import SkinnyTiling
from phalanx.kernels.ops.quantize_fp8 import quantize_fp8
from phalanx.kernels.ops.residual_rms_norm import residual_rms_norm
from phalanx.kernels.scaled_tensors import Unscaled

Sizes = Mapping[str, tuple[int, int]]
SHAPES: Mapping[str, Sizes] = {name: harness.SHAPES[name] for name in ("tp4", "tp2", "8b", "tp1")}
"""[outputs, inputs] of a rank's GEMMs."""
BETWEEN_RANKS = ("tp4", "tp2")
PICKED = ("gate_up", "down", "o", "qkv")
"""In this order: the GEMM that reads most bytes first."""
FASTEST = 5
"""Tilings of a GEMM from which one is picked: the fastest alone."""
NOISE = 0.15
"""Microseconds of a layer: less is no reason to prefer a tiling to torch."""
LAYERS = 12
BYTES = 3_600_000_000
COLD = 300_000_000
"""Bytes of weights between two reads of the same: six times what the L2 cache holds."""
ROOM_OF_TWO = 106 * 1024
"""Bytes of shared memory for the tiles of one program where a multiprocessor has room for two."""
SUMS = {4: 64, 8: 128}
"""The most sums that a thread holds, by warps."""
WRONG, LEAST = 3.0, 3.0
"""Of torch's error, and in steps of bf16. Tensor cores add e4m3 with fewer bits than fp32 has, so that sums which torch adds up in
parts are nearer to the exact ones: sums without parts were off by up to 1.7 times as much. A tile of the weight that is left out,
or added twice, is off by 17 steps in most places even of the longest rows, and by several times that in some."""
CYCLES = 11000
"""Of a multiprocessor's clock: 5.6 us, about the time of an all-reduce of a few rows."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Job(NamedTuple):
    """One kernel to compile: x [tokens, inputs] times weight [outputs, inputs]."""

    tokens: int
    outputs: int
    inputs: int
    tiling: SkinnyTiling


class Cell(NamedTuple):
    """One GEMM alone, in microseconds. us: of the tilings that are right; failed: what is wrong with the others."""

    torch: float
    torch_error: float
    chosen: SkinnyTiling | None
    us: dict[SkinnyTiling, float]
    errors: dict[SkinnyTiling, float]
    failed: dict[SkinnyTiling, str]

    def fastest(self, count: int) -> list[SkinnyTiling]:
        return sorted(self.us, key=self.us.__getitem__)[:count]

    def figures(self) -> dict[str, Any]:
        chosen = None if self.chosen is None else {"tiling": self.chosen, "us": _rounded(self.us.get(self.chosen))}
        best = next(({"tiling": tiling, "us": _rounded(self.us[tiling])} for tiling in self.fastest(1)), None)
        tried = {
            f"{tuple(tiling)}": {"us": _rounded(self.us[tiling]), "error": round(self.errors[tiling], 2)}
            for tiling in self.fastest(len(self.us))
        }
        wrong = {f"{tuple(tiling)}": what for tiling, what in self.failed.items()}
        return {
            "torch": _rounded(self.torch), "chosen": chosen, "best": best, "torch_error": round(self.torch_error, 2),
            "tried": tried, "failed": wrong,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--shapes", default="tp4,tp2,tp1,8b")
    parser.add_argument("--tokens", default="4,16,32,64")
    parser.add_argument("--workers", type=int, default=harness.COMPILE_PROCESSES, help="processes that compile")
    arguments = parser.parse_args()
    gpu = torch.device("cuda", 0)
    if sm_arch(gpu) != 90:
        print(f"not run: this kernel is for Hopper, and here is {torch.cuda.get_device_name(gpu)}")
        return 1
    plan = [(shape, int(count)) for shape in arguments.shapes.split(",") for count in arguments.tokens.split(",")]
    jobs = [
        Job(tokens, *size, tiling)
        for shape, tokens in plan
        for size in SHAPES[shape].values()
        for tiling in tilings(tokens, *size, gpu_of(gpu).num_sms)
    ]
    begin = time.monotonic()
    count = harness.compile_ahead(map(call_of, jobs), arguments.workers)
    print(f"{count} kernels compiled in {time.monotonic() - begin:.1f} s", flush=True)
    memory, figures = Memory(), dict[str, Any](cells={}, chains={})
    for shape, tokens in plan:
        cells = {name: measured(memory, tokens, *size) for name, size in SHAPES[shape].items()}
        for name, cell in cells.items():
            title = f"{shape} {name} {tokens}"
            figures["cells"][title] = cell.figures()
            tell(title, cell)
        figures["chains"][f"{shape} {tokens}"] = result = chained(Chain(memory, shape, tokens), cells)
        picked = ", ".join(f"{name} {tuple(tiling)}" for name, tiling in result["picks"].items())
        three = ", ".join(f"{name} {result[name]:.2f}" for name in ("torch", "chosen", "picked"))
        print(f"{shape} chain {tokens}: {three} us a layer; {picked}", flush=True)
        harness.write("kernels_fp8_skinny", figures, arguments.out)
    return 0


def tell(title: str, cell: Cell) -> None:
    fastest = "  ".join(f"{tuple(tiling)} {cell.us[tiling]:.2f}" for tiling in cell.fastest(4))
    chosen = "torch" if cell.chosen is None else f"{tuple(cell.chosen)} {cell.us.get(cell.chosen, float('nan')):.2f}"
    print(f"{title:16} torch {cell.torch:7.2f} | chosen {chosen} | {fastest}", flush=True)
    for tiling, what in cell.failed.items():
        print(f"    {tuple(tiling)} {what}", flush=True)


def tilings(tokens: int, outputs: int, inputs: int, count: int) -> list[SkinnyTiling]:
    """The tilings that are tried on `count` multiprocessors: full rows of tiles or equal parts of one for each program, the tiles
    divided evenly over all multiprocessors, rows of tiles split in some other number of parts, and two programs on each
    multiprocessor."""
    columns, deep, result = heuristics.tile_tokens(tokens), triton.cdiv(inputs, heuristics.TILE_K), list[SkinnyTiling]()
    for rows, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        if rows * columns // (32 * warps) > SUMS[warps]:
            continue
        along, stages = triton.cdiv(outputs, rows), heuristics.num_stages(rows, tokens)
        cuts = [cut for cut in (2, 3, 4, 5, 6, 8) if warps == 4 and along * cut <= count and deep >= 3 * cut]
        programs = [_evenly(along, deep, count), min(count, along * deep), *(along * cut for cut in cuts)]
        result += [SkinnyTiling(rows, stages, each, warps) for each in programs]
        half, twice = ROOM_OF_TWO // ((rows + columns) * heuristics.TILE_K), _evenly(along, deep, 2 * count)
        if warps == 4 and half >= 3 and twice > count:
            result.append(SkinnyTiling(rows, half, twice, warps))
    chosen = heuristics.select_fp8_skinny(tokens, outputs, inputs, count)
    return list(dict.fromkeys(result if chosen is None else [chosen, *result]))


def _evenly(along: int, deep: int, programs: int) -> int:
    """At most so many programs, each with as many full rows of tiles; or with equal parts of a row."""
    if along > programs:
        return int(triton.cdiv(along, triton.cdiv(along, programs)))
    return along * min(deep, programs // along)


def call_of(job: Job) -> Callable[[], Any]:
    """The job's kernel, with operands of any content."""

    def call() -> None:
        x, weight = (torch.empty(rows, job.inputs, dtype=FP8, device="cuda") for rows in (job.tokens, job.outputs))
        fp8_skinny_gemm(x, weight, job.tiling)

    return call


class Memory:
    """Random weights in e4m3, of which each measurement takes as many as it needs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        piece = (torch.randn(1 << 26, device="cuda") / 2).to(FP8).view(torch.uint8)
        self._bytes = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        for number, part in enumerate(torch.split(self._bytes, piece.numel())):
            part.copy_(piece.roll(65537 * number)[: part.numel()])

    def copies(self, outputs: int, inputs: int) -> list[Tensor]:
        """Of one size, all different, so many that none is still in a cache when it is read again."""
        size = outputs * inputs
        count = min(max(6, -(-COLD // size)), BYTES // size)
        return [self._at(place * size, outputs, inputs) for place in range(count)]

    def layers(self, sizes: Sizes) -> Iterator[dict[str, Tensor]]:
        one, place = sum(outputs * inputs for outputs, inputs in sizes.values()), 0
        for _ in range(min(LAYERS, BYTES // one)):
            layer = {}
            for name, (outputs, inputs) in sizes.items():
                layer[name] = self._at(place, outputs, inputs)
                place += outputs * inputs
            yield layer

    def _at(self, place: int, outputs: int, inputs: int) -> Tensor:
        return self._bytes[place : place + outputs * inputs].view(FP8).view(outputs, inputs)


def measured(memory: Memory, tokens: int, outputs: int, inputs: int) -> Cell:
    weights, x = memory.copies(outputs, inputs), torch.randn(tokens, inputs, device="cuda").to(FP8)
    exact = x.float() @ weights[0].float().t()
    error = steps_off(cublas(x, weights[0]), exact)
    count = gpu_of(x.device).num_sms
    chosen = heuristics.select_fp8_skinny(tokens, outputs, inputs, count)
    cell = Cell(seconds(partial(cublas, x), weights) * 1e6, error, chosen, {}, {}, {})
    for tiling in tilings(tokens, outputs, inputs, count):
        act = partial(fp8_skinny_gemm, x, tiling=tiling)
        try:
            first, *_ = [act(weight) for weight in weights]  # all: each weight needs its counters before a graph is captured
            result = steps_off(first, exact)
            if not result <= max(LEAST, WRONG * error):
                cell.failed[tiling] = f"wrong: off by {result:.1f} steps of bf16, torch by {error:.1f}"
            elif not torch.equal(first, act(weights[0])):
                cell.failed[tiling] = "wrong: other bits when it runs again"
            else:
                cell.errors[tiling], cell.us[tiling] = result, seconds(act, weights) * 1e6
        except Exception as fault:  # a tiling that this GPU cannot run is reported, and the others go on
            cell.failed[tiling] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
    return cell


def cublas(x: Tensor, weight: Tensor) -> Tensor:
    return torch._scaled_mm(x, weight.t(), UNIT, UNIT, out_dtype=BF16, use_fast_accum=True)


def steps_off(result: Tensor, exact: Tensor) -> float:
    """The largest error, in steps of bf16 at the size of the sum or, where that is larger, at the usual one."""
    size = torch.maximum(exact.abs(), exact.square().mean().sqrt())
    return ((result.float() - exact).abs() / (size * 2**-8)).max().item()


@triton.jit
def wait_as_an_all_reduce(cycles):  # type: ignore[no-untyped-def]
    gdc_launch_dependents()
    gdc_wait()
    begin = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = begin
    while now - begin < cycles:
        now = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


class Chain:
    """Layers without their attention, in whose place the first columns of the QKV output are quantized for the next GEMM."""

    def __init__(self, memory: Memory, shape: str, tokens: int) -> None:
        sizes = SHAPES[shape]
        hidden, query = sizes["o"]
        self._waits, self._query = shape in BETWEEN_RANKS, query
        self._layers = list(memory.layers(sizes))
        self._first = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
        self._checked, _ = quantize_fp8(torch.randn(tokens, query, device="cuda", dtype=BF16))
        self._norm = torch.ones(hidden, device="cuda", dtype=BF16)
        self._columns = torch.full((sizes["gate_up"][0],), 2e-3, device="cuda")

    def run(self, tilings: Mapping[str, SkinnyTiling]) -> Tensor:
        """The residual stream. tilings: by GEMM; torch runs those that have none."""
        checked, residual = self._checked, self._first

        for layer in self._layers:
            x, rows, residual = self._normed(_gemm("o", layer, checked, tilings), residual)
            inner, _ = silu_mul_quant_fp8(Unscaled(_gemm("gate_up", layer, x, tilings), rows, self._columns))
            x, rows, residual = self._normed(_gemm("down", layer, inner, tilings), residual)
            fp32 = _gemm("qkv", layer, x, tilings).view(-1)[: len(x) * self._query]
            checked, _ = quantize_fp8(fp32.view(len(x), self._query))
        return residual

    def _normed(self, out: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        if self._waits:
            wait_as_an_all_reduce[(24,)](CYCLES, num_warps=16, launch_pdl=True)
        return residual_rms_norm(out, residual, self._norm, 1e-5, quant="fp8")

    def us(self, tilings: Mapping[str, SkinnyTiling]) -> float:
        """Of a layer."""
        return seconds(lambda _: self.run(tilings), [self._first]) * 1e6 / len(self._layers)


def _gemm(name: str, layer: Mapping[str, Tensor], x: Tensor, tilings: Mapping[str, SkinnyTiling]) -> Tensor:
    tiling = tilings.get(name)
    return cublas(x, layer[name]) if tiling is None else fp8_skinny_gemm(x, layer[name], tiling)


def chained(chain: Chain, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """us of a layer, the three right behind one another; off: of torch's residual stream."""
    chosen = {name: cell.chosen for name, cell in cells.items() if cell.chosen is not None and cell.chosen in cell.us}
    picks: dict[str, SkinnyTiling] = {}
    for name in PICKED:
        least, best = chain.us(picks) - NOISE, picks
        for tiling in cells[name].fastest(FASTEST):
            us = chain.us({**picks, name: tiling})
            if us < least:
                least, best = us, {**picks, name: tiling}
        picks = best
    plain = chain.run({})
    return {
        "torch": _rounded(chain.us({})), "chosen": _rounded(chain.us(chosen)), "picked": _rounded(chain.us(picks)),
        "off": {"chosen": float(f"{off(chain.run(chosen), plain):.1e}"), "picked": float(f"{off(chain.run(picks), plain):.1e}")},
        "picks": picks,
    }  # fmt: skip


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 2)


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(status)
