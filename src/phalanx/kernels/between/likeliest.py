# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The likeliest token of each row of logits, whose vocabulary may be split over ranks: keys of parts, then the largest of these.

A key holds a logit and its token so that a larger key is a larger logit, or of equal ones the lower token (see `sampling.keys`).
Every program has a part of one row and writes its key; whoever merges them reads a few words per row. That needs no atomics and
no memory of its own, and gives the same whatever the order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.residual_rms_norm import capability

BLOCK = 2048
"""Logits that a program looks at at a time."""
PROGRAMS = 512
"""About so many programs find keys, however many rows there are: some per processor of a large GPU."""

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _keys(logits, keys, stride, held, begin, parts, span, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """keys [rows, parts]; columns 0 .. held - 1 of a row of logits are tokens begin, begin + 1, ..."""
    if PTX >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    start = logits + row.to(tl.int64) * stride
    best = tl.full([BLOCK], -(2**31), tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    at = part * span
    end = tl.minimum(at + span, held)
    while at < end:
        column = at + lane
        value = tl.load(start + column, column < held, float("-inf")).to(tl.float32)
        value = tl.where(value == 0.0, 0.0, value)  # -0 is no less than 0
        bits = value.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(value == value, order, 0x7FFFFFFF)
        order = tl.where(column < held, order, -(2**31))
        better = order > best
        place = tl.where(better, column, place)
        best = tl.where(better, order, best)
        at += BLOCK
    key = (best.to(tl.int64) << 32) | (0xFFFFFFFF - (begin + place).to(tl.int64))
    key = tl.where(best == -(2**31), LOWEST, key)
    tl.store(keys + row * parts + part, tl.max(key, 0))


@triton.jit
def _settle(
    keys, tokens, last_tokens, slots, kv_slots, rows, parts,
    RANKS: tl.constexpr, REMEMBER: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A program has a row of keys [ranks, rows, parts]."""
    if PTX >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST, tl.int64)
    for rank in tl.static_range(RANKS):
        best = tl.maximum(best, tl.load(keys + (rank * rows + row) * parts + part, part < parts, LOWEST))
    token = 0xFFFFFFFF - (tl.max(best, 0) & 0xFFFFFFFF)
    tl.store(tokens + row, token)
    if REMEMBER:
        tl.store(last_tokens + tl.load(slots + row), token, tl.load(kv_slots + row) >= 0)


def parts_of(rows: int, width: int) -> int:
    """Into how many parts a row is cut; the same on every rank."""
    return max(1, min(-(-PROGRAMS // max(rows, 1)), -(-width // BLOCK)))


def keys(logits: Tensor, begin: int, held: int) -> Tensor:
    """The kernel of `sampling.keys`: [S, parts] for logits [S, W] whose rows are contiguous."""
    rows, width = logits.shape
    parts = parts_of(rows, width)
    found = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    if rows:
        ptx = capability(logits.device)
        span = triton.cdiv(triton.cdiv(width, parts), BLOCK) * BLOCK
        _keys[(rows, parts)](
            logits, found, logits.stride(0), held, begin, parts, span, BLOCK=BLOCK, PTX=ptx, num_warps=8, launch_pdl=ptx >= 90
        )
    return found


def settle(keys: Tensor, tokens: Tensor, remember: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """The kernel of `sampling.settle`."""
    ranks, rows, parts = keys.shape
    if rows:
        ptx = capability(keys.device)
        _settle[(rows,)](
            keys, tokens, *(remember or (tokens, tokens, tokens)), rows, parts, RANKS=ranks, REMEMBER=remember is not None,
            BLOCK=triton.next_power_of_2(parts), PTX=ptx, num_warps=1, launch_pdl=ptx >= 90,
        )  # fmt: skip
