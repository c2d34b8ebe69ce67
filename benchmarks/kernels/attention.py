# SPDX-License-Identifier: Apache-2.0
"""Attention kernels in several tilings beside FlashInfer, on one GPU: head_dim 128, KV blocks of 16, keys and values in bf16, in
e4m3, and (decode alone) in int8, which FlashInfer does not read.

decode: each tiling is verified against the reference on some of the rows, then timed in a CUDA graph over enough copies of keys and
values that none is in a cache: median of 4 replays, per launch; TB/s are of keys and values. Splits are planned before; "cut" is
the time of that alone. prefill: verified on some of the tokens, and the others against the chosen tiling's, then timed in a graph
of 4 launches; TFLOP/s are of the visible keys. Shapes are rows x tokens, and the tokens that each row has already; batches
are rows x tokens of each kind of row.

    python -m benchmarks.kernels.attention --out DIR [--parts decode,prefill] [--heads 32/8,64/8] [--kv bf16,e4m3,int8]
        [--rows 1,64] [--tokens 200] [--mixed 64] [--skewed 64] [--batches 1x32768,1x65536+31x500] [--variants none]
        [--shapes 8x1024,1x1024+16384]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels.attention_launches import (
    BLOCK,
    HEAD_DIM,
    KV_DTYPES,
    PEER_BYTES,
    SCALES,
    WRONG,
    Candidate,
    line,
    seconds,
    tell_best,
)  # fmt: skip
from benchmarks.kernels.attention_prefill import prefill
from phalanx.kernels import reference
from phalanx.kernels.attention.decode import decode_attention
from phalanx.kernels.attention.heuristics import (
    MAX_SMALL_SPLITS,
    PROGRAMS_PER_SM,
    SHORT_KV,
    DecodeTiling,
    SplitKvWorkspace,
    select_decode,
)
from phalanx.kernels.attention.split_kv import plan

COLD = 160 << 20
"""Bytes of keys and values between two reads of the same."""
MOST_COPIES = 96
LONG = 16384
"""Tokens of the one long row among others."""
MANY = [(16, 1, 4, 168), (32, 1, 3, 168), (32, 2, 4, 168), (64, 2, 3, 168), (64, 4, 4, 168), (128, 4, 4, 168)]
"""(tile, warps, stages, registers), not cooperative."""
FEW = [
    DecodeTiling(0, SHORT_KV, SHORT_KV, 8, 2, 255, True),
    DecodeTiling(0, 128, 128, 8, 2, 128, True),
    DecodeTiling(0, 64, 64, 4, 2, 128, True),
]
"""Tried where programs are too few to fill the GPU, also with extra splits."""
WAVES = (1, 2, 4)
"""Programs of the larger tilings, in multiples of the GPU's multiprocessors."""


class Job(NamedTuple):
    """One shape's inputs. copies: (keys, values) [blocks, BLOCK, kv_heads, HEAD_DIM] and in int8 token_scales, all with the same
    tables. read: bytes of one."""

    query: Tensor
    copies: list[tuple[Tensor, ...]]
    tables: Tensor
    slots: Tensor
    lengths: Tensor
    scales: tuple[float, float] | None
    read: int

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": HEAD_DIM**-0.5, "window": None, "kv_scales": self.scales}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--parts", default="decode", help="of decode,prefill")
    parser.add_argument("--heads", default="32/8,16/2", help="query/KV heads")
    parser.add_argument("--rows", default="1,8,64,128,256,512")
    parser.add_argument("--tokens", default="200,1500")
    parser.add_argument("--shapes", default="8x1024,1x128,1x2048,64x128,1x1024+16384", help="of prefill")
    parser.add_argument("--kv", default="bf16,e4m3", help="of bf16,e4m3,int8")
    parser.add_argument("--peers", default="flashinfer", help="or none")
    parser.add_argument("--mixed", default="64", help="so many rows also with 1 .. 2 * tokens - 1 tokens each, not all alike")
    parser.add_argument("--skewed", default="64", help=f"so many rows also with one of {LONG} tokens among them")
    parser.add_argument("--batches", default="", help="also rows of these tokens: of long contexts, say")
    parser.add_argument("--variants", default="all", help="or none: only what is chosen")
    parser.add_argument(
        "--early", action=argparse.BooleanOptionalAction, default=True, help="read lengths while the kernel before runs"
    )
    arguments = parser.parse_args()
    pairs = [tuple(map(int, pair.split("/"))) for pair in arguments.heads.split(",")]
    if "prefill" in arguments.parts.split(","):
        prefill(arguments, pairs)
    if "decode" in arguments.parts.split(","):
        decode(arguments, pairs)
    return 0


