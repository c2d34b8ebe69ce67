# SPDX-License-Identifier: Apache-2.0
"""Decode attention of few rows: how the splits of a row are merged, how many they are and how they are read, on one GPU: head_dim
128, KV blocks of 16.

Each variant is verified against the reference on some of the rows, and must give the same bits again. Then two times are taken, in
us per launch and per layer, medians of 4 replays of a CUDA graph, with splits that are planned before:

alone: launches back to back, with enough copies of keys and values that none is in a cache, as `kernels.attention` times them.
layer: 20 layers of three kernels that depend on each other programmatically, as in a step: one that reads --stream MiB of weights
before it waits and then writes the queries, attention, and one that reads its output. With --stream 0 the first is as small as the
last. The weights push keys and values out of the caches.

    python -m benchmarks.kernels.attention_merge --out DIR [--layouts 32/4:e4m3,32/8:bf16] [--few 200,2048] [--rows 1,4]
        [--stream 8] [--budget 95]

Shapes are rows x tokens: first one row of --few tokens for each layout, then 4 rows, and 16 and 64 with fewer variants. After
--budget seconds no other shape begins. The last lines compare each variant with "last", which is how splits are merged where there
are many rows: the last split of a row to arrive merges them in order."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks import harness
from benchmarks.kernels.attention import Job, Memory
from benchmarks.kernels.attention_launches import BLOCK, HEAD_DIM, KV_DTYPES, REPLAYS, SCALES, WRONG, seconds
from phalanx.kernels import reference
from phalanx.kernels.attention.decode import decode_attention
from phalanx.kernels.attention.heuristics import SHORT_KV, DecodeTiling, SplitKvWorkspace, select_decode
from phalanx.kernels.attention.split_kv import plan
from phalanx.kernels.capabilities import sm_arch

LAYERS = 20
FEW_ROWS = 8
"""Up to so many rows all variants are timed."""
SHAPES = {1: "200,512,1024,2048,8192,16384,32768", 4: "512,2048,8192,32768", 16: "512,2048,8192", 64: "512,2048"}
LINK = 1024
"""Elements of a program of a kernel between attention and attention."""
WEIGHTS = 1 << 30
"""Bytes of which the layers read different ones."""


class Layout(NamedTuple):
    q_heads: int
    kv_heads: int
    kv: str

    @classmethod
    def named(cls, text: str) -> Layout:
        """32/4:e4m3"""
        heads, kv = text.split(":")
        return cls(*map(int, heads.split("/")), kv)

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads} {self.kv}"


@triton.jit
def _link(source, weights, out, elements, STEPS: tl.constexpr, LINK: tl.constexpr, SM: tl.constexpr):
    """out = source, behind STEPS * LINK weights, which are 0, for each program."""
    if SM >= 90:
        gdc_launch_dependents()
    each = tl.arange(0, LINK)
    total = tl.zeros([LINK], tl.int32)
    for step in tl.static_range(STEPS):
        total += tl.load(weights + (tl.program_id(0) * STEPS + step) * LINK + each)
    if SM >= 90:
        gdc_wait()
    place = tl.program_id(0) * LINK + each
    value = tl.load(source + place, place < elements, 0.0) + total.to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), place < elements)


class Layers:
    """The kernels about attention. stream: MiB of weights for each layer."""

    def __init__(self, stream: int) -> None:
        self._weights = torch.zeros(WEIGHTS // 4, dtype=torch.int32, device="cuda")
        self._words = (stream << 20) // 4
        self._sm = sm_arch(self._weights.device)
        self._sms = torch.cuda.get_device_properties(0).multi_processor_count

    def link(self, source: Tensor, out: Tensor, words: int, at: int = 0) -> None:
        programs = max(triton.cdiv(source.numel(), LINK), 4 * self._sms if words else 1)
        steps = words // (programs * LINK)
        first = at * words % (len(self._weights) - words)
        _link[(programs,)](
            source, self._weights[first // LINK * LINK :], out, source.numel(), STEPS=steps, LINK=LINK, SM=self._sm,
            launch_pdl=self._sm >= 90,
        )  # fmt: skip

    def layer(self, at: int, job: Job, attend: Callable[..., Tensor], query: Tensor, copy: tuple[Tensor, ...]) -> Tensor:
        self.link(job.query, query, self._words, at)
        attended = attend(query, *copy)
        out = torch.empty_like(attended)
        self.link(attended, out, 0)
        return out

    def us(self, job: Job, attend: Callable[..., Tensor]) -> float:
        query = torch.empty_like(job.query)
        calls = [partial(self.layer, at, job, attend, query, job.copies[at % len(job.copies)]) for at in range(LAYERS)]
        return harness.graph_us(calls, replays=REPLAYS, discarded=1, warmups=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument(
        "--layouts", default="32/4:e4m3,32/8:bf16,32/8:e4m3,16/2:e4m3,64/8:e4m3", help="query/KV heads, and bf16, e4m3 or int8"
    )
    parser.add_argument("--rows", default="1,4,16,64", help=f"of {','.join(map(str, SHAPES))}")
    parser.add_argument("--few", default=SHAPES[1], help="tokens of one row")
    parser.add_argument("--stream", type=int, default=8, help="MiB of weights of a layer, at most 256")
    parser.add_argument("--budget", type=float, default=95.0, help="seconds")
    arguments = parser.parse_args()
    begin = time.monotonic()
    layouts = [Layout.named(text) for text in arguments.layouts.split(",")]
    workspace, layers = SplitKvWorkspace(torch.device("cuda")), Layers(arguments.stream)
    rows = [int(each) for each in arguments.rows.split(",")]
    harness.compile_ahead(launches(layouts, rows, workspace, layers))
    print(f"compiled after {time.monotonic() - begin:.1f} s", flush=True)
    memory = {kv: Memory(kv) for kv in {layout.kv for layout in layouts}}
    figures: dict[str, Any] = {}
    for count in rows:
        for tokens in (arguments.few if count == 1 else SHAPES[count]).split(","):
            for layout in layouts:
                name = f"{layout} {count}x{tokens}"
                if time.monotonic() - begin > arguments.budget:
                    print(f"{name}: no time left")
                    continue
                job = memory[layout.kv].job(layout.q_heads, layout.kv_heads, torch.full((count,), int(tokens), dtype=torch.int32))
                figures[name] = measure(job, workspace, layers)
                print(line(name, figures[name]), flush=True)
        harness.write("kernels_attention_merge", figures, arguments.out)
    compare(figures)
    return 0


def usual(layout: Layout, rows: int, num_sms: int, *, short: bool) -> DecodeTiling:
    group, itemsize = layout.q_heads // layout.kv_heads, KV_DTYPES[layout.kv].itemsize
    return select_decode(rows, layout.kv_heads, group, HEAD_DIM, itemsize, num_sms, short=short)


def variants(layout: Layout, rows: int, num_sms: int, *, short: bool) -> Iterator[tuple[str, DecodeTiling]]:
    """ "last" first, whose splits are merged in order by the last to arrive. "apart": by a kernel of its own, heads of a program x
    splits of a block."""
    chosen = usual(layout, rows, num_sms, short=short)
    last = chosen._replace(merge_heads=0, merge_splits=0, prefetch=0)
    if chosen.merge_heads:  # its programs are small, and twice as many
        last = last._replace(extra_splits=last.extra_splits // 2, chunk=128, tile=2 * last.tile, warps=4)
    yield "last", last
    yield "last, prefetch 1", last._replace(prefetch=1)
    if not last.extra_splits:
        return
    apart = last._replace(merge_heads=1, merge_splits=32)
    yield "apart 1x32", apart
    yield "apart 2x16", apart._replace(merge_heads=2, merge_splits=16)
    yield "apart 2 in order", apart._replace(merge_heads=2, merge_splits=0)
    yield "apart, prefetch 1", apart._replace(prefetch=1)
    if rows > FEW_ROWS:
        return
    yield "last, block of 8", last._replace(merge_splits=8, registers=255)
    yield "last, block of 16", last._replace(merge_splits=16, registers=255)
    yield "apart 1x16", apart._replace(merge_splits=16)
    yield "apart 4x8", apart._replace(merge_heads=4, merge_splits=8)
    yield "apart, prefetch 4", apart._replace(prefetch=4)
    yield "apart, 256 tokens", apart._replace(chunk=256)
    yield "apart, half the splits", apart._replace(extra_splits=max(last.extra_splits // 2, 1))
    yield "apart, twice the splits", apart._replace(extra_splits=2 * last.extra_splits, chunk=64)
    small = apart._replace(tile=last.tile // 2, warps=2)
    yield "apart, 2 warps", small._replace(chunk=64)
    for prefetch in (0, 1, 2, 4):
        name = f"apart, 2 warps, twice the splits, prefetch {prefetch}"
        yield name, small._replace(chunk=64, extra_splits=2 * last.extra_splits, prefetch=prefetch)
    yield "apart, 2 stages", apart._replace(stages=2)
    yield "apart, 8 warps", apart._replace(tile=2 * last.tile, warps=8, stages=2)
    yield "apart, 2 stages, prefetch 4", apart._replace(stages=2, prefetch=4)


def launches(
    layouts: list[Layout], row_counts: list[int], workspace: SplitKvWorkspace, layers: Layers
) -> Iterator[Callable[[], Any]]:  # fmt: skip
    """One of each kernel that is timed."""
    slots, lengths = (torch.zeros(64, dtype=kind, device="cuda") for kind in (torch.int64, torch.int32))
    for layout in layouts:
        cache = torch.zeros(1, BLOCK, layout.kv_heads, HEAD_DIM, device="cuda").to(KV_DTYPES[layout.kv])
        token_scales = torch.ones(1, layout.kv_heads, BLOCK, 2, dtype=torch.bfloat16, device="cuda")
        for rows in row_counts:
            query = torch.zeros(rows, layout.q_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            tables = torch.zeros(rows, 16, dtype=torch.int32, device="cuda")
            yield partial(layers.layer, 0, Job(query, [], tables, slots, lengths, None, 0), lambda query: query, query, ())
            for short in (False, True):
                for _, tiling in variants(layout, rows, workspace.num_sms, short=short):
                    splits = torch.zeros(rows + tiling.extra_splits, 8, dtype=torch.int32, device="cuda")
                    yield partial(
                        decode_attention, query, cache, cache, tables, slots[:rows], lengths[:rows], scale=1.0, window=None,
                        kv_scales=SCALES, workspace=workspace, tiling=tiling, splits=splits if tiling.extra_splits else None,
                        early_lengths=True, token_scales=token_scales if layout.kv == "int8" else None,
                    )  # fmt: skip
                    yield partial(plan, lengths[:rows], slots[:rows], tiling, window=None, block_size=BLOCK)


def measure(job: Job, workspace: SplitKvWorkspace, layers: Layers) -> dict[str, Any]:
    """Of each variant: us of a launch alone, and of a layer; or what is wrong with it."""
    rows, q_heads, _ = job.query.shape
    key, value, *token_scales = job.copies[0]
    kv = next(kv for kv, dtype in KV_DTYPES.items() if dtype == key.dtype)
    layout, short = Layout(q_heads, key.shape[2], kv), int(job.lengths.max()) <= SHORT_KV
    sample = torch.unique(torch.linspace(0, rows - 1, 3, device="cuda").long())
    wanted = reference.decode_attention(
        job.query[sample], key, value, job.tables, job.slots[sample], job.lengths[sample], **job.options,
        token_scales=next(iter(token_scales), None),
    ).float()  # fmt: skip
    chosen = usual(layout, rows, workspace.num_sms, short=short)
    tilings = dict(variants(layout, rows, workspace.num_sms, short=short))
    if chosen not in tilings.values():
        tilings["as chosen"] = chosen
    result: dict[str, Any] = {"tilings": {label: list(tiling) for label, tiling in tilings.items()}}
    for label, tiling in tilings.items():
        attend = attention(job, tiling, workspace)
        try:
            outputs = [layers.layer(0, job, attend, torch.empty_like(job.query), job.copies[0]) for _ in range(3)]
            error = ((outputs[0][sample].float() - wanted).norm() / wanted.norm()).item()
            if not error < WRONG or not all(torch.equal(each, outputs[0]) for each in outputs):
                result[label] = f"wrong: {error:.1e}, or not the same again"
                continue
            alone = seconds(partial(attend, job.query), job.copies) * 1e6
            result[label] = [round(alone, 2), round(layers.us(job, attend), 2)]
        except Exception as fault:  # a variant that this GPU cannot run is reported, and the others go on
            result[label] = f"failed: {str(fault)[:120]}"
            torch.cuda.synchronize()
        if tiling == chosen:
            result["chosen"] = label
    return result


def attention(job: Job, tiling: DecodeTiling, workspace: SplitKvWorkspace) -> Callable[..., Tensor]:
    """From queries and a copy of keys and values to the output."""
    splits = None  # planned once for all layers
    if tiling.extra_splits:
        splits = plan(job.lengths, job.slots, tiling, window=None, block_size=BLOCK)
    return lambda query, key, value, token_scales=None: decode_attention(
        query, key, value, job.tables, job.slots, job.lengths, **job.options, workspace=workspace, tiling=tiling, splits=splits,
        early_lengths=True, token_scales=token_scales,
    )  # fmt: skip


def timed(result: dict[str, Any]) -> dict[str, list[float]]:
    return {label: row for label, row in result.items() if isinstance(row, list)}


def line(name: str, result: dict[str, Any]) -> str:
    """The first variant, the chosen (*), and the three with the fastest layers: us alone, and of a layer; and what failed."""
    rows = timed(result)
    best = sorted(rows, key=lambda label: rows[label][1])[:3]
    shown = dict.fromkeys(label for label in ("last", result.get("chosen", ""), *best) if label in rows)
    marks = {result.get("chosen"): "*"}
    text = "   ".join(f"{label}{marks.get(label, '')} {rows[label][0]:.2f} {rows[label][1]:.2f}" for label in shown)
    faults = [f"\n    {label}: {row}" for label, row in result.items() if isinstance(row, str) and label != "chosen"]
    return f"{name:24} {text}" + "".join(faults)


def compare(figures: dict[str, Any]) -> None:
    """For the shapes of as many rows: what each variant saves, against "last"."""
    saved: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for name, result in figures.items():
        rows = timed(result)
        for label, row in rows.items():
            if "last" in rows:
                saved[name.split()[-1]][label].append([row[at] - rows["last"][at] for at in range(2)])
    print("\nmean over the layouts, us more than last: alone, layer")
    for shape, labels in saved.items():
        means = {label: [statistics.mean(each) for each in zip(*rows, strict=True)] for label, rows in labels.items()}
        best = sorted(means, key=lambda label: means[label][1])
        print(f"{shape:9} " + "   ".join(f"{label} {means[label][0]:+.2f} {means[label][1]:+.2f}" for label in best))


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(status)
