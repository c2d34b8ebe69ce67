# SPDX-License-Identifier: Apache-2.0
"""The prefill part of attention.py: all tilings of one shape, verified and timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels.attention_launches import (
    BLOCK,
    HEAD_DIM,
    PEER_BYTES,
    SCALES,
    WRONG,
    line,
    seconds,
    tell_best,
)
from phalanx.kernels import reference
from phalanx.kernels.attention.heuristics import PrefillTiling, SplitKvWorkspace, count_prefill_tiles, select_prefill
from phalanx.kernels.attention.prefill import prefill_attention
from phalanx.kernels.capabilities import has_gluon, sm_arch

PREFILL = {
    "bf16": [
        (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3, 128), (128, 64, 8, 3), (128, 128, 8, 2),
        (128, 128, 8, 3),
    ],
    "e4m3": [
        (64, 64, 4, 3), (64, 64, 4, 3, 168), (64, 64, 4, 4, 168), (64, 32, 4, 4, 168), (64, 128, 4, 3), (128, 64, 8, 3),
        (128, 128, 8, 3), (128, 128, 8, 4),
    ],
}  # fmt: skip
"""(rows, keys, warps, stages, registers)."""
WAVES = (1, 4, 6)
"""Of programs that share keys, at most; beside none."""
LAUNCHES = 4
"""Launches of one graph."""
VERIFIED, VERIFIED_KEYS = 48, 2_000_000
"""Tokens that are compared with the reference, at most, and the keys that these see together: the reference repeats keys."""


def prefill(arguments: argparse.Namespace, pairs: list[tuple[int, ...]]) -> None:
    kinds, figures = arguments.kv.split(","), {}
    shapes = [tuple(map(int, f"{shape}+0".replace("x", "+").split("+")[:3])) for shape in arguments.shapes.split(",")]
    tilings = {kv: PREFILL[kv] if arguments.variants == "all" else [] for kv in kinds}
    harness.compile_ahead(prefills(pairs, tilings))
    for kv in kinds:
        for q_heads, kv_heads in pairs:
            for rows, tokens, prior in shapes:
                job = prefill_job(kv, q_heads, kv_heads, rows, tokens, prior)
                name = f"{kv} {q_heads}/{kv_heads} {rows}x{tokens}" + (f"+{prior}" if prior else "")
                figures[name] = result = measure_prefill(job, tilings[kv], arguments.peers)
                print(f"{name:28} {line(result, 'TFLOP/s')}", flush=True)
                print(
                    "    " + ", ".join(f"{label} {row[0]} us" for label, row in result.items() if isinstance(row, list)), flush=True
                )
            harness.write("kernels_attention_prefill", figures, arguments.out)
    print("\nbest variants (rows, keys, warps, stages, registers), beside the chosen:")
    tell_best(figures)


class PrefillJob(NamedTuple):
    """One shape's inputs, as `Job`'s; all rows alike. flop: of the visible keys."""

    query: Tensor
    cache: tuple[Tensor, Tensor]
    tables: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    scales: tuple[float, float] | None
    flop: int

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": HEAD_DIM**-0.5, "window": None, "kv_scales": self.scales}


def prefill_job(kv: str, q_heads: int, kv_heads: int, rows: int, tokens: int, prior: int) -> PrefillJob:
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    width = -(-(prior + tokens) // BLOCK)
    cache, scales = [draw(rows * width, BLOCK, kv_heads, HEAD_DIM) for _ in range(2)], None
    if kv == "e4m3":
        scales = SCALES
        cache = [(part / scale).to(torch.float8_e4m3fn) for part, scale in zip(cache, SCALES, strict=True)]
    tables = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    starts = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device="cuda")
    lengths = torch.full((rows,), prior + tokens, dtype=torch.int32, device="cuda")
    flop = 4 * q_heads * HEAD_DIM * rows * (tokens * prior + tokens * (tokens + 1) // 2)
    query, slots = draw(rows * tokens, q_heads, HEAD_DIM), torch.randperm(rows, device="cuda")
    return PrefillJob(query, (cache[0], cache[1]), tables, slots, starts, lengths, scales, flop)


def prefills(pairs: list[tuple[int, ...]], tilings: dict[str, list[tuple[int, ...]]]) -> Iterator[Callable[[], Any]]:
    for q_heads, kv_heads in pairs:
        for kv, each in tilings.items():
            job = prefill_job(kv, q_heads, kv_heads, 1, 1, 0)
            for tiling in [select_prefill(HEAD_DIM, 2), *starmap(PrefillTiling, each)]:
                yield partial(prefill_attention, job.query, *job.cache, *job[2:6], **job.options, tiling=tiling)
            yield partial(_warp_specialized, job, 1, job.query)
            yield partial(_warp_specialized, job, 1, job.query, SplitKvWorkspace(job.query.device), waves=WAVES[0])


def measure_prefill(job: PrefillJob, tilings: list[tuple[int, ...]], peers: str) -> dict[str, Any]:
    """Of each candidate: microseconds and TFLOP/s; or what is wrong with it."""
    tokens, q_heads, _ = job.query.shape
    rows, kv_heads = len(job.lengths), job.cache[0].shape[2]
    verified = min(VERIFIED, max(VERIFIED_KEYS // int(job.lengths.max()), 4))
    at = torch.unique(torch.linspace(0, tokens - 1, verified, device="cuda").long())
    row = at // (tokens // rows)
    visible = job.lengths[row] - job.starts[row + 1] + at.int() + 1
    wanted = reference.decode_attention(job.query[at], *job.cache, job.tables, job.slots[row], visible, **job.options).float()
    tiles = count_prefill_tiles(job.starts.tolist(), q_heads // kv_heads)
    choices = {"chosen": select_prefill(HEAD_DIM, 2)}
    choices |= {f"({', '.join(map(str, each))})": PrefillTiling(*each) for each in tilings}
    candidates: dict[str, Callable[[Tensor], Tensor]] = {
        label: partial(_prefilled, job, tiling, tiles) for label, tiling in choices.items()
    }
    workspace = SplitKvWorkspace(job.query.device)
    for waves in WAVES:
        tiling = choices["chosen"]._replace(waves=waves)
        candidates[f"{waves} waves"] = partial(_prefilled, job, tiling, tiles, workspace=workspace)
    if has_gluon() and sm_arch(job.query.device) == 90:
        candidates["warp-specialized"] = partial(_warp_specialized, job, tiles)
        for waves in WAVES:
            candidates[f"warp-specialized, {waves} waves"] = partial(
                _warp_specialized, job, tiles, workspace=workspace, waves=waves
            )  # fmt: skip
    result: dict[str, Any] = {}
    if peers == "flashinfer":
        try:
            candidates["flashinfer"] = flashinfers_prefill(job)
        except Exception as fault:
            result["flashinfer"] = f"failed: {str(fault)[:120]}"
    complete: Tensor | None = None
    for label, candidate in candidates.items():
        try:
            out = candidate(torch.full_like(job.query, float("nan"))).float()
            complete = out if complete is None else complete
            error = max(((one - other).norm() / other.norm()).item() for one, other in ((out[at], wanted), (out, complete)))
            if not error < WRONG:
                result[label] = f"wrong: {error:.1e}"
                continue
            out = torch.empty_like(job.query)
            microseconds = seconds(lambda *_, run=candidate, out=out: run(out), [job.cache] * LAUNCHES) * 1e6
            result[label] = [round(microseconds, 2), round(job.flop / microseconds / 1e6, 1)]
        except Exception as fault:  # a variant that this GPU cannot run is reported, and the others go on
            result[label] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
    return result


def _prefilled(
    job: PrefillJob, tiling: PrefillTiling, tiles: int, out: Tensor, workspace: SplitKvWorkspace | None = None
) -> Tensor:
    options = {**job.options, "tiling": tiling, "tiles": tiles, "workspace": workspace}
    return prefill_attention(job.query, *job.cache, *job[2:6], **options, out=out)


def _warp_specialized(
    job: PrefillJob, tiles: int, out: Tensor, workspace: SplitKvWorkspace | None = None, waves: int = 0
) -> Tensor:  # fmt: skip
    from phalanx.kernels.attention.prefill_hopper import prefill_attention as warp_specialized

    return warp_specialized(
        job.query, *job.cache, *job[2:6], scale=HEAD_DIM**-0.5, kv_scales=job.scales, tiles=tiles, out=out, workspace=workspace,
        waves=waves,
    )  # fmt: skip


def flashinfers_prefill(job: PrefillJob) -> Callable[[Tensor], Tensor]:
    """Planned once for these rows, on the back end that FlashInfer chooses."""
    import flashinfer

    rows, width = job.tables.shape
    pages = torch.arange(0, rows * width + 1, width, dtype=torch.int32)
    last = (job.lengths.cpu() - 1) % BLOCK + 1
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(PEER_BYTES, dtype=torch.uint8, device="cuda"), "NHD")
    wrapper.plan(
        job.starts.cpu(), pages, job.tables[job.slots].flatten(), last, job.query.shape[1], job.cache[0].shape[2], HEAD_DIM, BLOCK,
        causal=True, sm_scale=HEAD_DIM**-0.5, q_data_type=job.query.dtype, kv_data_type=job.cache[0].dtype,
    )  # fmt: skip
    scales = {} if job.scales is None else {"k_scale": job.scales[0], "v_scale": job.scales[1]}
    return lambda out: wrapper.run(job.query, job.cache, out=out, **scales)
