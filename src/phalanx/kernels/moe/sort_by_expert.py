# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Pairs of a token and one of its experts, sorted by expert on the device, and cut into tiles for `grouped_gemm`.

Up to ONE_KERNEL_PAIRS, in one kernel: a program looks at all pairs, so that none waits for another, and has one expert's; or, of
more experts than MANY_EXPERTS, it places a few pairs. Of more pairs, a kernel before it counts each segment's, and a program has
one expert's in one segment. Experts without pairs get no tile. Pairs of one expert stay in their order: the same lists each time.
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
MANY_EXPERTS = 256
"""From more on a histogram of all takes longer than to compare all pairs: 512 experts, top 10, on an H200: 64 tokens 17 and 7 us,
256 tokens 37 and 16; 128 experts, 64 tokens: 3 and 5."""
CHUNK, LOW = 256, 16
"""Where pairs are compared: those that a program looks at together, and values of the lower digit."""
MAX_CHUNK = 4096
"""Else: pairs that a program looks at together."""
ONE_KERNEL_PAIRS = 8192
"""Up to so many pairs every program looks at all of them."""
SORTED_PAIRS = tl.constexpr(1 << 20)
"""More than the pairs of one kernel; times experts it fits int32."""
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
def _sort_by_pairs(
    ids, pairs, tiles, counts, load, count, first, experts, HIGH: tl.constexpr, LOW: tl.constexpr, CHUNK: tl.constexpr,
    OWN: tl.constexpr, TOKENS: tl.constexpr, EXTRA: tl.constexpr, FIELDS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """A program places OWN pairs: each behind those that compare less by expert and number. All programs count the experts' pairs,
    as a GEMM of ones: an expert's number has two digits, of HIGH and LOW values."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0) * OWN + tl.arange(0, OWN)
    own = _local_experts(ids, pair, count, first, experts)
    high, low = tl.arange(0, HIGH)[:, None], tl.arange(0, LOW)[:, None]
    sizes = tl.zeros([HIGH, LOW], tl.float32)
    before = tl.zeros([OWN, CHUNK], tl.int32)
    for at in range(0, count, CHUNK):
        other = at + tl.arange(0, CHUNK)[None, :]
        expert = _local_experts(ids, other, count, first, experts)
        is_high = (expert // LOW == high) & (expert < experts)
        sizes = tl.dot(is_high.to(tl.float16), tl.trans((expert % LOW == low).to(tl.float16)), sizes)
        before += (expert * SORTED_PAIRS + other < (own * SORTED_PAIRS + pair)[:, None]).to(tl.int32)
    position = tl.sum(before, 1)
    size_of = tl.reshape(sizes, [1, HIGH * LOW]).to(tl.int32)
    tiles_of = _num_tiles(size_of, TOKENS, EXTRA)
    bins = tl.arange(0, HIGH * LOW)[None, :]
    is_earlier = bins < own[:, None]
    rank = position - tl.sum(tl.where(is_earlier, size_of, 0), 1)
    size = tl.sum(tl.where(bins == own[:, None], size_of, 0), 1)
    own_tiles, part, is_local = _num_tiles(size, TOKENS, EXTRA), rank // TOKENS, own < experts
    tl.store(pairs + position, pair, is_local)
    begins = is_local & (rank % TOKENS == 0) & (part < own_tiles)
    place = tiles + (tl.sum(tl.where(is_earlier, tiles_of, 0), 1) + part) * FIELDS
    tl.store(place, own, begins)
    tl.store(place + 1, position, begins)
    tl.store(place + 2, tl.where(part == own_tiles - 1, size - rank, TOKENS), begins)
    if load is not None:
        tl.atomic_add(load + own, size.to(tl.int64), is_local & (rank == 0), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(counts, tl.sum(tl.sum(tiles_of, 1), 0))
        tl.store(counts + 1, tl.sum(tl.sum(size_of, 1), 0))


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
    cut = {"TOKENS": pairs, "EXTRA": extra, "FIELDS": TILE_FIELDS}
    common = {"SM": sm, "launch_pdl": sm >= 90}
    if padded <= ONE_KERNEL_PAIRS and experts > MANY_EXPERTS:
        own, high = 4 if padded <= CHUNK else 16, max(16, triton.next_power_of_2(triton.cdiv(experts, LOW)))
        _sort_by_pairs[(triton.cdiv(count, own),)](
            ids, *lists[:3], load, count, first, experts, HIGH=high, LOW=LOW, CHUNK=min(CHUNK, padded), OWN=own, **cut, **common
        )
        return lists
    common |= {"BINS": max(16, triton.next_power_of_2(experts + 1)), "CHUNK": min(MAX_CHUNK, padded)}
    common["num_warps"] = 8 if padded > 1024 else 4
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
