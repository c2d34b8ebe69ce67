# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of DeepSeek-V3.2's decode rows on one GPU, in three parts: the indexer's scores of all cached keys, the choice
of the 2,048 best, and attention to them; beside attention to all. Latents and keys in bf16 or e4m3, KV blocks of 16.

The choice and the outputs of some rows are verified, then each part is timed in a CUDA graph: median of 4 replays, per launch. TB/s
are of the keys that are scored. Tables are as long as the longest row's, or as `--table` says, since a captured launch reads tables
of the longest context. --scans: of the choice, scores that a program takes at a time, and its warps.

    python -m benchmarks.kernels.sparse --out DIR [--heads 16,128] [--kv bf16,e4m3] [--batches 1x4096,64x32768] [--table 163840]
        [--scans 1024x8,4096x16]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels.attention import batch_lengths
from benchmarks.kernels.attention_launches import BLOCK, KV_DTYPES
from phalanx.kernels import reference
from phalanx.kernels.attention import dispatch, index_choice, indexer
from phalanx.kernels.attention.heuristics import SplitKvWorkspace
from phalanx.models.layers.attention.sparse_rows import KERNEL_ROWS

RANK, ROPE, TOPK, INDEX_HEADS, INDEX_DIM = 512, 64, 2048, 64, 128
SCALE = (128 + ROPE) ** -0.5
REPLAYS, CALLS = 4, 8
DEFAULT = index_choice.SCAN, index_choice.SCAN_WARPS
VERIFIED = 3
"""Rows, at most."""


class Job(NamedTuple):
    """One shape's inputs: of the indexer [R, INDEX_HEADS, INDEX_DIM] and [R, INDEX_HEADS]; of attention [R, heads, RANK] and
    [R, heads, ROPE]; caches; tables [R, W], rows and lengths [R]."""

    asks: Tensor
    weights: Tensor
    keys: Tensor
    scales: Tensor | None
    query: Tensor
    rotated: Tensor
    latents: Tensor
    tables: Tensor
    rows: Tensor
    lengths: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--kv", default="bf16,e4m3", help="of bf16,e4m3")
    parser.add_argument("--batches", default="1x4096,1x32768,1x131072,8x32768,64x4096,64x32768,256x4096", help="rows x tokens")
    parser.add_argument("--table", type=int, default=0, help="tokens of a block table, at least")
    parser.add_argument("--scans", default="", help="scores x warps, each timed; by default what is in use")
    arguments = parser.parse_args()
    scans = [tuple(map(int, each.split("x"))) for each in arguments.scans.split(",") if each] or [DEFAULT]
    workspace, figures = SplitKvWorkspace(torch.device("cuda")), dict[str, Any]()
    for kv in arguments.kv.split(","):
        for heads in map(int, arguments.heads.split(",")):
            for batch in arguments.batches.split(","):
                for index_choice.SCAN, index_choice.SCAN_WARPS in scans:
                    name = f"{kv} {heads} heads {batch} scan {index_choice.SCAN}x{index_choice.SCAN_WARPS}"
                    figures[name] = measure(job_of(batch_lengths(batch), heads, kv, arguments.table), workspace)
                    print(f"{name:40} " + "  ".join(f"{part} {value:8.2f}" for part, value in figures[name].items()), flush=True)
            harness.write("kernels_sparse", figures, arguments.out)
    return 0


