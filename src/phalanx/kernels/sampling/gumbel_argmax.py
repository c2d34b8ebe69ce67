# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Argmax and Gumbel-max of each row of logits, whose vocabulary may be split over ranks: keys of parts of a row, then the largest
key.

A key packs a logit and its token so that a larger key is a larger logit, or of equal logits the lower token (see
`reference.packed_argmax_keys`). Every program has a part of one row and writes its key; the kernel that merges them reads a few
words per row. That needs no atomics and no workspace, and the result does not depend on the order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.reference import NOT_FINITE

BLOCK = 2048
"""Logits that a program loads at a time."""
PROGRAMS = 512
"""About so many programs compute keys, however many rows there are: a few per multiprocessor of a large GPU."""

LOWEST = tl.constexpr(-(2**63))
NAN = tl.constexpr(0x7FFFFFFF << 32)  # the high half of the key of a NaN
NO_TOKEN = tl.constexpr(NOT_FINITE)


@triton.jit
def _better(value, column, width, best, place):
    """The highest value of each lane so far, as an integer in the order of floats, and the column where it came first."""
    value = tl.where(value == 0.0, 0.0, value)  # -0 is no less than 0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value == value, order, 0x7FFFFFFF)
    order = tl.where(column < width, order, -(2**31))
    better = order > best
    return tl.where(better, order, best), tl.where(better, column, place)


@triton.jit
def _finite(order):
    """Whether the logit of this order, the high half of its key, is neither NaN nor infinite."""
    return (order < 0x7F800000) & (order > -0x7F800001)


@triton.jit
def _key(best, place, begin):
    """The largest key of all lanes."""
    key = (best.to(tl.int64) << 32) | (0xFFFFFFFF - (begin + place).to(tl.int64))
    return tl.max(tl.where(best == -(2**31), LOWEST, key), 0)


@triton.jit
def _best_of_part(start, lane, part, width, begin, span, sampling, threshold, BLOCK: tl.constexpr, SM: tl.constexpr):
    """`_better` over the `span` columns of a part of the row that begins at `start`. lane: 0 .. BLOCK - 1; sampling: the row's
    (top, temperature, first, second), or None for the argmax of the logits; threshold: of scaled logits that are kept; None: all
    are."""
    best = tl.full([BLOCK], -(2**31), tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    at = part * span
    end = tl.minimum(at + span, width)
    while at < end:
        column = at + lane
        if at + BLOCK <= width:  # without a mask, so that a thread reads neighbours at once
            value = tl.load(start + column).to(tl.float32)
        else:
            value = tl.load(start + column, column < width, float("-inf")).to(tl.float32)
        if sampling is not None:
            top, row_temperature, first, second = sampling
            if row_temperature > 0.0:
                value = tl.div_rn(value - top, row_temperature)
                value = tl.where(value == value, value, 0.0)
                if threshold is None:
                    value -= _noise(begin + column, first, second, SM)
                else:
                    value = tl.where(value >= threshold, value, float("-inf"))
                    if tl.max(value, 0) > float("-inf"):  # mostly no logit here is kept, and noise is what takes time
                        value -= _noise(begin + column, first, second, SM)
        best, place = _better(value, column, width, best, place)
        at += BLOCK
    return best, place


@triton.jit(do_not_specialize=["width", "begin", "parts"], do_not_specialize_on_alignment=["keys"])
def _packed_argmax_keys(logits, keys, stride, width, begin, parts, span, BLOCK: tl.constexpr, SM: tl.constexpr):
    """keys [rows, parts]; columns 0 .. width - 1 of a row of logits are tokens begin, begin + 1, ..."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    start = logits + row.to(tl.int64) * stride
    best, place = _best_of_part(start, lane, part, width, begin, span, None, None, BLOCK, SM)
    tl.store(keys + row * parts + part, _key(best, place, begin))


@triton.jit
def _largest(keys, row, rows, parts, RANKS: tl.constexpr, PARTS: tl.constexpr):
    """The largest of keys [RANKS, rows, parts] of a row."""
    part = tl.arange(0, PARTS)
    best = tl.full([PARTS], LOWEST, tl.int64)
    for rank in tl.static_range(RANKS):
        best = tl.maximum(best, tl.load(keys + (rank * rows + row) * parts + part, part < parts, LOWEST))
    return tl.max(best, 0)


@triton.jit
def _shifts(h, LOW: tl.constexpr):
    """h ^ (h >> 16 or 15), without the sign."""
    if LOW:
        return h ^ ((h >> 15) & 0x1FFFF)
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _noise(token, first, second, SM: tl.constexpr):
    """The log of an exponential variate, as `reference.hashed_uniform` and `reference.draw` define it."""
    h = _shifts(token + (0x9E3779B9 - 2**32), False) * 0x7FEB352D
    h = _shifts(_shifts(h, True) * (0x846CA68B - 2**32), False) ^ first
    h = _shifts(_shifts(h, False) * 0x7FEB352D, True) + second
    h = _shifts(h * (0x846CA68B - 2**32), False) & 0x7FFFFFFF
    u = tl.minimum((h.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.960464477539063e-08)
    if SM > 0:
        noise = libdevice.log(-libdevice.log1p(-u))
    else:
        noise = tl.log(-tl.log(1.0 - u.to(tl.float64))).to(tl.float32)
    return noise


@triton.jit(
    do_not_specialize=["width", "begin", "rows", "parts"],
    do_not_specialize_on_alignment=["keys", "max_keys", "temperature", "noise", "thresholds"],
)
def _gumbel_max(
    logits, keys, max_keys, temperature, noise, thresholds, stride, width, begin, rows, parts, span,
    RANKS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """keys [rows, parts] of the scaled logits less noise; max_keys: the keys [RANKS, rows, parts] of the logits themselves.
    thresholds: None where all logits are kept."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    start = logits + row.to(tl.int64) * stride
    order = (_largest(max_keys, row, rows, parts, RANKS, PARTS) >> 32).to(tl.int32)
    finite = _finite(order)
    top = tl.where(finite, tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True), 0.0)
    row_temperature = tl.load(temperature + row)
    sampling = (top, row_temperature, tl.load(noise + row), tl.load(noise + rows + row))
    if thresholds is None:
        best, place = _best_of_part(start, lane, part, width, begin, span, sampling, None, BLOCK, SM)
    else:
        best, place = _best_of_part(start, lane, part, width, begin, span, sampling, tl.load(thresholds + row), BLOCK, SM)
    key = _key(best, place, begin)
    key = tl.where(finite | (key == LOWEST), key, NAN | (key & 0xFFFFFFFF))
    tl.store(keys + row * parts + part, key)


