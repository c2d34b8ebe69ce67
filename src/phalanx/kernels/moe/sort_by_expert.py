# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Pairs of a token and one of its experts, sorted by expert on the device, and cut into tiles for `grouped_gemm`.

A program has one expert: it counts the pairs of all experts before its own, so that no program waits for another. Experts without
pairs get no tile. Pairs of one expert stay in their order: the same lists each time.
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


class Tiles(NamedTuple):
    """pairs [P] int32: the numbers of pairs (token * top_k + slot) in sorted order. tiles [most, TILE_FIELDS] int32, the first
    counts[0] of which exist. counts [2] int32: tiles; and pairs in sorted order, which are those with experts of this rank. most:
    no routing has more tiles."""

    pairs: Tensor
    tiles: Tensor
    counts: Tensor
    most: int


def empty_tiles(pairs: int, most: int, device: torch.device) -> Tiles:
    """Uninitialized lists."""
    first, second, third = (torch.empty(size, dtype=torch.int32, device=device) for size in ((pairs,), (most, TILE_FIELDS), (2,)))
    return Tiles(first, second, third, most)


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
    size = tl.sum(tl.where(bins == expert, sizes, 0), 0)
    tile = tl.sum(tl.where(bins < expert, _num_tiles(sizes, TOKENS, EXTRA), 0), 0)
    written = before
    for at in range(0, count, CHUNK):
        place = at + tl.arange(0, CHUNK)
        is_own = (_local_experts(ids, place, count, first, experts) == expert).to(tl.int32)
        tl.store(pairs + written + tl.cumsum(is_own, 0) - 1, place, is_own != 0)
        written += tl.sum(is_own, 0)
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


def sort_by_expert(ids: Tensor, *, first: int, experts: int, tokens: int, extra: int = 0, load: Tensor | None = None) -> Tiles:
    """ids [T, k] int32 contiguous; the experts of this rank are first .. first + experts. tokens: pairs of a full tile. extra: up
    to so many more are in an expert's last tile rather than in another, extra <= tokens. load [experts] int64: the sizes are added
    to it."""
    count = ids.numel()
    most = min(count, count // tokens + experts)
    lists = empty_tiles(count, most, ids.device)
    sm = sm_arch(ids.device)
    rows, top_k = ids.shape
    # Of powers of 2 each: it changes where `heuristics.warmup_token_counts` has a count.
    chunk = min(MAX_CHUNK, max(16, triton.next_power_of_2(rows) * triton.next_power_of_2(top_k)))
    _sort_by_expert[(experts,)](
        ids, *lists[:3], load, count, first, experts, BINS=max(16, triton.next_power_of_2(experts + 1)), CHUNK=chunk, TOKENS=tokens,
        EXTRA=extra, FIELDS=TILE_FIELDS, SM=sm, num_warps=8 if chunk > 1024 else 4, launch_pdl=sm >= 90,
    )  # fmt: skip
    return lists