def job_of(lengths: Tensor, heads: int, kv: str, table: int) -> Job:
    """lengths: of the rows, on the host."""
    rows, longest = len(lengths), max(int(lengths.max()), table)
    generator = torch.Generator(device="cuda").manual_seed(rows)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    counts = (lengths.cuda() + BLOCK - 1) // BLOCK
    blocks = int(counts.sum())
    tables = torch.zeros(rows, -(-longest // BLOCK), dtype=torch.int32, device="cuda")
    order = torch.randperm(blocks, generator=generator, device="cuda").int()
    tables[torch.arange(tables.shape[1], device="cuda") < counts[:, None]] = order
    keys, scales = random(blocks, BLOCK, 1, INDEX_DIM), None
    if kv == "e4m3":
        values, scale = reference.quantize_fp8(keys.view(-1, INDEX_DIM))
        keys, scales = values.view_as(keys), scale.view(blocks, BLOCK, 1, 1)
    return Job(
        random(rows, INDEX_HEADS, INDEX_DIM), random(rows, INDEX_HEADS, dtype=torch.float32), keys, scales,
        random(rows, heads, RANK), random(rows, heads, ROPE), random(blocks, BLOCK, 1, RANK + ROPE).to(KV_DTYPES[kv]),
        tables, torch.arange(rows, device="cuda"), lengths.cuda().int(),
    )  # fmt: skip


def measure(job: Job, workspace: SplitKvWorkspace) -> dict[str, float]:
    """Microseconds of each part."""
    rows = len(job.lengths)
    chosen = torch.zeros(rows, TOPK, dtype=torch.int32, device="cuda")
    few, pages = job.lengths.clamp(max=TOPK), job.latents.view(-1, 1, 1, RANK + ROPE)
    parts = [slice(first, first + KERNEL_ROWS) for first in range(0, rows, KERNEL_ROWS)]

    def choose() -> None:
        dispatch.best_slots(job.asks, job.weights, job.keys, job.scales, job.tables, job.rows, job.lengths, chosen)

    def attend(cache: Tensor, tables: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
        spec = dispatch.LatentSpec.of(job.query.shape[1], cache)
        splits = [dispatch.plan_latent_splits(lengths[part], None, spec, workspace) for part in parts]

        def call() -> Tensor:
            return torch.cat([
                dispatch.latent_decode_attention(
                    job.query[part], job.rotated[part], cache, tables[part], None, lengths[part], scale=SCALE,
                    workspace=workspace, splits=each,
                )
                for part, each in zip(parts, splits, strict=True)
            ])  # fmt: skip

        return call

    choose()
    sparse, dense = attend(pages, chosen, few), attend(job.latents, job.tables, job.lengths)
    verify(job, chosen, sparse())
    both, mixed, every = (timed(call) for call in (choose, sparse, dense))
    scores = timed(lambda: index_choice.index_scores(job.asks, job.weights, job.keys, job.scales, *job[-3:]))
    nbytes = float(job.lengths.sum()) * INDEX_DIM * job.keys.element_size()
    return {
        "scores us": scores, "choice us": both - scores, "sparse us": mixed, "sum us": both + mixed, "dense us": every,
        "scores TB/s": nbytes / scores * 1e-6,
    }  # fmt: skip


def timed(call: Callable[[], Any]) -> float:
    return harness.graph_us([call] * CALLS, replays=REPLAYS, discarded=1, warmups=2)


def verify(job: Job, chosen: Tensor, mixed: Tensor) -> None:
    """Raise SystemExit where the choice is not the best one, but for scores that are as good in another order of sums; or where the
    outputs are not those of the chosen tokens."""
    for row in range(min(len(chosen), VERIFIED)):
        length = int(job.lengths[row])
        at = torch.arange(length, device="cuda")
        slots = job.tables[row, at // BLOCK].long() * BLOCK + at % BLOCK
        keys = indexer.read_index_keys(job.keys, job.scales, slots)
        scores = indexer.index_scores(job.asks[row, None, None], job.weights[row, None, None], keys[None])[0, 0]
        own = chosen[row, : min(TOPK, length)].long()
        by_slot = torch.full((len(job.latents) * BLOCK,), -torch.inf, device="cuda").index_copy(0, slots, scores)
        least, best = by_slot[own].min(), scores.topk(len(own)).values.min()
        if len(own.unique()) != len(own) or least < best - 1e-3 * scores.abs().max():
            raise SystemExit(f"row {row}: the least chosen score is {float(least)}, and {float(best)} is the least of the best")
        few = job.lengths[row : row + 1].clamp(max=TOPK)
        expected = reference.latent_decode_attention(
            job.query[row : row + 1], job.rotated[row : row + 1], job.latents.view(-1, 1, 1, RANK + ROPE), chosen[row : row + 1],
            None, few, scale=SCALE,
        )  # fmt: skip
        error = (mixed[row] - expected[0]).float().norm() / expected[0].float().norm()
        if error > 0.02:
            raise SystemExit(f"row {row}: outputs are apart by {float(error):.4f} of their norm")


if __name__ == "__main__":
    sys.exit(main())
