# SPDX-License-Identifier: Apache-2.0
"""What the delta of adapters adds to the linear layers of a decoder layer, on one GPU: shapes of Llama-3-8B in bf16, adapters of
rank 16. One token, whose delta is inside the GEMV; 64 tokens of eight adapters, and 2,048 of one, with two kernels beside the GEMM.

Microseconds of one layer's GEMM, of the same with the delta, and of each kernel behind itself, in a CUDA graph over enough layers
that no weight is in a cache. For one token the output is compared with that of the two kernels.

    python -m benchmarks.kernels.adapters --out DIR [--rank 16]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from phalanx import kernels
from phalanx.kernels.adapters.expand import expand
from phalanx.kernels.adapters.rows import AdapterFactors, AdapterRows, GemvDelta
from phalanx.kernels.adapters.shrink import shrink
from phalanx.kernels.gemm.linear import linear_with_delta
from phalanx.kernels.scaled_tensors import GemvArgs
from phalanx.layout.adapter import slot_rank

ADAPTERS, COLD, REPLAYS, WRONG = 8, 400 << 20, 9, 1e-2
DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
PARTS = {"qkv": (4096, 1024, 1024), "o": (4096,), "gate_up": (14336, 14336), "down": (4096,)}
BATCHES = {1: 1, 64: ADAPTERS, 2048: 1}
"""Tokens, and how many adapters they have in turn."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    figures: dict[str, Any] = {"rank": args.rank}
    for tokens, adapters in BATCHES.items():
        for name, (outputs, inputs) in harness.SHAPES["8b"].items():
            times = measured(PARTS[name], outputs, inputs, tokens, adapters, args.rank)
            figures[f"{tokens} tokens of {adapters}, {name}"] = times
            print(tokens, adapters, name, times, flush=True)
    print(f"written: {harness.write('kernels_adapters', figures, args.out)}")
    return 0


def measured(parts: tuple[int, ...], outputs: int, inputs: int, tokens: int, adapters: int, rank: int) -> dict[str, float]:
    """Microseconds."""
    weight = torch.randn(outputs, inputs, device=DEVICE, dtype=BF16) / inputs**0.5
    count = max(2, COLD // weight.nbytes)
    layers = [(weight.clone(), factors_of(parts, inputs, rank)) for _ in range(count)]
    slots = np.arange(tokens) % adapters
    rows = AdapterRows.of(slots, DEVICE)
    assert rows is not None
    x = torch.randn(tokens, inputs, device=DEVICE, dtype=BF16)

    def beside(layer: tuple[Tensor, AdapterFactors]) -> Tensor:
        low = shrink(x, layer[1], rows)
        return expand(kernels.linear(x, layer[0]), low, layer[1], rows)

    out, low = kernels.linear(x, weight), shrink(x, layers[0][1], rows)
    acts: dict[str, Callable[[tuple[Tensor, AdapterFactors]], Any]] = {
        "base": lambda layer: kernels.linear(x, layer[0]), "two kernels beside it": beside,
        "shrink": lambda layer: shrink(x, layer[1], rows), "expand": lambda layer: expand(out, low, layer[1], rows),
    }  # fmt: skip
    if tokens == 1:
        step = torch.ones(1, dtype=torch.int32, device=DEVICE)
        captured = AdapterRows(1, rows.order, rows.tiles, rows.tile, step=step)

        def inside(layer: tuple[Tensor, AdapterFactors]) -> Tensor:
            delta = GemvDelta.of(layer[1], captured)
            result = linear_with_delta(GemvArgs(x, None, layer[0], None, None, BF16, delta))
            assert result is not None
            return result

        wanted, output = beside(layers[0]).float(), inside(layers[0]).float()
        wrong = float((output - wanted).norm() / wanted.norm())
        assert wrong < WRONG, f"off by {wrong:.2g} of the output's norm"
        acts["inside"] = inside
    return {
        name: round(harness.graph_us([partial(act, layer) for layer in layers], replays=REPLAYS), 2) for name, act in acts.items()
    }


def factors_of(parts: tuple[int, ...], inputs: int, rank: int) -> AdapterFactors:
    ends = np.cumsum(parts).tolist()
    columns = [(number, end - width, end) for number, (width, end) in enumerate(zip(parts, ends, strict=True))]
    factors = AdapterFactors.empty(ADAPTERS, slot_rank(rank), inputs, columns, BF16, DEVICE)
    factors.a.normal_(0.0, inputs**-0.5)
    factors.b.normal_(0.0, 0.1)
    factors.ranks.fill_(rank)
    return factors


if __name__ == "__main__":
    sys.exit(main())
