# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Pairs of a token and one of its experts, sorted by expert on the device, and cut into tiles for `grouped_gemm`.

A program has one expert: it counts the pairs of all experts before its own, so that no program waits for another. Of many pairs, a
kernel before it counts each segment's, and a program has one expert's pairs in one segment. Experts without pairs get no tile.
Pairs of one expert stay in their order: the same lists each time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch

TILE_FIELDS = 4
"""int32 of a tile: local expert, first of its pairs in sorted order, number of them, and one that pads."""
MAX_CHUNK = 4096
"""Pairs that a program looks at together."""
ONE_KERNEL_PAIRS = 8192
"""Up to so many pairs every program counts all of them."""
MAX_SEGMENTS = 64
"""Segments of many pairs: rows of the table of counts, which a program holds in registers."""


class Tiles(NamedTuple):
    """pairs [P] int32: the numbers of pairs (token * top_k + slot) in sorted order. tiles [most, TILE_FIELDS] int32, the first
    counts[0] of which exist. counts [2] int32: tiles; and pairs in sorted order, which are those with experts of this rank. most:
    no routing has more tiles. in_order: `pairs` are 0 .. P - 1, and need not be read."""

    pairs: Tensor
    tiles: Tensor
    counts: Tensor
    most: int
    in_order: bool = False


def empty_tiles(pairs: int, most: int, device: torch.device) -> Tiles:
    """Uninitialized lists."""
    first, second, third = (torch.empty(size, dtype=torch.int32, device=device) for size in ((pairs,), (most, TILE_FIELDS), (2,)))
    return Tiles(first, second, third, most)


@triton.jit
def tile_at(tiles, tile, FIELDS: tl.constexpr):
    """Its expert (int64), first position and number of pairs. They mean nothing where there are fewer tiles: whoever reads them
    before the number of tiles is there waits once, not twice."""
    place = tiles + tile * FIELDS
    return tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def _local_experts(ids, place, count, first, experts):
    """The local numbers of the pairs' experts, `experts` for those of other ranks."""
    local = tl.load(ids + place, place < count, -1) - first
    return tl.where((place < count) & (local >= 0) & (local < experts), local, experts)


