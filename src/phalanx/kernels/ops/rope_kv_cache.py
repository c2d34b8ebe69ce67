# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Between the QKV GEMM and attention, in one kernel: apply RoPE to queries and keys, store keys and values in the cache.

    query = rope(qkv[:, :q_heads])
    key_cache[slot], value_cache[slot] = rope(qkv[:, q_heads : q_heads + kv_heads]), qkv[:, q_heads + kv_heads :]    unless slot < 0

An unscaled GEMM output gets its scales first, in fp32; results are rounded once. With a head norm, query and key heads are
RMS-normed before (rounded as `reference.rms_norm` does). A cache in int8 gets a scale for each key and each value beside them.

A program has some heads of one token: see `heuristics.rope_heads`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.ops.heuristics import rope_heads
from phalanx.kernels.quantize import clipped, e4m3_byte, int8_code, int8_scale
from phalanx.kernels.reference import HeadNorm
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.kernels.vectors import largest_along, nearest


@triton.jit
def _cached(values, inverse, FP8: tl.constexpr, SM: tl.constexpr):
    """The values as the cache stores them: e4m3 bytes of values * inverse, or unchanged."""
    if FP8:
        stored = e4m3_byte(clipped(values.to(tl.float32) * inverse, SM), SM)
    else:
        stored = values
    return stored


@triton.jit
def _store(cache, place, mask, first, second, half, FP8: tl.constexpr, SM: tl.constexpr, inverse):
    tl.store(cache + place, _cached(first, inverse, FP8, SM), mask)
    tl.store(cache + place + half, _cached(second, inverse, FP8, SM), mask)


