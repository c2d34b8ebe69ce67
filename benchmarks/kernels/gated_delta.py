# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of decode rows on one GPU, in several tilings, in the sizes of Qwen3-Next.

Figures: [microseconds of a layer, TB/s of the state read and written], by rows and tiling. Timed in a CUDA graph over slots whose
states no cache holds. Each tiling is verified against the reference first.

    python -m benchmarks.kernels.gated_delta --out DIR [--rows 1,16,64]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.gated_delta import reference
from phalanx.kernels.gated_delta.recurrent import TILING, DeltaTiling, delta_decode
from phalanx.kernels.gated_delta.reference import DeltaWeights, StateRows

HEADS = GatedDelta((), 16, 32, 128, 128, conv=4)
SLOTS = 256
"""Of 2 MiB: an H200's L2 cache has 60 MiB."""
CALLS = 64
REPLAYS = 7
TILINGS = (
    *(DeltaTiling(32, stages, 4, registers) for stages in (2, 3, 4) for registers in (None, 96)),
    *(DeltaTiling(values, stages, 8) for values in (32, 64) for stages in (2, 3)),
    *(DeltaTiling(16, stages, 4) for stages in (3, 5)),
    DeltaTiling(64, 2, 4), DeltaTiling(64, 2, 8, 128), DeltaTiling(128, 1, 8, 128), DeltaTiling(128, 1, 16),
    DeltaTiling(128, 1, 16, 64),
)  # fmt: skip
Inputs = tuple[Tensor, Tensor, Tensor, GatedDelta, DeltaWeights]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--rows", default="1,16,64")
    arguments = parser.parse_args()
    state = torch.randn(SLOTS, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim, device="cuda") / 8
    tilings = {str(tuple(tiling)): partial(delta_decode, tiling=tiling) for tiling in dict.fromkeys((TILING, *TILINGS))}
    harness.compile_ahead(partial(call, *inputs(1), state, rows_of(1, 0), out_of(1)) for call in tilings.values())
    figures: dict[str, Any] = {}
    for count in (int(count) for count in arguments.rows.split(",")):
        row = figures[f"rows={count}"] = {label: measure(call, count, state) for label, call in tilings.items()}
        best = sorted((figure, label) for label, figure in row.items() if isinstance(figure, list))[:3]
        print(f"rows={count:<4} chosen {row[str(tuple(TILING))]}  best {best}", flush=True)
    harness.write("kernels_gated_delta", figures, arguments.out)
    return 0


def inputs(count: int) -> Inputs:
    """Convolved channels, gates, b and a of so many tokens."""
    generator = torch.Generator("cuda").manual_seed(count)
    qkv, z, ba = (
        torch.randn(count, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        for width in (sum(HEADS.sections), HEADS.sections[2], 2 * HEADS.value_heads)
    )
    fp32 = torch.linspace(-5.0, 0.0, HEADS.value_heads, device="cuda")
    norm = torch.ones(HEADS.value_dim, device="cuda", dtype=torch.bfloat16)
    return qkv, z, ba, HEADS, DeltaWeights(norm, fp32, fp32 / 5, norm, 1e-6)


def rows_of(count: int, first: int) -> StateRows:
    slots = (torch.arange(count, device="cuda") + first) % SLOTS
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32)
    return StateRows(slots, starts, torch.full((count,), 9, device="cuda", dtype=torch.int32), slots, count, 0, [], [])


def out_of(count: int) -> Tensor:
    return torch.empty(count, HEADS.sections[2], device="cuda", dtype=torch.bfloat16)


def error_of(call: Callable[..., None], count: int, state: Tensor) -> float:
    """The largest of the outputs' and the states', beside the reference."""
    qkv, z, ba, heads, weights = inputs(count)
    before, rows, out = state[:count].clone(), rows_of(count, 0), out_of(count)
    query, key, value, decay, beta = reference.rule_inputs(qkv, ba.float(), heads, weights)
    sums, after = reference.one_token(query, key, value, decay, beta, before)
    normed = sums * torch.rsqrt(sums.pow(2).mean(-1, keepdim=True) + weights.eps)
    wanted = normed.flatten(1) * torch.nn.functional.silu(z.float())
    call(qkv, z, ba, heads, weights, state, rows, out)
    norm_error = ((out.float() - wanted).norm() / wanted.norm()).item()
    error = max(norm_error / 100, (state[:count] - after).abs().max().item())
    state[:count] = before
    return error


def calls_of(call: Callable[..., None], count: int, state: Tensor) -> Iterator[Callable[[], None]]:
    arguments, out = inputs(count), out_of(count)
    for number in range(CALLS):
        yield partial(call, *arguments, state, rows_of(count, number * max(count, SLOTS // CALLS)), out)


def measure(call: Callable[..., None], count: int, state: Tensor) -> list[float] | str:
    try:
        error = error_of(call, count, state)
        if not error < 1e-4:
            return f"wrong: {error:.1e}"
        us = harness.graph_us(list(calls_of(call, count, state)), replays=REPLAYS, discarded=1)
    except Exception as fault:  # a tiling that this GPU cannot run is reported, and the others go on
        torch.cuda.synchronize()
        return f"failed: {str(fault)[:120]}"
    return [round(us, 2), round(8 * count * state[0].numel() / us / 1e6, 2)]


if __name__ == "__main__":
    sys.exit(main())
