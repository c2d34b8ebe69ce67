# SPDX-License-Identifier: Apache-2.0
"""GEMMs with weights scaled by block, on one GPU: every tiling of ours beside other ways, for shapes of Llama-3 8B and of 70B on
four ranks.

ours: x in bf16 in, bf16 out, the quantization of x by groups included. "(rows, tokens, warps, stages, parts)" are tilings of
`block_heuristics.block_tiling`, "row (rows, block, warps)" of `block_heuristics.gemv_tiling`, "quantized, row" the same behind a
kernel that quantizes x; "chosen" is what `block_gemm.block_scaled_mm` runs on an H200, and its tiling is in chosen_is; "torch" is
cuBLAS behind that kernel, which many tokens run instead (`block_heuristics.prefers_cublas`). "x16" keeps x in bf16 and widens the
weight in registers. widened: the weight in memory first, then bf16. bf16: F.linear on a weight in bf16. row-wise: torch._scaled_mm
with scales by row and column on x in e4m3, the bound: without quantization of x, and without blocks.

TB/s of the weight's e4m3 bytes up to 64 tokens, TFLOP/s beyond. Each is verified against the sum in fp32 of its operands, then
timed in a CUDA graph over enough copies of the weight that none is in a cache: median of 7 replays.

    python -m benchmarks.kernels.block_gemm --out DIR [--shapes 8b,tp4] [--tokens 1,8,64,256,2048]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels import gemm
from benchmarks.kernels.gemm import Candidate, Case, measure
from phalanx.kernels import reference
from phalanx.kernels.gemm import block_gemm, block_heuristics
from phalanx.kernels.gemm.block_heuristics import BlockTiling
from phalanx.kernels.gemm.block_scaled_gemm import block_scaled_gemm
from phalanx.kernels.gemm.block_scaled_gemv import block_scaled_gemv
from phalanx.kernels.gemm.heuristics import GemvTiling

SHAPES = {name: harness.SHAPES[name] for name in ("8b", "tp4")}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FEW = 64
"""The most tokens for which reading the weight bounds the time."""
COLD = 128 << 20
"""Bytes of copies of the weight in e4m3 at least: more than the L2 cache of an H200, which has 50 MiB."""
REPLAYS = 7
ROWS = [
    GemvTiling(2, 4096, 4), GemvTiling(4, 2048, 2), GemvTiling(4, 2048, 4), GemvTiling(2, 8192, 4), GemvTiling(1, 8192, 4),
    GemvTiling(4, 4096, 8), GemvTiling(2, 16384, 8),
]  # fmt: skip
TILES = {  # tokens -> (rows, tokens, warps, stages), without parts
    8: [(64, 16, 4, 4), (64, 16, 4, 6), (64, 16, 4, 8), (128, 16, 4, 5), (128, 16, 8, 6)],
    64: [(64, 64, 4, 4), (64, 64, 4, 6), (128, 64, 8, 4), (64, 32, 4, 6)],
    256: [(64, 128, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4), (128, 64, 8, 4), (64, 64, 4, 5)],
    2048: [(128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 5), (128, 64, 8, 4), (64, 128, 4, 4)],
}
PARTS = {8: (1, 2, 4, 8), 64: (1, 2, 4), 256: (1, 2, 3, 4), 2048: (1,)}


class Operands(NamedTuple):
    """x [T, in] in bf16, copies of weight [out, in] e4m3 with scale [out, blocks], and the outputs that each kind of GEMM must
    give."""

    x: Tensor
    weights: list[Tensor]
    scale: Tensor
    quantized: Tensor
    fp32: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--shapes", default="8b,tp4")
    parser.add_argument("--tokens", default="1,8,64,256,2048")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"chosen_is": {}}
    with mock.patch.object(gemm, "REPLAYS", REPLAYS):
        for shape, tokens in product(arguments.shapes.split(","), map(int, arguments.tokens.split(","))):
            for name, size in SHAPES[shape].items():
                title = f"{shape} {name} {size} T={tokens}"
                p = make(tokens, size)
                figures["chosen_is"][title] = chosen(tokens, size)
                figures[title] = measure(Case(p.weights, work(p), dict(candidates(p)))) | beside(p)
                tell(title, figures[title])
                harness.write("kernels_block_gemm", figures, arguments.out)
    return 0


def tell(title: str, result: dict[str, Any]) -> None:
    """The best of our tilings beside the others in one line, then every tiling that is within a tenth of the best."""
    timed = {label: row for label, row in result.items() if isinstance(row, list)}
    ours = {label: row for label, row in timed.items() if label.startswith(("(", "row (", "quantized, row"))}
    best = min(ours, key=lambda label: ours[label][0]) if ours else "none"
    others = ["chosen", "torch", "x16", "widened", "bf16", "row-wise"]
    cells = [f"{label} {timed[label][0]:8.2f} us {timed[label][1]:8.2f}" for label in (best, *others) if label in timed]
    print(f"{title:32} {' | '.join(cells)}")
    near = [f"{label} {row[0]:.2f}" for label, row in ours.items() if label != best and row[0] < 1.1 * ours[best][0]]
    wrong = [f"{label}: {row}" for label, row in result.items() if not isinstance(row, list)]
    if near or wrong:
        print("    " + "; ".join([*near, *wrong]), flush=True)


def chosen(tokens: int, size: tuple[int, int]) -> str:
    """The label of what `block_gemm.block_scaled_mm` runs for x [tokens, in] and weight [out, in] on an H200; size: (out, in)."""
    outputs, inputs = size
    if tokens > 1:
        return f"{tuple(block_heuristics.block_tiling(tokens, outputs, inputs // block_heuristics.BLOCK_K))}"
    itself = block_heuristics.gemv_quantizes(outputs, inputs)
    return f"{'' if itself else 'quantized, '}row {tuple(block_heuristics.gemv_tiling(inputs, quantizes=itself))}"


def make(tokens: int, size: tuple[int, int]) -> Operands:
    """x is quantized on the CPU: bit for bit as the kernel does it. On a GPU torch divides by 448 by multiplying by 1 / 448: scales
    differ in their last bit, and of x in bf16 so many values lie halfway between two of e4m3 that some fall to the other side. Over
    all tokens that makes 2.5e-3, for one token with few blocks up to 8e-3: more than a kernel is allowed."""
    outputs, inputs = size
    torch.manual_seed(0)
    x = (torch.randn(tokens, inputs, device="cuda") * torch.rand(inputs, device="cuda") * 4).to(BF16)
    first = (torch.randn(outputs, inputs, device="cuda", dtype=BF16) * 16).to(FP8)
    scale = torch.rand(-(-outputs // 128), -(-inputs // 128), device="cuda") / 512 + 1e-3
    scale = scale.repeat_interleave(128, dim=0)[:outputs].contiguous()
    meant = reference.dequantize(first, scale, torch.float32, block=128)
    values, x_scale = (result.cuda() for result in reference.per_token_group_quant_fp8(x.cpu()))
    quantized = reference.dequantize(values, x_scale, torch.float32, block=128) @ meant.t()
    copies = [first, *(first.clone() for _ in range(max(1, COLD // first.nbytes)))]
    return Operands(x, copies, scale, quantized, x.float() @ meant.t())


def work(p: Operands) -> float:
    """Of one GEMM: bytes / 1e6, which per microsecond are TB/s, or operations / 1e6: TFLOP/s."""
    weight = p.weights[0]
    return weight.nbytes / 1e6 if len(p.x) <= FEW else 2.0 * len(p.x) * weight.numel() / 1e6


def candidates(p: Operands) -> Iterator[tuple[str, Candidate]]:
    """On the weight in e4m3."""
    tokens, inputs = p.x.shape
    yield "chosen", Candidate(lambda w: block_gemm.block_scaled_mm(p.x, w, p.scale, dtype=BF16), p.quantized)
    if tokens == 1:
        for row_tiling in ROWS:
            if inputs <= 8192:
                yield f"row {tuple(row_tiling)}", Candidate(partial(row, p, row_tiling, False), p.quantized)
            yield f"quantized, row {tuple(row_tiling)}", Candidate(partial(row, p, row_tiling, True), p.quantized)
    if tokens > 1 and block_gemm.cublas_supports(p.scale.shape[0], inputs, 0, p.x.device):
        by_block = block_gemm.one_scale_per_block(p.scale)
        yield "torch", Candidate(lambda w: block_gemm._cublas(p.x, w, by_block), p.quantized)
    near = min(TILES, key=lambda count: abs(count - tokens))
    for tile, parts in product(TILES[near], PARTS[near]):
        tiles = -(-p.scale.shape[0] // tile[0]) * -(-tokens // tile[1])
        if parts == 1 or (tiles * parts <= 132 * 6 and p.scale.shape[1] // parts >= 4):
            tiling = BlockTiling(*tile, parts)
            yield f"{tuple(tiling)}", Candidate(partial(cut, p, tiling), p.quantized)
    if tokens <= block_heuristics.FEW_TOKENS:
        yield "x16", Candidate(lambda w: block_gemm.w8a16_gemm(p.x, w, p.scale, block=128), p.fp32)
    yield "widened", Candidate(partial(widened, p), p.fp32)
    by_row, by_column = torch.ones(tokens, 1, device="cuda"), torch.ones(1, p.scale.shape[0], device="cuda")
    values = (p.x.float() * 8).to(FP8)
    bare = values.float() @ p.weights[0].float().t()
    mm = partial(torch._scaled_mm, scale_a=by_row, scale_b=by_column, out_dtype=BF16, use_fast_accum=True)
    yield "row-wise", Candidate(lambda w: mm(values, w.t()), bare)


def row(p: Operands, tiling: GemvTiling, apart: bool, weight: Tensor) -> Tensor:
    """apart: a kernel before it quantizes x."""
    values, x_scale = block_gemm.per_token_group_quant_fp8(p.x) if apart else (p.x, None)
    return block_scaled_gemv(values, x_scale, weight, p.scale, dtype=BF16, begin=0, quantize=True, tiling=tiling)


def cut(p: Operands, tiling: BlockTiling, weight: Tensor) -> Tensor:
    values, x_scale = block_gemm.per_token_group_quant_fp8(p.x)
    return block_scaled_gemm(values, x_scale, weight, p.scale, dtype=BF16, begin=0, tiling=tiling)


def widened(p: Operands, weight: Tensor) -> Tensor:
    return F.linear(p.x, reference.dequantize(weight, p.scale, BF16, block=128))


def beside(p: Operands) -> dict[str, Any]:
    """F.linear on a weight in bf16, of the same values."""
    meant = reference.dequantize(p.weights[0], p.scale, BF16, block=128)
    copies = [meant, *(meant.clone() for _ in range(max(1, COLD // meant.nbytes)))]
    act: Callable[[Tensor], Tensor] = partial(F.linear, p.x)
    microseconds = gemm.seconds(act, copies) * 1e6
    return {"bf16": [round(microseconds, 2), round(work(p) / microseconds, 3), float(f"{gemm.off(act(meant), p.fp32):.1e}")]}


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(status)