@triton.jit
def _store_in_int8(
    key_cache, value_cache, token_scales, first, second, slot, head, pair, inside, q_heads, kv_heads, half,
    BLOCK_SIZE: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """first, second [heads, pairs]: both halves of complete heads. Store the keys and values among them, and their scales."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    is_value = head >= q_heads + kv_heads
    scale = int8_scale(largest_along(tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL), 1), SM)
    inverse = tl.div_rn(1.0, scale.to(tl.float32))
    first, second = int8_code(first * inverse, SM), int8_code(second * inverse, SM)
    stored = (slot >= 0) & (head >= q_heads) & (head < q_heads + 2 * kv_heads)
    kv_head = head - tl.where(is_value, q_heads + kv_heads, q_heads)
    place, inside = (slot * kv_heads + kv_head) * (2 * half) + pair, stored & inside
    tl.store(key_cache + place, first, inside & ~is_value)
    tl.store(key_cache + place + half, second, inside & ~is_value)
    tl.store(value_cache + place, first, inside & is_value)
    tl.store(value_cache + place + half, second, inside & is_value)
    place = (slot // BLOCK_SIZE * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    # By the threads that have the first elements: a store of [heads, 1] would move the largest magnitudes to other warps.
    place = token_scales + 2 * place + is_value.to(tl.int32) + pair * 0
    tl.store(place, tl.broadcast_to(scale, place.shape), stored & (pair == 0))


@triton.jit
def rotate_and_store(
    first, second, fp32_first, fp32_second, c, s, token, head, pair, inside, query, key_cache, value_cache, token_scales, slots,
    q_heads, kv_heads, half, key_inverse, value_inverse, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Rotate elements pair and pair + half of a token's heads by cosines c and sines s, and store them. first, second: as values
    are stored; fp32_first, fp32_second: the same before rounding, which are rotated. token_scales: None, or those of caches in
    int8, which take complete heads [heads, pairs]."""
    slot = tl.load(slots + token)  # before what does not need it
    rotated_first = nearest(fp32_first * c - fp32_second * s, first, SM)
    rotated_second = nearest(fp32_second * c + fp32_first * s, first, SM)

    is_query = inside & (head < q_heads)
    place = (token * q_heads + head) * (2 * half) + pair
    tl.store(query + place, rotated_first, is_query)
    tl.store(query + place + half, rotated_second, is_query)

    if token_scales is not None:
        as_value = head >= q_heads + kv_heads
        first, second = tl.where(as_value, first, rotated_first), tl.where(as_value, second, rotated_second)
        _store_in_int8(
            key_cache, value_cache, token_scales, first, second, slot, head, pair, inside, q_heads, kv_heads, half, BLOCK_SIZE, SM
        )
    else:
        stored = inside & (slot >= 0)
        is_key = stored & (head >= q_heads) & (head < q_heads + kv_heads)
        place = (slot * kv_heads + head - q_heads) * (2 * half) + pair
        _store(key_cache, place, is_key, rotated_first, rotated_second, half, FP8, SM, key_inverse)
        is_value = stored & (head >= q_heads + kv_heads)
        place = (slot * kv_heads + head - q_heads - kv_heads) * (2 * half) + pair
        _store(value_cache, place, is_value, first, second, half, FP8, SM, value_inverse)


@triton.jit
def _normed(first, second, head, pair, q_norm, k_norm, eps, q_heads, kv_heads, half, SM: tl.constexpr):
    """Both halves of heads, in their dtype: query and key heads RMS-normed, value heads as they are."""
    fp32_first, fp32_second = first.to(tl.float32), second.to(tl.float32)
    # In fp64 the sum does not depend on how many heads share a program: see `residual_rms_norm`.
    squares = (fp32_first * fp32_first + fp32_second * fp32_second).to(tl.float64)
    mean = tl.sum(squares, 1, keep_dims=True).to(tl.float32) / (2 * half)
    inverse = tl.rsqrt(mean + eps)
    is_query = head < q_heads
    w_first = tl.where(is_query, tl.load(q_norm + pair, pair < half, 0.0), tl.load(k_norm + pair, pair < half, 0.0))
    w_second = tl.where(is_query, tl.load(q_norm + pair + half, pair < half, 0.0), tl.load(k_norm + pair + half, pair < half, 0.0))
    normed_first = nearest(nearest(fp32_first * inverse, first, SM).to(tl.float32) * w_first.to(tl.float32), first, SM)
    normed_second = nearest(nearest(fp32_second * inverse, first, SM).to(tl.float32) * w_second.to(tl.float32), first, SM)
    is_normed = (head < q_heads + kv_heads) & (pair < half)
    return tl.where(is_normed, normed_first, first), tl.where(is_normed, normed_second, second)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_store(
    qkv, pitch, rows, columns, q_norm, k_norm, cos, sin, query, key_cache, value_cache, token_scales, slots, q_heads, kv_heads,
    half, eps, key_inverse, value_inverse, BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """pitch: from token to token of qkv. rows, columns: the scales of an unscaled GEMM output, or None. q_norm, k_norm: the weights
    of a head norm, or None.
    token_scales: of caches in int8, whose BLOCK_SIZE counts; or None."""
    if SM >= 90:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    heads = q_heads + 2 * kv_heads
    inside = (head < heads) & (pair < half)
    column = head * (2 * half) + pair
    if columns is not None:  # no kernel writes these scales
        first_scale, second_scale = tl.load(columns + column, inside, 0.0), tl.load(columns + column + half, inside, 0.0)
    if SM >= 90:
        gdc_wait()
    place = token * pitch + column
    first = tl.load(qkv + place, inside, 0.0)
    second = tl.load(qkv + place + half, inside, 0.0)
    c = tl.load(cos + token * half + pair, pair < half, 0.0)
    s = tl.load(sin + token * half + pair, pair < half, 0.0)
    fp32_first, fp32_second = first.to(tl.float32), second.to(tl.float32)
    if rows is not None:
        unit = tl.load(rows + token)
        fp32_first = fp32_first * unit * first_scale
        fp32_second = fp32_second * unit * second_scale
        first, second = nearest(fp32_first, first, SM), nearest(fp32_second, second, SM)
    if q_norm is not None:
        first, second = _normed(first, second, head, pair, q_norm, k_norm, eps, q_heads, kv_heads, half, SM)
        fp32_first, fp32_second = first.to(tl.float32), second.to(tl.float32)
    rotate_and_store(
        first, second, fp32_first, fp32_second, c, s, token, head, pair, inside, query, key_cache, value_cache, token_scales, slots,
        q_heads, kv_heads, half, key_inverse, value_inverse, BLOCK_SIZE, FP8, SM,
    )  # fmt: skip


def rope_store(
    qkv: Tensor | Unscaled, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, q_heads: int,
    kv_scales: tuple[float, float] | None = None, head_norm: HeadNorm | None = None, token_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel of `reference.rope_store`, for contiguous tensors, of qkv contiguous tokens; qkv in bf16, fp16 or fp32, caches in
    its dtype, e4m3 or int8."""
    values, rows, columns = Unscaled.parts(qkv)
    tokens, heads, head_dim = values.shape
    query = torch.empty((tokens, q_heads, head_dim), dtype=values.dtype, device=values.device)
    if tokens:
        sm = sm_arch(values.device)
        fp8 = key_cache.dtype == torch.float8_e4m3fn
        key_scale, value_scale = kv_scales or (1.0, 1.0)
        caches = [cache.view(torch.uint8) if fp8 else cache for cache in (key_cache, value_cache)]
        block = rope_heads(tokens)
        norm = head_norm or (None, None, 0.0)
        _rope_store[(tokens, triton.cdiv(heads, block))](
            values, values.stride(0), rows, columns, *norm[:2], cos, sin, query, *caches, token_scales, slots, q_heads,
            (heads - q_heads) // 2, head_dim // 2, norm[2], 1.0 / key_scale, 1.0 / value_scale,
            BLOCK=block, HALF=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=0 if token_scales is None else key_cache.shape[1],
            FP8=fp8, SM=sm, num_warps=4, launch_pdl=sm >= 90,
        )  # fmt: skip
    return query
