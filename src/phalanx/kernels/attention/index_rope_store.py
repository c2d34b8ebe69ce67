# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Between the projections of an indexer and its scores, in one kernel: layer-norm, rotate and store each token's key, and rotate
the queries in place. The plain code: `indexer.index_rope_store`.

A program has one token: the first one its key, each other one some of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.quantize import e4m3_byte, scale_of
from phalanx.kernels.vectors import nearest

HEADS_PER_PROGRAM = 16


@triton.jit
def _normed(values, weight, bias, place, inside, mean, inverse, SM: tl.constexpr):
    """Elements at `place` of a key, normed and rounded; 0 outside."""
    value = tl.load(values + place, inside, 0.0)
    factor, added = tl.load(weight + place, inside, 0.0).to(tl.float32), tl.load(bias + place, inside, 0.0).to(tl.float32)
    normed = (value.to(tl.float32) - mean) * inverse * factor + added
    return tl.where(inside, nearest(normed, value, SM), 0.0)


@triton.jit
def _stored(values, inverse, FP8: tl.constexpr, SM: tl.constexpr):
    if FP8:
        stored = e4m3_byte(values.to(tl.float32) * inverse, SM)
    else:
        stored = values
    return stored


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _index_rope_store(
    query, key, cos, sin, weight, bias, cache, scales, slots, eps, heads, head_dim, query_stride, key_stride, half,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The first 2 * half elements of head_dim are rotated. Strides in elements, of tokens."""
    FP8: tl.constexpr = scales is not None
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    rotates = pair < half
    first_place, second_place = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, pair + half)
    c = tl.load(cos + token * half + pair, rotates, 0.0)
    s = tl.load(sin + token * half + pair, rotates, 0.0)
    if part == 0:
        slot, dim = tl.load(slots + token), tl.arange(0, DIM)
        own = key + token * key_stride
        value = tl.load(own + dim, dim < head_dim, 0.0).to(tl.float32)
        mean = tl.sum(value, 0) / head_dim
        apart = tl.where(dim < head_dim, value - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(apart * apart, 0) / head_dim + eps)
        a = _normed(own, weight, bias, first_place, rotates, mean, inverse, SM)
        b = _normed(own, weight, bias, second_place, rotates, mean, inverse, SM)
        rest_place = (dim >= 2 * half) & (dim < head_dim)
        rest = _normed(own, weight, bias, dim, rest_place, mean, inverse, SM)
        first = nearest(a.to(tl.float32) * c - b.to(tl.float32) * s, a, SM)
        second = nearest(b.to(tl.float32) * c + a.to(tl.float32) * s, a, SM)
        factor = 1.0
        if FP8:
            both = tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32)))
            scale = scale_of(tl.maximum(tl.max(both, 0), tl.max(tl.abs(rest.to(tl.float32)), 0)))
            tl.store(scales + slot, scale, slot >= 0)
            factor = tl.div_rn(1.0, scale)
        entry = cache + slot * head_dim
        tl.store(entry + pair, _stored(first, factor, FP8, SM), (slot >= 0) & rotates)
        tl.store(entry + half + pair, _stored(second, factor, FP8, SM), (slot >= 0) & rotates)
        tl.store(entry + dim, _stored(rest, factor, FP8, SM), (slot >= 0) & rest_place)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & rotates[None, :]
        place = query + token * query_stride + head * head_dim
        x, y = tl.load(place + first_place[None, :], inside, 0.0), tl.load(place + second_place[None, :], inside, 0.0)
        x_wide, y_wide = x.to(tl.float32), y.to(tl.float32)
        tl.debug_barrier()  # the program's other threads have loaded what is overwritten
        tl.store(place + pair[None, :], nearest(x_wide * c[None, :] - y_wide * s[None, :], x, SM), inside)
        tl.store(place + half + pair[None, :], nearest(y_wide * c[None, :] + x_wide * s[None, :], x, SM), inside)


def index_rope_store(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, bias: Tensor, eps: float, cache: Tensor,
    scales: Tensor | None, slots: Tensor, *, interleaved: bool,
) -> None:  # fmt: skip
    """The kernel of `indexer.index_rope_store`, for a contiguous cache; the last two dims of query and the last of key are."""
    tokens, heads, head_dim = query.shape
    if not tokens:
        return
    sm, half = sm_arch(query.device), cos.shape[1]
    _index_rope_store[(tokens, 1 + triton.cdiv(heads, HEADS_PER_PROGRAM))](
        query, key, cos, sin, weight, bias, cache if scales is None else cache.view(torch.uint8), scales, slots, eps, heads,
        head_dim, query.stride(0), key.stride(0), half, HEADS=HEADS_PER_PROGRAM, DIM=triton.next_power_of_2(head_dim),
        HALF=triton.next_power_of_2(half), INTERLEAVED=interleaved, SM=sm, num_warps=4, launch_pdl=sm >= 90,
    )  # fmt: skip
