# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The gated delta rule of prefill rows, by chunks of 64 tokens (`reference.many_tokens` has the formulas).

| kernel | a program | what it gives |
|---|---|---|
| `_sum_decays` | a chunk of a value head | with decays by channel: their sums |
| `_prepare` | a chunk of a value head | u, w, the scores of its tokens with one another, the sums of decays |
| `_scan` | a run of values of a value head of a row, chunk after chunk | outputs, and the state behind the row |
| `_norm_and_gate` | a token | the gated norm of the outputs |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.capabilities import gpu, sm_arch
from phalanx.kernels.gated_delta.chunks import chunk_at, dot, gated_norm, load_normed, log_decay, sigmoid
from phalanx.kernels.gated_delta.reference import CHUNK, NORM_EPS, DeltaInputs, DeltaWeights, StateRows, max_chunk_rows
from phalanx.kernels.vectors import nearest

NEAR = 16
"""Tokens whose system is solved one token after another; those of a chunk are then joined by GEMMs."""
SCANNED = 32
"""Values of a program of `_scan`."""
SCAN_BYTES = 112 << 10
"""Shared memory of a program of `_scan` that loads a chunk in 16 bit while it computes the one before."""


@triton.jit
def _inverse(system, CHUNK: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)^-1 for a strictly lower triangular `system` [CHUNK, CHUNK] in fp32, CHUNK at most 4 * NEAR.

    Runs of NEAR rows are solved row after row, which is exact where a product of powers would cancel: X. With the rest E of the
    system, M = X E has M^4 = 0, so that (1 + X E)^-1 = (1 - M) (1 + M^2). PRECISION: of
    those GEMMs: what is rounded to 16 bit behind them needs no more than TF32."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    near, same = i // NEAR == j // NEAR, (i == j).to(tl.float32)
    inner = tl.where(near, -system, 0.0)
    solved = same
    for step in range(1, NEAR):
        here = i % NEAR == step
        factors = tl.sum(tl.where(here, inner, 0.0), 0)
        row = tl.sum(factors[:, None] * solved, 0)
        solved = tl.where(here & near, row[None, :] + same, solved)
    powers = tl.dot(solved, tl.where(near, 0.0, system), input_precision=PRECISION)
    squared = same + tl.dot(powers, powers, input_precision=PRECISION)
    joined = squared - tl.dot(powers, squared, input_precision=PRECISION)
    return tl.dot(joined, solved, input_precision=PRECISION)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts"])