def decode(arguments: argparse.Namespace, pairs: list[tuple[int, ...]]) -> None:
    texts = arguments.tokens, arguments.rows, arguments.mixed, arguments.skewed
    tokens, rows, mixed, skewed = ([int(each) for each in text.split(",") if each] for text in texts)
    kinds = [*((count, "") for count in rows), *((count, " mixed") for count in mixed), *((count, " skewed") for count in skewed)]
    batches = {f"R={count} T={length}{kind}": row_lengths(count, length, kind) for count, kind in kinds for length in tokens}
    batches |= {batch: batch_lengths(batch) for batch in arguments.batches.split(",") if batch}
    workspace = SplitKvWorkspace(torch.device("cuda"))
    figures: dict[str, Any] = {}
    harness.compile_ahead(decodes(pairs, arguments.kv.split(","), workspace, arguments.early))
    for kv in arguments.kv.split(","):
        memory = Memory(kv)
        for q_heads, kv_heads in pairs:
            for label, lengths in batches.items():
                name = f"{kv} {q_heads}/{kv_heads} {label}"
                figures[name] = measure(memory.job(q_heads, kv_heads, lengths), workspace, arguments)
                print(f"{name:28} {line(figures[name])}", flush=True)
            harness.write("kernels_attention", figures, arguments.out)
        del memory
    print("\nbest tilings (extra_splits, chunk, tile, warps, stages, registers, cooperative), beside the chosen:")
    tell_best(figures)


