# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""What chooses the keys of sparse attention, in two kernels: scores of the cached keys, and the slots of the best ones, exactly.
The plain code: `indexer.index_scores` and `indexer.best_keys`, a row for each query.

The host reads nothing: a launch may be captured, and replayed with other lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.quantize import widened

TILE = 64
"""Keys that a program scores at a time."""
SCORE_PROGRAMS = 2048
"""Programs of a launch that scores, at least, where rows have so many tiles: one of all tables' tiles each would be millions in a
captured launch, and most of them beyond their row's length."""
SCAN, SCAN_WARPS = 4096, 16
"""Scores that a program takes at a time as it looks for the best, and its warps."""


@triton.jit(do_not_specialize=["out_stride", "table_stride"], do_not_specialize_on_alignment=["tables", "table_rows", "lengths"])
def _index_scores(
    query, weights, keys, scales, tables, table_rows, lengths, out, heads, query_stride, weights_stride, table_stride, out_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Program (row, some tiles of its keys: every n-th one of n programs)."""
    row, length = tl.program_id(0).to(tl.int64), tl.load(lengths + tl.program_id(0))
    head, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    own = tl.load(query + row * query_stride + head[:, None] * DIM + dim, (head[:, None] < heads) & (dim < DIM), 0.0)
    weight = tl.load(weights + row * weights_stride + head, head < heads, 0.0)
    for first in range(tl.program_id(1) * TILE, length, tl.num_programs(1) * TILE):
        position = first + tl.arange(0, TILE)
        inside = position < length
        slot = tl.load(table + position // BLOCK_SIZE, inside, 0).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        key = tl.load(keys + slot[:, None] * DIM + dim, inside[:, None] & (dim < DIM), 0)
        if scales is not None:
            key = widened(key, own, SM)
        scored = tl.dot(own, tl.trans(key), input_precision="ieee")
        total = tl.sum(tl.maximum(scored, 0.0) * weight[:, None], 0)
        if scales is not None:
            total *= tl.load(scales + slot, inside, 0.0)  # positive: ReLU lets it through
        tl.store(out + row * out_stride + position, total, inside)


@triton.jit
def _ordered(scores, position, length):
    """Of fp32 scores unsigned integers in the same order; a zero has no sign."""
    bits = (tl.load(scores + position, position < length, 0.0) + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["score_stride", "table_stride"], do_not_specialize_on_alignment=["tables", "table_rows", "lengths"])
def _best_slots(
    scores, tables, table_rows, lengths, out, table_stride, score_stride, count,
    BLOCK_SIZE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Program (row): radix select of the count-th highest score, 8 bits at a time; then all above, and the first of its equals."""
    row, length = tl.program_id(0).to(tl.int64), tl.load(lengths + tl.program_id(0))
    scores += row * score_stride
    lane, bins = tl.arange(0, SCAN), tl.arange(0, 512)
    prefix, wanted = tl.full([], 0, tl.uint32), tl.minimum(count, length)
    if length > count:
        for digit in range(4):
            shift = 24 - 8 * digit
            histogram = tl.zeros([512], tl.int32)
            for first in range(0, length, SCAN):
                position = first + lane
                key = _ordered(scores, position, length) >> shift
                member = (position < length) & ((key >> 8) == prefix)
                histogram += tl.histogram(tl.where(member, (key & 255).to(tl.int32), 256), 512)
            histogram = tl.where(bins < 256, histogram, 0)
            above = tl.cumsum(histogram, 0, reverse=True)
            best = tl.max(tl.where((above >= wanted) & (bins < 256), bins, -1), 0)
            wanted -= tl.sum(tl.where(bins > best, histogram, 0), 0)
            prefix = (prefix << 8) | best.to(tl.uint32)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    written, equals = 0, 0
    for first in range(0, length, SCAN):
        position = first + lane
        key, inside = _ordered(scores, position, length), position < length
        equal = (inside & (key == prefix) & (length > count)).to(tl.int32)
        rank = equals + tl.cumsum(equal, 0)
        taken = inside & ((length <= count) | (key > prefix) | ((equal > 0) & (rank <= wanted)))
        place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        slot = tl.load(table + position // BLOCK_SIZE, taken, 0) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(out + row * count + place, slot, taken)
        written += tl.sum(taken.to(tl.int32), 0)
        equals += tl.sum(equal, 0)


def index_scores(
    query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, block_tables: Tensor, table_rows: Tensor, lengths: Tensor
) -> Tensor:
    """[R, tokens of a table] fp32: of each row's keys, and behind them anything. Arguments as of `dispatch.best_slots`."""
    rows, heads, dim = query.shape
    block_size, longest = keys.shape[1], block_tables.shape[1] * keys.shape[1]
    scores = torch.empty((rows, longest), dtype=torch.float32, device=query.device)
    if rows:
        _index_scores[(rows, min(triton.cdiv(longest, TILE), triton.cdiv(SCORE_PROGRAMS, rows)))](
            query, weights, keys if scales is None else keys.view(torch.uint8), scales, block_tables, table_rows, lengths, scores,
            heads, query.stride(0), weights.stride(0), block_tables.stride(0), scores.stride(0),
            HEADS=max(16, triton.next_power_of_2(heads)), DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
            BLOCK_SIZE=block_size, TILE=TILE, SM=sm_arch(query.device), num_warps=4,
        )  # fmt: skip
    return scores


def best_slots(
    query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, block_tables: Tensor, table_rows: Tensor, lengths: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """The kernels of `dispatch.best_slots`."""
    scores = index_scores(query, weights, keys, scales, block_tables, table_rows, lengths)
    if len(out):
        _best_slots[(len(out),)](
            scores, block_tables, table_rows, lengths, out, block_tables.stride(0), scores.stride(0), out.shape[1],
            BLOCK_SIZE=keys.shape[1], SCAN=SCAN, num_warps=SCAN_WARPS,
        )  # fmt: skip