@triton.jit(
    do_not_specialize=["rows", "parts"],
    do_not_specialize_on_alignment=["keys", "tokens", "last_tokens", "slots", "kv_slots"],
)
def _decode_keys(
    keys, tokens, last_tokens, slots, kv_slots, rows, parts,
    RANKS: tl.constexpr, REMEMBER: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """A program has one row of keys [ranks, rows, parts]."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    key = _largest(keys, row, rows, parts, RANKS, BLOCK)
    token = tl.where(_finite(key >> 32), 0xFFFFFFFF - (key & 0xFFFFFFFF), NO_TOKEN)
    tl.store(tokens + row, token)
    if REMEMBER:
        tl.store(last_tokens + tl.load(slots + row), token, tl.load(kv_slots + row) >= 0)


def parts_of(rows: int, width: int) -> int:
    """Into how many parts a row is split; the same on every rank."""
    return max(1, min(-(-PROGRAMS // max(rows, 1)), -(-width // BLOCK)))


def _padded_parts(parts: int) -> int:
    """A power of two that is at least `parts`; mostly the same, so that few variants are compiled."""
    return max(64, int(triton.next_power_of_2(parts)))


def _split(logits: Tensor) -> tuple[int, int]:
    """(parts of a row, columns of a part)."""
    parts = parts_of(*logits.shape)
    return parts, triton.cdiv(triton.cdiv(logits.shape[1], parts), BLOCK) * BLOCK


def packed_argmax_keys(logits: Tensor, begin: int, width: int) -> Tensor:
    """The kernel of `sampling.packed_argmax_keys`: [S, parts] for logits [S, W] whose rows are contiguous."""
    rows, (parts, span) = len(logits), _split(logits)
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    if rows:
        sm = sm_arch(logits.device)
        _packed_argmax_keys[(rows, parts)](
            logits, keys, logits.stride(0), width, begin, parts, span, BLOCK=BLOCK, SM=sm, num_warps=8, launch_pdl=sm >= 90
        )
    return keys


def gumbel_max(
    logits: Tensor, begin: int, width: int, max_keys: Tensor, temperature: Tensor, noise: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """The kernel of `reference.gumbel_max`: [S, parts] for logits [S, W] whose rows are contiguous."""
    rows, (parts, span) = len(logits), _split(logits)
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    if rows:
        sm = sm_arch(logits.device)
        _gumbel_max[(rows, parts)](
            logits, keys, max_keys, temperature, noise, thresholds, logits.stride(0), width, begin, rows, parts, span,
            RANKS=len(max_keys), PARTS=_padded_parts(parts), BLOCK=BLOCK, SM=sm, num_warps=8, launch_pdl=sm >= 90,
        )  # fmt: skip
    return keys


def decode_keys(keys: Tensor, tokens: Tensor, remember: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """The kernel of `reference.decode_keys`."""
    ranks, rows, parts = keys.shape
    if rows:
        sm = sm_arch(keys.device)
        _decode_keys[(rows,)](
            keys, tokens, *(remember or (tokens, tokens, tokens)), rows, parts, RANKS=ranks, REMEMBER=remember is not None,
            BLOCK=_padded_parts(parts), SM=sm, num_warps=1, launch_pdl=sm >= 90,
        )  # fmt: skip