def row_lengths(rows: int, tokens: int, kind: str) -> Tensor:
    """int32 [rows]: all alike, or as --mixed and --skewed say."""
    lengths = torch.full((rows,), tokens, dtype=torch.int32)
    if kind == " mixed":
        generator = torch.Generator().manual_seed(rows + tokens)
        lengths = torch.randint(1, 2 * tokens, (rows,), generator=generator, dtype=torch.int32)
    elif kind == " skewed":
        lengths[(rows - 1) // 2] = LONG
    return lengths


def batch_lengths(batch: str) -> Tensor:
    """ "1x65536+31x500" -> int32 [32]."""
    parts = [tuple(map(int, part.split("x"))) for part in batch.split("+")]
    return torch.tensor([tokens for rows, tokens in parts for _ in range(rows)], dtype=torch.int32)


class Memory:
    """Random keys and values, of which each job takes as much as it needs; in int8 also two scales for a key's or value's head."""

    def __init__(self, kv: str) -> None:
        size = (8 << 30) // (2 if kv == "bf16" else 1)
        self._scales = SCALES if kv == "e4m3" else None
        self._token_scales: Tensor | None = None
        if kv == "int8":
            self._parts = [torch.randint(-127, 128, (size // 2,), dtype=torch.int8, device="cuda") for _ in range(2)]
            # As of values from a normal distribution: the largest of 128 is about 3.
            self._token_scales = (torch.rand(size // 2 // HEAD_DIM * 2, device="cuda") + 2.5).bfloat16() / 127
            return
        self._parts = [torch.empty(size // 2, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)]
        if self._scales is not None:
            self._parts = [(part / scale).to(torch.float8_e4m3fn) for part, scale in zip(self._parts, SCALES, strict=True)]

    def job(self, q_heads: int, kv_heads: int, lengths: Tensor) -> Job:
        """lengths: of the rows, on the host."""
        rows, lengths = len(lengths), lengths.cuda()
        generator = torch.Generator(device="cuda").manual_seed(rows)
        block_counts = (lengths + BLOCK - 1) // BLOCK
        blocks = torch.randperm(int(block_counts.sum()), generator=generator, device="cuda").int()
        tables = torch.zeros(rows, int(block_counts.max()), dtype=torch.int32, device="cuda")
        tables[torch.arange(tables.shape[1], device="cuda") < block_counts[:, None]] = blocks
        slots = torch.randperm(rows, generator=generator, device="cuda")
        tables[slots] = tables.clone()
        shape = (len(blocks), BLOCK, kv_heads, HEAD_DIM)
        one = len(blocks) * BLOCK * kv_heads * HEAD_DIM
        read = 2 * int(lengths.sum()) * kv_heads * HEAD_DIM * self._parts[0].element_size()
        count = min(MOST_COPIES, self._parts[0].numel() // one, max(2, -(-COLD // read)))
        copies = [tuple(part[at * one : (at + 1) * one].view(shape) for part in self._parts) for at in range(count)]
        if self._token_scales is not None:
            each = self._token_scales.view(-1, kv_heads, BLOCK, 2)
            copies = [(*copy, each[at * len(blocks) : (at + 1) * len(blocks)]) for at, copy in enumerate(copies)]
            read += 2 * int(lengths.sum()) * kv_heads * each.element_size()
        query = torch.randn(rows, q_heads, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
        return Job(query, copies, tables, slots, lengths, self._scales, read)


def variants(rows: int, kv_heads: int, num_sms: int) -> Iterator[DecodeTiling]:
    """With as many extra splits per row as fill half of the GPU or all of it, with one for every other row, and with so many that a
    multiprocessor has one program or a few."""
    room = PROGRAMS_PER_SM * num_sms // kv_heads
    splits = {
        min(max(room // (2 * rows), 1), MAX_SMALL_SPLITS) * rows,
        min(max(room // rows, 1), MAX_SMALL_SPLITS) * rows,
        -(-rows // 2),
        *(max(waves * num_sms // kv_heads, 1) for waves in WAVES),
    }
    if 2 * rows * kv_heads <= num_sms:
        yield FEW[0]
        yield from (tiling._replace(extra_splits=min(room // (2 * rows), 16) * rows) for tiling in FEW)
    for extra_splits in sorted(splits):
        for chunk in (128, 512):
            for tile in MANY:
                yield DecodeTiling(extra_splits, chunk, *tile)


def named(tiling: DecodeTiling) -> str:
    return f"({', '.join(map(str, tiling[:6]))}{', cooperative' if tiling.cooperative else ''})"


def decodes(
    pairs: list[tuple[int, ...]], kinds: list[str], workspace: SplitKvWorkspace, early: bool
) -> Iterator[Callable[[], Any]]:
    tables, slots, lengths = (torch.zeros(64, dtype=kind, device="cuda") for kind in (torch.int32, torch.int64, torch.int32))
    for q_heads, kv_heads in pairs:
        query = torch.zeros(1, q_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        for kv in kinds:
            cache = torch.zeros(1, BLOCK, kv_heads, HEAD_DIM, device="cuda").to(KV_DTYPES[kv])
            token_scales = torch.ones(1, kv_heads, BLOCK, 2, dtype=torch.bfloat16, device="cuda") if kv == "int8" else None
            for tiling in [*FEW, *(DecodeTiling(MAX_SMALL_SPLITS, 64, *tile) for tile in MANY)]:
                yield partial(
                    decode_attention, query, cache, cache, tables.view(1, -1), slots[:1], lengths[:1], scale=1.0, window=None,
                    kv_scales=SCALES, workspace=workspace, tiling=tiling, early_lengths=early, token_scales=token_scales,
                )  # fmt: skip


def measure(job: Job, workspace: SplitKvWorkspace, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each candidate: microseconds and TB/s; or what is wrong with it."""
    rows, q_heads, _ = job.query.shape
    kv_heads, itemsize = job.copies[0][0].shape[2], job.copies[0][0].element_size()
    sample = torch.unique(torch.linspace(0, rows - 1, 5, device="cuda").long())  # the middle one among them
    key, value, *token_scales = job.copies[0]
    wanted = reference.decode_attention(
        job.query[sample], key, value, job.tables, job.slots[sample], job.lengths[sample], **job.options,
        token_scales=next(iter(token_scales), None),
    ).float()  # fmt: skip
    facts = (job.tables, job.slots, job.lengths)
    short = int(job.lengths.max()) <= SHORT_KV
    usual = select_decode(rows, kv_heads, q_heads // kv_heads, HEAD_DIM, itemsize, workspace.num_sms, short=short)
    candidates: dict[str, Candidate] = {}
    for label, tiling in [
        ("chosen", usual),
        *((named(each), each) for each in variants(rows, kv_heads, workspace.num_sms) if arguments.variants == "all"),
    ]:
        splits = None  # planned once for all layers
        if tiling.extra_splits:
            splits = plan(job.lengths, job.slots, tiling, window=None, block_size=BLOCK)
        candidates[label] = lambda key, value, token_scales=None, tiling=tiling, splits=splits: decode_attention(
            job.query, key, value, *facts, **job.options, workspace=workspace, tiling=tiling, splits=splits,
            early_lengths=arguments.early, token_scales=token_scales,
        )  # fmt: skip
    row: dict[str, Any] = {}
    if arguments.peers == "flashinfer" and not token_scales:
        try:
            candidates["flashinfer"] = flashinfers(job)
        except Exception as fault:
            row["flashinfer"] = f"failed: {str(fault)[:120]}"
    if usual.extra_splits:
        planning = seconds(lambda *_: plan(job.lengths, job.slots, usual, window=None, block_size=BLOCK), job.copies[:2] * 8)
        row["cut"] = [round(planning * 1e6, 2), 0.0]
    for label, candidate in candidates.items():
        try:
            for _ in range(2):  # again, over the counts that the first has left
                error = ((candidate(*job.copies[0])[sample].float() - wanted).norm() / wanted.norm()).item()
                if not error < WRONG:
                    break
            if not error < WRONG:
                row[label] = f"wrong: {error:.1e}"
                continue
            microseconds = seconds(candidate, job.copies) * 1e6
            row[label] = [round(microseconds, 2), round(job.read / microseconds / 1e6, 3)]
        except Exception as fault:  # a variant that this GPU cannot run is reported, and the others go on
            row[label] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
    return row


def flashinfers(job: Job) -> Candidate:
    """Its decode on tensor cores, planned once for these lengths."""
    import flashinfer

    rows, q_heads, _ = job.query.shape
    key, *_ = job.copies[0]
    tables, lengths = job.tables[job.slots].cpu(), job.lengths.cpu()
    block_counts = (lengths + BLOCK - 1) // BLOCK
    indptr = torch.zeros(rows + 1, dtype=torch.int32)
    indptr[1:] = block_counts.cumsum(0)
    indices = tables[torch.arange(tables.shape[1]) < block_counts[:, None]]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(PEER_BYTES, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        indptr, indices.cuda(), (lengths - 1) % BLOCK + 1, q_heads, key.shape[2], HEAD_DIM, BLOCK, sm_scale=HEAD_DIM**-0.5,
        window_left=-1, q_data_type=job.query.dtype, kv_data_type=key.dtype,
    )  # fmt: skip
    scales = {} if job.scales is None else {"k_scale": job.scales[0], "v_scale": job.scales[1]}
    return lambda key, value: wrapper.run(job.query, (key, value), out=torch.empty_like(job.query), **scales)


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(status)