@triton.jit
def _num_tiles(size, TOKENS: tl.constexpr, EXTRA: tl.constexpr):
    """Tiles of an expert with `size` pairs: TOKENS in each, and up to EXTRA more in the last."""
    return tl.where(size > 0, tl.maximum((size - EXTRA + (TOKENS - 1)) // TOKENS, 1), 0)


@triton.jit(do_not_specialize=["count", "first"], do_not_specialize_on_alignment=["load"])
def _sort_by_expert(
    ids, pairs, tiles, counts, load, count, first, experts, BINS: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    EXTRA: tl.constexpr, FIELDS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    sizes = tl.zeros([BINS], tl.int32)
    for at in range(0, count, CHUNK):
        sizes += tl.histogram(_local_experts(ids, at + tl.arange(0, CHUNK), count, first, experts), BINS)
    before = tl.sum(tl.where(bins < expert, sizes, 0), 0)
    written = before
    for at in range(0, count, CHUNK):
        written = _store_pairs(ids, pairs, written, expert, at, count, first, experts, CHUNK)
    _store_expert_tiles(tiles, counts, load, sizes, bins, before, expert, experts, TOKENS, EXTRA, FIELDS)


@triton.jit
def _store_pairs(ids, pairs, written, expert, at, count, first, experts, CHUNK: tl.constexpr):
    """Append those of CHUNK pairs from `at` on that are of this expert; returns where the next one goes."""
    place = at + tl.arange(0, CHUNK)
    is_own = (_local_experts(ids, place, count, first, experts) == expert).to(tl.int32)
    tl.store(pairs + written + tl.cumsum(is_own, 0) - 1, place, is_own != 0)
    return written + tl.sum(is_own, 0)


@triton.jit
def _store_expert_tiles(
    tiles, counts, load, sizes, bins, before, expert, experts, TOKENS: tl.constexpr, EXTRA: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    """The tiles of an expert, whose pairs begin at `before`. sizes: pairs of each of the bins."""
    size = tl.sum(tl.where(bins == expert, sizes, 0), 0)
    tile = tl.sum(tl.where(bins < expert, _num_tiles(sizes, TOKENS, EXTRA), 0), 0)
    if load is not None:
        tl.store(load + expert, tl.load(load + expert) + size)
    own_tiles = _num_tiles(size, TOKENS, EXTRA)
    for i in range(0, own_tiles):
        place = tiles + (tile + i) * FIELDS
        tl.store(place, expert)
        tl.store(place + 1, before + i * TOKENS)
        tl.store(place + 2, tl.where(i == own_tiles - 1, size - i * TOKENS, TOKENS))
    if expert == experts - 1:
        tl.store(counts, tile + own_tiles)
        tl.store(counts + 1, before + size)


@triton.jit(do_not_specialize=["count", "first"])
def _count_segments(
    ids, table, count, first, experts, BINS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """table [segments, BINS] int32: the pairs of each expert in each segment, which has CHUNKS times CHUNK pairs."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    segment = tl.program_id(0)
    sizes = tl.zeros([BINS], tl.int32)
    for i in range(0, CHUNKS):
        place = (segment * CHUNKS + i) * CHUNK + tl.arange(0, CHUNK)
        sizes += tl.histogram(_local_experts(ids, place, count, first, experts), BINS)
    tl.store(table + segment * BINS + tl.arange(0, BINS), sizes)


@triton.jit(do_not_specialize=["count", "segments", "first"], do_not_specialize_on_alignment=["load"])
def _sort_segments(
    ids, table, pairs, tiles, counts, load, count, segments, first, experts, BINS: tl.constexpr, SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, EXTRA: tl.constexpr, FIELDS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    expert, segment = tl.program_id(0), tl.program_id(1)
    bins = tl.arange(0, BINS)
    each = tl.arange(0, SEGMENTS)[:, None]
    by_segment = tl.load(table + each * BINS + bins[None, :], each < segments, 0)
    sizes = tl.sum(by_segment, 0)
    before = tl.sum(tl.where(bins < expert, sizes, 0), 0)
    earlier = tl.sum(tl.where(each < segment, by_segment, 0), 0)
    written = before + tl.sum(tl.where(bins == expert, earlier, 0), 0)
    for i in range(0, CHUNKS):
        written = _store_pairs(ids, pairs, written, expert, (segment * CHUNKS + i) * CHUNK, count, first, experts, CHUNK)
    if segment == 0:
        _store_expert_tiles(tiles, counts, load, sizes, bins, before, expert, experts, TOKENS, EXTRA, FIELDS)


def sort_by_expert(ids: Tensor, *, first: int, experts: int, pairs: int, extra: int = 0, load: Tensor | None = None) -> Tiles:
    """ids [T, k] int32 contiguous; the experts of this rank are first .. first + experts. pairs: pairs of a full tile. extra: up
    to so many more are in an expert's last tile rather than in another, extra <= pairs. load [experts] int64: the sizes are added
    to it."""
    count = ids.numel()
    most = min(count, count // pairs + experts)
    lists = empty_tiles(count, most, ids.device)
    sm = sm_arch(ids.device)
    rows, top_k = ids.shape
    # Of powers of 2 each: variants change where `heuristics.warmup_token_counts` has a count.
    padded = max(16, triton.next_power_of_2(rows) * triton.next_power_of_2(top_k))
    common = {"BINS": max(16, triton.next_power_of_2(experts + 1)), "CHUNK": min(MAX_CHUNK, padded), "SM": sm}
    common |= {"num_warps": 8 if padded > 1024 else 4, "launch_pdl": sm >= 90}
    cut = {"TOKENS": pairs, "EXTRA": extra, "FIELDS": TILE_FIELDS}
    if padded <= ONE_KERNEL_PAIRS:
        _sort_by_expert[(experts,)](ids, *lists[:3], load, count, first, experts, **cut, **common)
        return lists
    chunks = max(1, padded // (MAX_CHUNK * MAX_SEGMENTS))
    segments = triton.cdiv(count, chunks * MAX_CHUNK)
    table = torch.empty((segments, common["BINS"]), dtype=torch.int32, device=ids.device)
    _count_segments[(segments,)](ids, table, count, first, experts, CHUNKS=chunks, **common)
    _sort_segments[(experts, segments)](
        ids, table, *lists[:3], load, count, segments, first, experts, SEGMENTS=padded // (chunks * MAX_CHUNK), CHUNKS=chunks,
        **cut, **common,
    )  # fmt: skip
    return lists
