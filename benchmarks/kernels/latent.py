# SPDX-License-Identifier: Apache-2.0
"""Absorbed decode attention of MLA over the latent cache in several tilings, beside FlashInfer's for Hopper (fa3) and Ampere (fa2),
on one GPU: rank 512, rope 64, KV blocks of 16, latents in bf16 and in e4m3 (which FlashInfer does not read).

Each tiling is verified against the reference on some of the rows, then timed in a CUDA graph over enough copies of the latents that
none is in a cache: median of 4 replays, per launch. TB/s are of the latents, read once; TFLOP/s are of both GEMMs. Splits and
FlashInfer's schedule are planned before. Heads are those of one rank: 16 of DeepSeek-V2-Lite or of V3 on 8, 64 of V2 on two, 128.

    python -m benchmarks.kernels.latent --out DIR [--heads 16,64,128] [--kv bf16,e4m3] [--batches 1x1024,64x1500] [--variants none]

Candidates: the Triton kernel's tilings; "hopper", the warp-specialized kernel, with its extra splits and the least tokens of one;
"chosen", what a model gets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels.attention import batch_lengths
from benchmarks.kernels.attention_launches import BLOCK, KV_DTYPES, PEER_BYTES, WRONG, Candidate, seconds
from phalanx.kernels import reference
from phalanx.kernels.attention import dispatch
from phalanx.kernels.attention.heuristics import LATENT_BAND, LatentTiling, SplitKvWorkspace, select_latent_bands
from phalanx.kernels.attention.latent_decode import latent_decode_attention
from phalanx.kernels.attention.split_kv import plan

RANK, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5
"""Of DeepSeek: the width of a key that is not absorbed."""
COLD = 160 << 20
MOST_COPIES = 48
TILINGS = {
    "bf16": [(16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 4, 2), (32, 32, 4, 3), (32, 32, 8, 4), (64, 32, 8, 3), (64, 32, 8, 4),
             (64, 16, 8, 6), (64, 64, 8, 2)],
    "e4m3": [(16, 64, 8, 2), (16, 64, 8, 3), (16, 32, 4, 4), (16, 32, 8, 4), (32, 64, 8, 3), (32, 32, 8, 4), (64, 32, 8, 4),
             (64, 64, 8, 2)],
}  # fmt: skip
"""(heads, tile, warps, stages)."""
MERGED = [(128, False), (128, True), (64, True)]
"""(chunk, apart): tokens of a split, at least; whether a kernel of its own merges the splits."""
WAVES = (1, 2)
"""Programs of a launch, in multiples of the GPU's multiprocessors."""
CHUNKS = (64, 128, 256)
"""Least tokens of a split of the warp-specialized kernel."""


