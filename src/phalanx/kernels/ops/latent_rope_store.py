# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Between the projections of latent attention and its scores, in one kernel: RMS-norm and store the latent, rotate and store the
key that all heads share, and rotate the queries in place. The plain code: `reference.latent_rope_store`.

A program has one token: the first one its latent and key, each other one some of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.ops.rope_kv_cache import _cached
from phalanx.kernels.vectors import nearest

HEADS_PER_PROGRAM = 16


@triton.jit
def _rotated(values, place, inside, c, s, half, INTERLEAVED: tl.constexpr, SM: tl.constexpr):
    """-> both halves of rotated pairs: elements 2i and 2i + 1 of what begins at `place`, or i and i + half."""
    pair = tl.arange(0, c.shape[1])[None, :]
    if INTERLEAVED:
        first, second = tl.load(values + place + 2 * pair, inside, 0.0), tl.load(values + place + 2 * pair + 1, inside, 0.0)
    else:
        first, second = tl.load(values + place + pair, inside, 0.0), tl.load(values + place + pair + half, inside, 0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return nearest(a * c - b * s, first, SM), nearest(b * c + a * s, first, SM)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _latent_rope_store(
    query, latent, cos, sin, weight, cache, slots, eps, heads, head_stride, query_stride, latent_stride, first_rotated, rank, half,
    HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """first_rotated: the first rotated element of a query head. Strides in elements, of a head and of tokens."""
    if SM >= 90:
        gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)[None, :]
    if SM >= 90:
        gdc_wait()
    c = tl.load(cos + token * half + pair, pair < half, 0.0)
    s = tl.load(sin + token * half + pair, pair < half, 0.0)
    if part == 0:
        slot = tl.load(slots + token)
        dim = tl.arange(0, RANK)
        values = tl.load(latent + token * latent_stride + dim, dim < rank, 0.0)
        widened = values.to(tl.float32)
        scaled = nearest(widened * tl.rsqrt(tl.sum(widened * widened, 0) / rank + eps), values, SM).to(tl.float32)
        factor = tl.load(weight + dim, dim < rank, 0.0).to(tl.float32)
        normed = nearest(scaled * factor, values, SM)
        one = tl.zeros([1, 1], tl.int64)
        first, second = _rotated(latent, token * latent_stride + rank + one, pair < half, c, s, half, INTERLEAVED, SM)
        entry = slot * (rank + 2 * half)
        tl.store(cache + entry + dim, _cached(normed, 1.0, FP8, SM), (slot >= 0) & (dim < rank))
        tl.store(cache + entry + rank + pair, _cached(first, 1.0, FP8, SM), (slot >= 0) & (pair < half))
        tl.store(cache + entry + rank + half + pair, _cached(second, 1.0, FP8, SM), (slot >= 0) & (pair < half))
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (pair < half)
        place = token * query_stride + head * head_stride + first_rotated
        rotated_first, rotated_second = _rotated(query, place, inside, c, s, half, INTERLEAVED, SM)
        tl.debug_barrier()  # the program's other threads have loaded what is overwritten
        tl.store(query + place + pair, rotated_first, inside)
        tl.store(query + place + half + pair, rotated_second, inside)


def latent_rope_store(
    query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float, cache: Tensor, slots: Tensor, *,
    interleaved: bool,
) -> None:  # fmt: skip
    """The kernel of `reference.latent_rope_store`, for a contiguous cache; the last dims of query and latent are contiguous."""
    tokens, heads, head_dim = query.shape
    if not tokens:
        return
    sm, half, rank = sm_arch(query.device), cos.shape[1], weight.shape[0]
    fp8 = cache.dtype == torch.float8_e4m3fn
    _latent_rope_store[(tokens, 1 + triton.cdiv(heads, HEADS_PER_PROGRAM))](
        query, latent, cos, sin, weight, cache.view(torch.uint8) if fp8 else cache, slots, eps, heads, query.stride(1),
        query.stride(0), latent.stride(0), head_dim - 2 * half, rank, half, HEADS=HEADS_PER_PROGRAM,
        RANK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(half), INTERLEAVED=interleaved, FP8=fp8, SM=sm, num_warps=4,
        launch_pdl=sm >= 90,
    )  # fmt: skip
