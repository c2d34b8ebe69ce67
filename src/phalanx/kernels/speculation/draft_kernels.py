# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The kernels of `drafts`: one launch for each op, a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 64
"""Places of a row, at least as many as it has tokens: one variant for all."""
_LAST, _LENGTH, _DRAFTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_IN_SLOT = tl.constexpr(-2)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """x >> BITS of the unsigned number with these bits."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _splitmix(x):
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


@triton.jit(do_not_specialize=["slot_count", "table_width", "block_size", "width"])
def _expand_drafts(
    state, tables, slots, starts, capacities, ids, token_ids, positions, kv_slots, kv_lengths, drafts,
    slot_count, table_width, block_size, width, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    inside = lane < width
    slot = tl.load(slots + row)
    start = tl.load(starts + row)
    start = tl.where(start == _IN_SLOT, tl.load(state + _LENGTH * slot_count + slot), start)
    capacity = tl.load(capacities + row)
    source = tl.where(lane == 0, _LAST, _DRAFTS - 1 + lane)
    own = tl.load(state + source * slot_count + slot, inside, other=-1)
    token = tl.load(ids + row * width + lane, inside, other=-1)
    token = tl.where(token == _IN_SLOT, own, token)
    at = start + lane
    stored = (at < capacity) & (token >= 0)
    place = tl.maximum(tl.minimum(at, capacity - 1), 0)
    block = tl.load(tables + slot * table_width + place // block_size, inside, other=0).to(tl.int64)
    out = row * width + lane
    tl.store(token_ids + out, tl.maximum(token, 0), inside)
    tl.store(positions + out, place, inside)
    tl.store(kv_slots + out, tl.where(stored, block * block_size + place % block_size, -1), inside)
    tl.store(kv_lengths + out, (place + 1).to(tl.int32), inside)
    tl.store(drafts + row * (width - 1) + lane - 1, tl.where(stored, token, -1), inside & (lane > 0))
    tl.debug_barrier()  # every thread has read the start
    tl.store(starts + row, start)


@triton.jit(do_not_specialize=["slot_count", "draft_rows", "rows", "count"])
def _accept_drafts(
    state, slots, starts, tokens, drafts, out, rates, slot_count, draft_rows, rows, count, RATES: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """rows: that verify `count` drafts each, and come first; draft_rows: drafts that a slot has room for."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    verifies = row < rows
    slot, start = tl.load(slots + row), tl.load(starts + row)
    first = tl.where(verifies, row * (count + 1), rows * count + row)
    width = tl.where(verifies, count + 1, 1)
    token = tl.load(tokens + first + lane, lane < width, other=-1)
    draft = tl.load(drafts + row * count + lane, verifies & (lane < count), other=-1)
    matches = (token == draft) & (draft >= 0)
    if RATES:
        uniform = _shift(_splitmix(slot * -7046029254386353131 + start + lane), 40).to(tl.float32) * (2.0**-24)
        matches = (draft >= 0) & (uniform < tl.load(rates + lane, lane < count, other=0.0))
        token = tl.where(matches, draft, token)
    accepted = tl.min(tl.where(matches, LANES, lane), 0)
    result = tl.where(lane <= accepted, token, -1)
    tl.store(out + row * (count + 2) + lane, tl.where(lane < width, result, -1), lane < count + 1)
    tl.store(out + row * (count + 2) + count + 1, tl.sum((draft >= 0).to(tl.int64), 0))
    tl.store(state + (_DRAFTS + lane) * slot_count + slot, tl.full([LANES], -1, tl.int64), lane < draft_rows)
    tl.store(state + _LAST * slot_count + slot, tl.sum(tl.where(lane == accepted, token, 0), 0))
    tl.store(state + _LENGTH * slot_count + slot, start + 1 + accepted)


@triton.jit(do_not_specialize=["count"])
def _noise_keys(seeds, positions, keys, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    seed, position = tl.load(seeds + at, inside, other=0), tl.load(positions + at, inside, other=0)
    mixed = _splitmix(_splitmix(seed + -7046029254386353131) + (position + 1) * -7046029254386353131)
    tl.store(keys + at, mixed.to(tl.int32), inside)
    tl.store(keys + count + at, _shift(mixed, 32).to(tl.int32), inside)


def expand_drafts(
    state: Tensor, tables: Tensor, block_size: int, slots: Tensor, starts: Tensor, capacities: Tensor, ids: Tensor, *,
    token_ids: Tensor, positions: Tensor, kv_slots: Tensor, kv_lengths: Tensor, drafts: Tensor,
) -> None:  # fmt: skip
    """The kernel of `drafts.expand_drafts`."""
    rows, width = ids.shape
    _expand_drafts[(rows,)](
        state, tables, slots, starts, capacities, ids, token_ids, positions, kv_slots, kv_lengths, drafts,
        state.shape[1], tables.shape[1], block_size, width, LANES=LANES, num_warps=1,
    )  # fmt: skip


def accept_drafts(
    state: Tensor, slots: Tensor, starts: Tensor, tokens: Tensor, drafts: Tensor, out: Tensor, rates: Tensor | None
) -> None:
    """The kernel of `drafts.accept_drafts`."""
    rows, count = drafts.shape
    _accept_drafts[(len(slots),)](
        state, slots, starts, tokens, drafts, out, starts if rates is None else rates, state.shape[1], len(state) - 2, rows, count,
        RATES=rates is not None, LANES=LANES, num_warps=1,
    )  # fmt: skip


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The kernel of `drafts.noise_keys`."""
    keys = torch.empty((2, len(seeds)), dtype=torch.int32, device=seeds.device)
    if len(seeds):
        _noise_keys[(triton.cdiv(len(seeds), 256),)](seeds, positions, keys, len(seeds), BLOCK=256, num_warps=2)
    return keys
