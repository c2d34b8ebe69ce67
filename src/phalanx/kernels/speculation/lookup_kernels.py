# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The kernels of `lookup`. Every program searches a part of one row and writes the key of its best match; the kernel that merges
these keys reads a few words per row, and copies the drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
PROGRAMS = 512
"""About so many programs search, however many rows there are."""


@triton.jit(do_not_specialize=["width", "stride", "limit"])
def _append_tokens(history, slots, lengths, sampled, width, stride, limit, BLOCK: tl.constexpr):
    """A program has one row; width: columns of `sampled`."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    tokens = tl.load(sampled + row * width + lane, lane < width - 1, other=-1)
    count = tl.sum((tokens >= 0).to(tl.int32), 0)
    at = tl.load(lengths + row) + 1 - count + lane
    slot = tl.load(slots + row)
    tl.store(history + slot * stride + at, tokens.to(tl.int32), (tokens >= 0) & (at < limit))


@triton.jit(do_not_specialize=["text", "stride", "limit", "parts"])
def _search(
    history, slots, lengths, begins, keys, text, stride, limit, parts, LEAST: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part) searches every `parts`-th block of the row, from the beginning of its prediction on."""
    row, part = tl.program_id(0), tl.program_id(1)
    end = tl.minimum(tl.load(lengths + row) + text, limit - 1)
    slot = tl.load(slots + row)
    tokens = history + slot * stride
    begin = tl.load(begins + slot)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1, tl.int64)
    at = begin + part * BLOCK
    while at < end:
        place = at + lane
        predicted = place < text
        first = tl.where(predicted, begin, text)
        run = place < end
        equal = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MOST):
            last = tl.load(tokens + end - back, end - back >= text, other=-1)
            earlier = tl.load(tokens + place - back, run & (place - back >= first), other=-2)
            run = run & (earlier == last)
            equal += run.to(tl.int64)
        key = (equal << 32) + (predicted.to(tl.int64) << 31) + place
        best = tl.maximum(best, tl.where(equal >= LEAST, key, -1))
        at += parts * BLOCK
    tl.store(keys + row * parts + part, tl.max(best, 0))


@triton.jit(do_not_specialize=["text", "stride", "limit", "parts", "count"])
def _copy_drafts(
    history, slots, lengths, keys, drafts, text, stride, limit, parts, count, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    best = tl.max(tl.load(keys + row * parts + lane, lane < parts, other=-1), 0)
    end = tl.minimum(tl.load(lengths + row) + text, limit - 1)
    match = tl.where(best >= 0, best & 0x7FFFFFFF, 0)
    period = tl.where(match < text, count, tl.maximum(end - match, 1))
    place = tl.arange(0, BLOCK)
    tokens = history + tl.load(slots + row) * stride
    following = match + 1 + place % period
    inside = (place < count) & (best >= 0) & ((match >= text) | (following < text))
    token = tl.load(tokens + following, inside, other=-1)
    tl.store(drafts + row * count + place, token.to(tl.int64), place < count)


def append_tokens(history: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
    """The kernel of `lookup.append_tokens`."""
    rows, width = sampled.shape
    if rows:
        _append_tokens[(rows,)](
            history, slots, lengths, sampled, width, history.stride(0), history.shape[1], BLOCK=_lanes(width), num_warps=1
        )


def look_up(
    history: Tensor, slots: Tensor, lengths: Tensor, begins: Tensor, text: int, least: int, most: int, count: int
) -> Tensor:
    """The kernels of `lookup.look_up`."""
    rows, limit = len(slots), history.shape[1]
    drafts = torch.empty((rows, count), dtype=torch.int64, device=history.device)
    if rows:
        parts = max(1, min(PROGRAMS // rows, triton.cdiv(limit, BLOCK)))
        keys = torch.empty((rows, parts), dtype=torch.int64, device=history.device)
        _search[(rows, parts)](
            history, slots, lengths, begins, keys, text, history.stride(0), limit, parts, LEAST=least, MOST=most, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
        _copy_drafts[(rows,)](
            history, slots, lengths, keys, drafts, text, history.stride(0), limit, parts, count, PARTS=PROGRAMS,
            BLOCK=_lanes(count), num_warps=4,
        )  # fmt: skip
    return drafts


def _lanes(count: int) -> int:
    """A power of two that is at least `count`; mostly the same, so that few variants are compiled."""
    return max(64, int(triton.next_power_of_2(count)))
