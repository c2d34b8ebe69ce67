# SPDX-License-Identifier: Apache-2.0
"""The four GEMMs of a layer of Llama-3-70B with 4-bit integer weights on one GPU, by activations in 16 bit (W4A16) and in FP8
(W4A8), beside the same in FP8 and in bf16.

Figures: [microseconds, TB/s of the weight] by rank's share, GEMM and tokens. Timed in a CUDA graph over copies of the weight that
no cache holds. --sweep: each GEMM with several tilings, the fastest first; one whose values differ from the rule's ends the run.

    python -m benchmarks.kernels.int4_gemm --out DIR [--only tp1,tp2] [--tokens 1,16,64] [--group 128] [--sweep]
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
from phalanx import kernels
from phalanx.kernels.capabilities import gpu
from phalanx.kernels.gemm import int4_heuristics
from phalanx.kernels.gemm.int4_heuristics import SkinnyInt4Tiling
from phalanx.kernels.gemm.int4_mm import int4_mm
from phalanx.kernels.gemm.int4_packing import Int4Weight, packed
from phalanx.kernels.scaled_tensors import Quantized

COLD = 256 << 20
"""Bytes of weights that are read before any is read again, at least: an H200's L2 cache has 60 MiB."""
REPLAYS = 7
KINDS = ("int4", "int4 by fp8", "fp8", "bf16")
"""Of weights; "by fp8": activations are quantized to e4m3, which is part of the time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--only", default="tp1,tp2")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    counts, figures = [int(count) for count in arguments.tokens.split(",")], dict[str, Any]()
    for share in arguments.only.split(","):
        for name, (outputs, inputs) in harness.SHAPES[share].items():
            layer = Layer(outputs, inputs, arguments.group)
            rows = {kind: {str(count): layer.row(kind, count) for count in counts} for kind in KINDS}
            figures[f"{share} {name} {outputs} x {inputs}"] = rows
            print(share, name, outputs, inputs, *rows.items(), sep="\n  ", flush=True)
            for count in counts if arguments.sweep else ():
                timed = layer.sweep(count)
                figures[f"{share} {name} T={count}"] = timed[:12]
                print(count, *[row for row in timed if row[1] == "rule"], *timed[:5], sep="\n    ", flush=True)
            harness.write("kernels_int4_gemm", figures, arguments.out)
            del layer
    return 0


class Layer:
    """Weights of one GEMM, as many as no cache holds."""

    def __init__(self, outputs: int, inputs: int, group: int) -> None:
        self.outputs, self.inputs, self.device = outputs, inputs, torch.device("cuda")
        copies = max(2, min(24, COLD // (outputs * inputs // 2)))
        self.int4 = [self._int4(group) for _ in range(copies)]
        self.fp8 = [kernels.quantize_fp8(self._bf16()) for _ in range(max(2, copies // 2))]
        self.bf16 = [self._bf16() for _ in range(max(2, copies // 4))]

    def _bf16(self) -> Tensor:
        return torch.randn(self.outputs, self.inputs, device=self.device, dtype=torch.bfloat16) / self.inputs**0.5

    def _int4(self, group: int) -> Int4Weight:
        codes = torch.randint(0, 16, (self.outputs, self.inputs), device=self.device, dtype=torch.int8)
        scales = (torch.rand(self.outputs, -(-self.inputs // group), device=self.device) + 0.5) / self.inputs**0.5 / 4
        return packed(codes, scales, None, group, torch.bfloat16)

    def calls(self, kind: str, x: Tensor, tiling: SkinnyInt4Tiling | None = None) -> list[Callable[[], Any]]:
        if kind == "int4":
            if tiling is None:
                return [partial(int4_mm, x, weight) for weight in self.int4]
            from phalanx.kernels.gemm.int4_skinny import int4_skinny_gemm

            return [partial(int4_skinny_gemm, x, weight, tiling) for weight in self.int4]
        if kind == "int4 by fp8":
            from phalanx.kernels.gemm.int4_fp8 import int4_fp8_gemm

            return [partial(int4_fp8_gemm, x, weight) for weight in self.int4]
        if kind == "bf16":
            return [partial(torch.nn.functional.linear, x, weight) for weight in self.bf16]
        quantized = Quantized(*kernels.quantize_fp8(x))
        return [partial(kernels.scaled_mm, quantized, stored, scale.squeeze(-1), dtype=x.dtype) for stored, scale in self.fp8]

    def row(self, kind: str, tokens: int, tiling: SkinnyInt4Tiling | None = None) -> list[float]:
        x = torch.randn(tokens, self.inputs, device=self.device, dtype=torch.bfloat16)
        calls = self.calls(kind, x, tiling)
        us = harness.graph_us((calls * 12)[:24], replays=REPLAYS, discarded=1)
        nbytes = self.outputs * self.inputs * {"int4": 0.5, "int4 by fp8": 0.5, "fp8": 1.0, "bf16": 2.0}[kind]
        return [round(us, 2), round(nbytes / us / 1e6, 3)]

    def sweep(self, tokens: int) -> list[list[Any]]:
        """[us, "rule" or "", the tiling] of each that the GPU can launch, the fastest first."""
        from triton.runtime.errors import OutOfResources

        from phalanx.kernels.gemm.int4_skinny import int4_skinny_gemm

        x = torch.randn(tokens, self.inputs, device=self.device, dtype=torch.bfloat16)
        rule = int4_heuristics.select_skinny(tokens, self.outputs, num_sms=gpu(self.device).num_sms)
        every, timed = list(dict.fromkeys([rule, *candidates(gpu(self.device).num_sms)])), list[list[Any]]()
        run = partial(int4_skinny_gemm, x, self.int4[0])
        harness.compile_ahead([partial(run, tiling) for tiling in every])
        wanted = run(rule).float()
        for tiling in every:
            try:
                error = float((run(tiling).float() - wanted).norm() / wanted.norm())
            except OutOfResources:
                continue
            if not error < 1e-2:
                raise SystemExit(f"{tiling} gives other values than {rule}: relative error {error}")
            timed.append([self.row("int4", tokens, tiling)[0], "rule" if tiling == rule else "", *tiling])
        return sorted(timed)


def candidates(num_sms: int) -> Iterator[SkinnyInt4Tiling]:
    for (rows, warps), stages, each in itertools.product(((64, 4), (128, 4), (128, 8), (256, 8)), (3, 4, 6, 8), (1, 2, 3, 4)):
        yield SkinnyInt4Tiling(rows, warps, stages, each * num_sms)


if __name__ == "__main__":
    sys.exit(main())