def _sum_decays(
    a, a_log, dt_bias, decays, starts, rows, a_pitch,
    HEADS: tl.constexpr, KEYS: tl.constexpr, WIDE_KEYS: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """decays [T, HEADS, KEYS]: of a token, the sums of those of its chunk's tokens up to it."""
    head = tl.program_id(1)
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    first, _, begin, count = chunk_at(starts, rows, tl.program_id(0), CHUNK, MOST)
    if first >= 0:
        i, key = tl.arange(0, CHUNK), tl.arange(0, WIDE_KEYS)[None, :]
        valid, token = first + i < count, (begin + first + i).to(tl.int64)[:, None]
        inside = valid[:, None] & (key < KEYS)
        raw = tl.load(a + token * a_pitch + head * KEYS + key, inside, 0.0).to(tl.float32)
        bias = tl.load(dt_bias + head * KEYS + key, key < KEYS, 0.0)
        decay = tl.where(inside, log_decay(raw, tl.load(a_log + head), bias), 0.0)
        tl.store(decays + (token * HEADS + head) * KEYS + key, tl.cumsum(decay, 0), inside)


@triton.jit
def _products_by_channel(
    keys, decays, q, k, decay, like, origin, count, pitch, decay_pitch, KEYS: tl.constexpr, WIDE_KEYS: tl.constexpr,
    CHUNK: tl.constexpr, NEAR: tl.constexpr, EPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The products of k and of q, with k [CHUNK, WIDE_KEYS], each term times exp(G_i - G_j): right for j <= i. keys, decays: those
    of the head, with pitches of a token, of which the chunk's first is `origin`; count: tokens from it on. decay: G.

    Within runs of NEAR tokens, a column after the other, by their differences. Before a run, whose first token is r, exp(G_i - G_j)
    is exp(G_i - G_r) exp(G_r - G_j) (secondary chunks: arXiv 2312.06635, section 4.3). No exponent is above 0: a strong decay
    becomes 0, and nothing overflows."""
    i, j, key = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :], tl.arange(0, WIDE_KEYS)[None, :]
    run = (i // NEAR)[:, None]
    by_key, by_query = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for step in range(0, NEAR):
        other = i // NEAR * NEAR + step
        token, inside = (origin + other).to(tl.int64)[:, None], (other < count)[:, None] & (key < KEYS)
        ahead = load_normed(keys, token * pitch + key, inside, EPS)
        ahead = ahead * tl.exp(tl.minimum(decay - tl.load(decays + token * decay_pitch + key, inside, 0.0), 0.0))
        here = j == run * NEAR + step
        by_key = tl.where(here, tl.sum(k * ahead, 1)[:, None], by_key)
        by_query = tl.where(here, tl.sum(q * ahead, 1)[:, None], by_query)
    start = (origin + i // NEAR * NEAR).to(tl.int64)[:, None]
    inside = (i // NEAR * NEAR < count)[:, None] & (key < KEYS)
    since = tl.exp(tl.minimum(decay - tl.load(decays + start * decay_pitch + key, inside, 0.0), 0.0))
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    for block in range(1, CHUNK // NEAR):
        begin = (origin + block * NEAR).to(tl.int64)
        at_begin = tl.load(decays + begin * decay_pitch + key, (block * NEAR < count) & (key < KEYS), 0.0)
        before = tl.where((i < block * NEAR)[:, None], k * tl.exp(tl.minimum(at_begin - decay, 0.0)), 0.0)
        here = (run == block) & (j < block * NEAR)
        by_key = tl.where(here, dot(k * since, tl.trans(before), like, zeros, SM), by_key)
        by_query = tl.where(here, dot(q * since, tl.trans(before), like, zeros, SM), by_query)
    causal = j <= i[:, None]
    return tl.where(causal, by_key, 0.0), tl.where(causal, by_query, 0.0)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts"])
def _prepare(
    qkv, b, a, a_log, dt_bias, u, w, scores, decays, starts, rows, b_pitch, a_pitch, scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE_KEYS: tl.constexpr,
    WIDE_VALUES: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, MOST: tl.constexpr, BY_CHANNEL: tl.constexpr,
    EPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    first, _, begin, count = chunk_at(starts, rows, tl.program_id(0), CHUNK, MOST)
    if first >= 0:
        WIDTH: tl.constexpr = HEADS // RATIO * KEYS
        i, key, value = tl.arange(0, CHUNK), tl.arange(0, WIDE_KEYS)[None, :], tl.arange(0, WIDE_VALUES)[None, :]
        valid, token = first + i < count, (begin + first + i).to(tl.int64)
        own = (token * (2 * WIDTH + HEADS * VALUES))[:, None]
        is_key, is_value = valid[:, None] & (key < KEYS), valid[:, None] & (value < VALUES)
        k = load_normed(qkv, own + WIDTH + head // RATIO * KEYS + key, is_key, EPS)
        v = tl.load(qkv + own + 2 * WIDTH + head * VALUES + value, is_value, 0.0)
        beta = tl.where(valid, sigmoid(tl.load(b + token * b_pitch + head, valid, 0.0).to(tl.float32)), 0.0)
        q = load_normed(qkv, own + head // RATIO * KEYS + key, is_key, EPS) * scale
        zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
        pair = (token * HEADS + head)[:, None]
        if BY_CHANNEL:
            decay = tl.load(decays + pair * KEYS + key, is_key, 0.0)
            keys, score = _products_by_channel(
                qkv + WIDTH + head // RATIO * KEYS, decays + head * KEYS, q, k, decay, v, begin + first, count - first,
                2 * WIDTH + HEADS * VALUES, HEADS * KEYS, KEYS, WIDE_KEYS, CHUNK, NEAR, EPS, SM,
            )  # fmt: skip
            fading = tl.exp(decay)
        else:
            raw = tl.load(a + token * a_pitch + head, valid, 0.0).to(tl.float32)
            decay = tl.cumsum(tl.where(valid, log_decay(raw, tl.load(a_log + head), tl.load(dt_bias + head)), 0.0), 0)
            lower = i[:, None] >= i[None, :]
            between = tl.where(lower, tl.exp(tl.where(lower, decay[:, None] - decay[None, :], 0.0)), 0.0)
            keys, score = dot(k, tl.trans(k), v, zeros, SM) * between, dot(q, tl.trans(k), v, zeros, SM) * between
            fading = tl.exp(decay)[:, None]
            tl.store(decays + token * HEADS + head, decay, valid)
        keys *= beta[:, None]
        PRECISION: tl.constexpr = "tf32x3" if qkv.dtype.element_ty == tl.float32 else "tf32"
        solved = _inverse(tl.where(i[:, None] > i[None, :], keys, 0.0), CHUNK, NEAR, PRECISION)
        values = dot(solved, v.to(tl.float32) * beta[:, None], v, tl.zeros([CHUNK, WIDE_VALUES], tl.float32), SM)
        tl.store(u + pair * VALUES + value, nearest(values, v, SM), is_value)
        faded = k * beta[:, None] * fading
        tl.store(w + pair * KEYS + key, nearest(dot(solved, faded, v, tl.zeros([CHUNK, WIDE_KEYS], tl.float32), SM), v, SM), is_key)
        tl.store(scores + pair * CHUNK + i[None, :], nearest(score, v, SM), tl.broadcast_to(valid[:, None], score.shape))


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _scan(
    qkv, u, w, scores, decays, state, out, slots, starts, lengths, scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE_KEYS: tl.constexpr,
    SCANNED: tl.constexpr, CHUNK: tl.constexpr, BY_CHANNEL: tl.constexpr, EPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    begin = tl.load(starts + row)
    count = tl.load(starts + row + 1) - begin
    if count > 0:
        WIDTH: tl.constexpr = HEADS // RATIO * KEYS
        i, key = tl.arange(0, CHUNK), tl.arange(0, WIDE_KEYS)
        value = tl.program_id(2) * SCANNED + tl.arange(0, SCANNED)[None, :]
        place = (tl.load(slots + row).to(tl.int64) * HEADS + head) * (KEYS * VALUES) + key[:, None] * VALUES + value
        inside = (key[:, None] < KEYS) & (value < VALUES)
        matrix = tl.load(state + place, inside & (tl.load(lengths + row) > count), 0.0)
        for first in range(0, count, CHUNK):
            valid, token = first + i < count, (begin + first + i).to(tl.int64)
            own, pair = (token * (2 * WIDTH + HEADS * VALUES))[:, None], (token * HEADS + head)[:, None]
            is_key, is_value = valid[:, None] & (key[None, :] < KEYS), valid[:, None] & (value < VALUES)
            final = tl.minimum(count - first, CHUNK) - 1
            if BY_CHANNEL:
                decay = tl.load(decays + pair * KEYS + key[None, :], is_key, 0.0)
                end = ((begin + first + final).to(tl.int64) * HEADS + head) * KEYS
                last = tl.load(decays + end + key, key < KEYS, 0.0)[None, :]
            else:
                decay = tl.load(decays + token * HEADS + head, valid, 0.0)[:, None]
                last = tl.sum(tl.where(i[:, None] == final, decay, 0.0), 0, keep_dims=True)
            faded = tl.load(w + pair * KEYS + key[None, :], is_key, 0.0)
            new = tl.load(u + pair * VALUES + value, is_value, 0.0).to(tl.float32)
            zeros = tl.zeros([CHUNK, SCANNED], tl.float32)
            new = new - dot(faded, matrix, faded, zeros, SM)
            q = load_normed(qkv, own + head // RATIO * KEYS + key[None, :], is_key, EPS) * (scale * tl.exp(decay))
            score = tl.load(scores + pair * CHUNK + i[None, :], tl.broadcast_to(valid[:, None], [CHUNK, CHUNK]), 0.0)
            output = dot(score, new, faded, dot(q, matrix, faded, zeros, SM), SM)
            tl.store(out + pair * VALUES + value, nearest(output, faded, SM), is_value)
            k = load_normed(qkv, own + WIDTH + head // RATIO * KEYS + key[None, :], is_key, EPS)
            k = k * tl.where(valid[:, None], tl.exp(last - decay), 0.0)
            matrix = dot(tl.trans(k), new, faded, matrix * tl.exp(tl.trans(last)), SM)
        tl.store(state + place, matrix, inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts"])
def _norm_and_gate(
    out, z, norm, starts, rows, z_pitch, eps,
    HEADS: tl.constexpr, MOST_HEADS: tl.constexpr, VALUES: tl.constexpr, WIDE_VALUES: tl.constexpr, BY_CHANNEL: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """Of the tokens of prefill rows, in place."""
    token = tl.program_id(0).to(tl.int64)
    head, value = tl.arange(0, MOST_HEADS)[:, None], tl.arange(0, WIDE_VALUES)[None, :]
    inside = (head < HEADS) & (value < VALUES)
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    if (token >= tl.load(starts)) & (token < tl.load(starts + rows)):
        place = out + token * (HEADS * VALUES) + head * VALUES + value
        gate = tl.load(z + token * z_pitch + head * VALUES + value, inside, 0.0)
        weight = tl.load(norm + value, value < VALUES, 0.0)
        result = gated_norm(tl.load(place, inside, 0.0).to(tl.float32), weight, gate, eps, VALUES, BY_CHANNEL, SM)
        tl.store(place, nearest(result, gate, SM), inside)


def delta_prefill(
    inputs: DeltaInputs, heads: GatedDelta, weights: DeltaWeights, state: Tensor, rows: StateRows, out: Tensor
) -> None:
    """The prefill rows' part of `reference.gated_delta`, behind the convolution, written into `out`."""
    qkv, z, b, a = inputs
    tokens, sm, decodes = len(qkv), sm_arch(qkv.device), rows.decodes
    prefills, pairs = len(rows.lengths) - decodes, len(qkv) * heads.value_heads
    slots, starts, lengths = (each[decodes:] for each in (rows.slots, rows.starts, rows.lengths))
    u, w, scores = (qkv.new_empty((pairs, width)) for width in (heads.value_dim, heads.key_dim, CHUNK))
    decays = torch.empty(pairs * heads.decays, dtype=torch.float32, device=qkv.device)
    wide_keys, wide_values = (triton.next_power_of_2(max(size, 16)) for size in (heads.key_dim, heads.value_dim))
    common = {
        "HEADS": heads.value_heads, "RATIO": heads.ratio, "KEYS": heads.key_dim, "VALUES": heads.value_dim, "CHUNK": CHUNK,
        "WIDE_KEYS": wide_keys, "BY_CHANNEL": heads.by_channel, "EPS": NORM_EPS, "SM": sm, "launch_pdl": sm >= 90,
    }  # fmt: skip
    if heads.by_channel:
        _sum_decays[(rows.chunks, heads.value_heads)](
            a, weights.a_log, weights.dt_bias, decays, starts, prefills, a.stride(0), HEADS=heads.value_heads, KEYS=heads.key_dim,
            WIDE_KEYS=wide_keys, CHUNK=CHUNK, MOST=max_chunk_rows(prefills), SM=sm, num_warps=4, launch_pdl=sm >= 90,
        )  # fmt: skip
    # Decays of channels would be loaded ahead, too, for which there is no shared memory.
    overlaps = qkv.element_size() == 2 and not heads.by_channel and gpu(qkv.device).shared_memory >= SCAN_BYTES
    scale, scanned = heads.key_dim**-0.5, min(SCANNED, wide_values)
    _prepare[(rows.chunks, heads.value_heads)](
        qkv, b, a, weights.a_log, weights.dt_bias, u, w, scores, decays, starts, prefills, b.stride(0), a.stride(0), scale,
        WIDE_VALUES=wide_values, NEAR=NEAR, MOST=max_chunk_rows(prefills), num_warps=8, num_stages=1, **common,
    )  # fmt: skip
    _scan[(prefills, heads.value_heads, triton.cdiv(heads.value_dim, scanned))](
        qkv, u, w, scores, decays, state, out, slots, starts, lengths, scale, SCANNED=scanned, num_warps=4,
        num_stages=2 if overlaps else 1, **common,
    )  # fmt: skip
    _norm_and_gate[(tokens,)](
        out, z, weights.norm, starts, prefills, z.stride(0), weights.eps, HEADS=heads.value_heads,
        MOST_HEADS=triton.next_power_of_2(heads.value_heads), VALUES=heads.value_dim, WIDE_VALUES=wide_values,
        BY_CHANNEL=heads.by_channel, SM=sm, num_warps=4, launch_pdl=sm >= 90,
    )  # fmt: skip