class Job(NamedTuple):
    """One shape's inputs. copies: latents [blocks, BLOCK, 1, RANK + ROPE], all with the same tables."""

    query: Tensor
    rotated: Tensor
    copies: list[tuple[Tensor]]
    tables: Tensor
    slots: Tensor
    lengths: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--heads", default="16,64,128")
    parser.add_argument("--kv", default="bf16,e4m3", help="of bf16,e4m3")
    parser.add_argument("--batches", default="1x200,1x1024,1x16384,8x1500,64x200,64x1500,256x1500", help="rows x tokens")
    parser.add_argument("--peers", default="fa3,fa2", help="FlashInfer's back ends, or none")
    parser.add_argument("--variants", default="all", help="or hopper: of the warp-specialized kernel; or none: only what is chosen")
    arguments = parser.parse_args()
    workspace = SplitKvWorkspace(torch.device("cuda"))
    heads = [int(each) for each in arguments.heads.split(",")]
    harness.compile_ahead(launches(heads, arguments.kv.split(","), arguments.variants, workspace))
    figures: dict[str, Any] = {}
    for kv in arguments.kv.split(","):
        memory = torch.empty(6 << 30, dtype=torch.bfloat16, device="cuda").normal_()[: (6 << 30) // 2].to(KV_DTYPES[kv])
        for count in heads:
            for batch in arguments.batches.split(","):
                name = f"{kv} {count} heads {batch}"
                figures[name] = measure(job_of(memory, count, batch_lengths(batch)), workspace, arguments)
                print(f"{name:26} {line(figures[name])}", flush=True)
            harness.write("kernels_latent", figures, arguments.out)
        del memory
    return 0


def job_of(memory: Tensor, heads: int, lengths: Tensor) -> Job:
    """lengths: of the rows, on the host."""
    rows, lengths = len(lengths), lengths.cuda()
    generator = torch.Generator(device="cuda").manual_seed(rows)
    block_counts = (lengths + BLOCK - 1) // BLOCK
    tables = torch.zeros(rows, int(block_counts.max()), dtype=torch.int32, device="cuda")
    blocks = torch.randperm(int(block_counts.sum()), generator=generator, device="cuda").int()
    tables[torch.arange(tables.shape[1], device="cuda") < block_counts[:, None]] = blocks
    slots = torch.randperm(rows, generator=generator, device="cuda")
    tables[slots] = tables.clone()
    one = len(blocks) * BLOCK * (RANK + ROPE)
    count = min(MOST_COPIES, memory.numel() // one, max(2, -(-COLD // (one * memory.element_size()))))
    copies = [(memory[at * one : (at + 1) * one].view(len(blocks), BLOCK, 1, RANK + ROPE),) for at in range(count)]
    query = torch.randn(rows, heads, RANK + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16)
    return Job(query[..., :RANK], query[..., RANK:], copies, tables, slots, lengths)


def variants(kv: str, rows: int, heads: int, num_sms: int) -> Iterator[LatentTiling]:
    """Without splits where the rows fill the GPU, and with extra splits that give a multiprocessor one program or two."""
    for band, tile, warps, stages in TILINGS[kv]:
        if band > max(16, heads):
            continue
        bands = -(-heads // band)
        extra = {max(waves * num_sms // bands - rows, 1) for waves in WAVES} | ({0} if rows > 1 else set())
        for extra_splits in sorted(extra if rows * bands < 4 * num_sms else {0}):
            for chunk, apart in MERGED if extra_splits else MERGED[:1]:
                yield LatentTiling(band, extra_splits, tile, warps, stages, chunk, apart)


def bands(job: Job, num_sms: int) -> Iterator[LatentTiling]:
    """Of the warp-specialized kernel, where it runs: extra splits that give a multiprocessor one program or two, and the fewest."""
    rows, heads, _ = job.query.shape
    if not dispatch.supports_warp_specialized_latent(job.query.device, rows, spec_of(job)):
        return
    extra = {max(waves * num_sms // -(-heads // LATENT_BAND) - rows, 1) for waves in (0, *WAVES)}
    for extra_splits in sorted(extra | {select_latent_bands(rows, heads, num_sms).extra_splits}):
        for chunk in CHUNKS if extra_splits > 1 else CHUNKS[:1]:
            yield select_latent_bands(rows, heads, num_sms)._replace(extra_splits=extra_splits, chunk=chunk)


def spec_of(job: Job) -> dispatch.LatentSpec:
    return dispatch.LatentSpec.of(job.query.shape[1], job.copies[0][0])


def launches(heads: list[int], kinds: list[str], which: str, workspace: SplitKvWorkspace) -> Iterator[Callable[[], Any]]:
    """One of each kernel that is timed, with and without splits."""
    tables, slots, lengths = (torch.zeros(64, dtype=kind, device="cuda") for kind in (torch.int32, torch.int64, torch.int32))
    for kv in kinds:
        cache = torch.zeros(1, BLOCK, 1, RANK + ROPE, device="cuda").to(KV_DTYPES[kv])
        for count in heads:
            query = torch.zeros(1, count, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
            yield partial(
                dispatch.latent_decode_attention, query[..., :RANK], query[..., RANK:], cache, tables.view(1, -1), slots[:1],
                lengths[:1], scale=SCALE, workspace=workspace,
            )  # fmt: skip
            if which != "all":
                continue
            for extra, apart in ((0, False), (8, False), (8, True)):
                for tiling in TILINGS[kv]:
                    yield partial(
                        latent_decode_attention, query[..., :RANK], query[..., RANK:], cache, tables.view(1, -1), slots[:1],
                        lengths[:1], scale=SCALE, workspace=workspace, early_lengths=True,
                        tiling=LatentTiling(tiling[0], extra, *tiling[1:], apart=apart),
                    )  # fmt: skip


def measure(job: Job, workspace: SplitKvWorkspace, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each candidate: microseconds, TB/s and TFLOP/s; or what is wrong with it."""
    rows, heads, _ = job.query.shape
    cache = job.copies[0][0]
    kv = "e4m3" if cache.dtype == torch.float8_e4m3fn else "bf16"
    sample = torch.unique(torch.linspace(0, rows - 1, 5, device="cuda").long())
    wanted = reference.latent_decode_attention(
        job.query[sample], job.rotated[sample], cache, job.tables, job.slots[sample], job.lengths[sample], scale=SCALE
    ).float()
    candidates: dict[str, Candidate] = {"chosen": chosen(job, workspace)}
    if arguments.variants == "all":
        candidates |= {str(tuple(each)): ours(job, each, workspace) for each in variants(kv, rows, heads, workspace.num_sms)}
    if arguments.variants != "none":
        candidates |= {
            f"hopper {each.extra_splits} {each.chunk}": ours(job, each, workspace, hopper=True)
            for each in bands(job, workspace.num_sms)
        }  # fmt: skip
    usual = dispatch._latent_tiling(job.query.device, rows, spec_of(job), workspace)
    row: dict[str, Any] = {"chosen tiling": str(tuple(usual))}
    for peer in arguments.peers.split(",") if kv == "bf16" and arguments.peers != "none" else ():
        try:
            candidates[peer] = flashinfers(job, peer)
        except Exception as fault:
            row[peer] = f"failed: {str(fault)[:120]}"
    tokens = int(job.lengths.sum())
    read, flop = tokens * (RANK + ROPE) * cache.element_size(), 2 * heads * tokens * (2 * RANK + ROPE)
    for label, candidate in candidates.items():
        try:
            errors = [((candidate(cache)[sample].float() - wanted).norm() / wanted.norm()).item() for _ in range(2)]
            if not max(errors) < WRONG:
                row[label] = f"wrong: {max(errors):.1e}"
                continue
            us = seconds(candidate, job.copies) * 1e6
            row[label] = [round(us, 2), round(read / us / 1e6, 3), round(flop / us / 1e6, 1)]
        except Exception as fault:  # a variant that this GPU cannot run is reported, and the others go on
            row[label] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
    return row


def chosen(job: Job, workspace: SplitKvWorkspace) -> Candidate:
    splits = dispatch.plan_latent_splits(job.lengths, job.slots, spec_of(job), workspace)
    return lambda cache: dispatch.latent_decode_attention(
        job.query, job.rotated, cache, job.tables, job.slots, job.lengths, scale=SCALE, workspace=workspace, splits=splits,
        early_lengths=True,
    )  # fmt: skip


def ours(job: Job, tiling: LatentTiling, workspace: SplitKvWorkspace, *, hopper: bool = False) -> Candidate:
    """The Triton kernel or the warp-specialized one."""
    kernel = latent_decode_attention
    if hopper:
        from phalanx.kernels.attention.latent_decode_hopper import latent_decode_attention as kernel
    splits = None  # planned once for all layers
    if tiling.extra_splits:
        splits = plan(job.lengths, job.slots, tiling.split, window=None, block_size=BLOCK)
    return lambda cache: kernel(
        job.query, job.rotated, cache, job.tables, job.slots, job.lengths, scale=SCALE, workspace=workspace, tiling=tiling,
        splits=splits, early_lengths=True,
    )  # fmt: skip


def flashinfers(job: Job, backend: str) -> Candidate:
    """Planned once for these lengths."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    rows, heads, _ = job.query.shape
    tables, lengths = job.tables[job.slots], job.lengths
    block_counts = (lengths + BLOCK - 1) // BLOCK
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    indptr[1:] = block_counts.cumsum(0)
    indices = tables[torch.arange(tables.shape[1], device="cuda") < block_counts[:, None]]
    each = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(PEER_BYTES, dtype=torch.uint8, device="cuda"), backend=backend)
    wrapper.plan(each, indptr, indices, lengths, heads, RANK, ROPE, BLOCK, False, SCALE, torch.bfloat16, torch.bfloat16)
    query, rotated = job.query.contiguous(), job.rotated.contiguous()
    return lambda cache: wrapper.run(
        query, rotated, cache[:, :, 0, :RANK], cache[:, :, 0, RANK:], out=torch.empty_like(query)
    )  # fmt: skip


def line(result: dict[str, Any]) -> str:
    timed = {label: row for label, row in result.items() if isinstance(row, list)}
    tilings = {label: row for label, row in timed.items() if label.startswith("(")}
    banded = {label: row for label, row in timed.items() if label.startswith("hopper")}
    fastest = [(label, row) for kind in (tilings, banded) for label, row in sorted(kind.items(), key=lambda each: each[1][0])[:1]]
    shown = [*fastest, *((label, timed.get(label)) for label in ("chosen", "fa3", "fa2"))]
    text = "   ".join(f"{label} {row[0]:.2f} us {row[1]:.2f} TB/s {row[2]:.0f} TFLOP/s" for label, row in shown if row)
    faults = [f"\n    {label}: {row}" for label, row in result.items() if not isinstance(row, list) and label != "chosen tiling"]
    return text + "".join(faults)


if __name__ == "__main__":
    sys.exit(main())
