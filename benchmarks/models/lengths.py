# SPDX-License-Identifier: Apache-2.0
"""Decode layers on one GPU over rows of like and of unlike lengths: `python -m benchmarks.models.lengths --out DIR
[--ranks 32/8,16/2] [--rows 64,256] [--layers 6] [--kv e4m3|bf16]`

32/8 are the layers of Llama-3-8B, 16/2 those of one rank of four of Llama-3-70B without its all-reduces, in FP8, from a CUDA graph:
so attention has before it and behind it what it has in an engine, which it overlaps. Figures are microseconds a layer: medians of
replays that stand back to back, behind as many that are not counted, so that the clock is steady. Rows are alike (200 or 1,500
tokens), mixed (1 to 2,999, by chance) or skewed (200, and one of 16,384).

To compare two states of the tree, run it in turn with the other's `src` in PYTHONPATH and `--label`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.models.layers import BF16, BLOCK, Layers, batch_of, filled, replayed
from phalanx.bench import shapes
from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.models import registry, weights
from phalanx.models.batch import Batch
from phalanx.models.decoder import Decoder
from phalanx.models.slices import LayerContext

LONG = 16384
KINDS = [(200, "alike"), (1500, "alike"), (1500, "mixed"), (200, "skewed")]
RANKS: dict[str, tuple[str, dict[str, int]]] = {
    "32/8": ("llama-3-8b", {}),
    "16/2": ("llama-3-70b", {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 7168}),
}
ROUNDS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--ranks", default="32/8,16/2", help="query/KV heads")
    parser.add_argument("--rows", default="34,64,128,256,512")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kv", default="e4m3", choices=("e4m3", "bf16"))
    parser.add_argument("--label", default="", help="of the file that is written")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"layers": arguments.layers, "kv": arguments.kv, "us": {}}
    with torch.inference_mode():
        for rank in arguments.ranks.split(","):
            model = model_of(rank, arguments.layers, fp8_cache=arguments.kv == "e4m3")
            for rows in map(int, arguments.rows.split(",")):
                for tokens, kind in KINDS:
                    lengths = lengths_of(rows, tokens, kind)
                    name = f"{rank} {rows} x {tokens} {kind}"
                    figures["us"][name] = layer_us = round(measured(model, lengths) / arguments.layers, 1)
                    print(f"{arguments.label:8} {name:28} {layer_us:8.1f} us", flush=True)
            del model
            harness.write(f"models_lengths{'.' if arguments.label else ''}{arguments.label}", figures, arguments.out)


def model_of(rank: str, layers: int, *, fp8_cache: bool) -> Decoder:
    name, parts = RANKS[rank]
    shape = ModelShape.from_config({**shapes.SHAPES[name], **parts})
    layer_range, device = range(1, 1 + layers), torch.device("cuda")
    model = registry.build(
        shape, layer_range, LayerContext(Solo(), BF16, device, quantization=ON_LOAD, kv_cache_dtype="fp8" if fp8_cache else "model")
    )
    weights.dummy(model, 0)
    return model


def lengths_of(rows: int, tokens: int, kind: str) -> list[int]:
    """Tokens that each row has in the cache already."""
    if kind == "mixed":
        drawn: list[int] = torch.randint(1, 2 * tokens, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
        return drawn
    return [LONG if kind == "skewed" and row == rows // 2 else tokens for row in range(rows)]


def batch_over(lengths: Sequence[int], device: torch.device) -> tuple[Batch, int]:
    """-> (one token more for each row; blocks of the cache)."""
    block_counts = [length // BLOCK + 1 for length in lengths]
    first = [1, *(1 + count for count in accumulate(block_counts))]
    tables = torch.zeros(len(lengths), max(block_counts), dtype=torch.int32)
    for row, (begin, end) in enumerate(pairwise(first)):
        tables[row, : end - begin] = torch.arange(begin, end)
    slots = [(begin + length // BLOCK) * BLOCK + length % BLOCK for begin, length in zip(first, lengths, strict=False)]
    kv_lengths = torch.tensor(lengths)
    batch = replace(
        batch_of(len(lengths), 1, device), positions=kv_lengths.to(device), kv_slots=torch.tensor(slots, device=device),
        kv_lengths=(kv_lengths + 1).int().to(device), kv_lengths_cpu=[length + 1 for length in lengths],
        block_tables=tables.to(device), block_tables_cpu=tables.numpy(),
    )  # fmt: skip
    return batch, first[-1]


def measured(model: Decoder, lengths: Sequence[int]) -> float:
    """us of a replay of all layers."""
    batch, blocks = batch_over(lengths, model.context.device)
    graph = Layers(model, filled(model, blocks), batch).captured()
    for _ in range(ROUNDS):
        replayed(graph)
    return statistics.median(us for _ in range(ROUNDS) for us in replayed(graph))


if __name__ == "__main__":
    main()
