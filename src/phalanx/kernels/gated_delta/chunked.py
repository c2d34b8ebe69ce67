# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The gated delta rule of prefill rows, by chunks of 64 tokens (`reference.many_tokens` has the formulas).

| kernel | a program | what it gives |
|---|---|---|
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
from phalanx.kernels.gated_delta.reference import CHUNK, NORM_EPS, DeltaWeights, StateRows, max_chunk_rows
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
def _prepare(
    qkv, ba, a_log, dt_bias, u, w, scores, decays, starts, rows, ba_pitch, scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE_KEYS: tl.constexpr,
    WIDE_VALUES: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, MOST: tl.constexpr, EPS: tl.constexpr, SM: tl.constexpr,
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
        beta = tl.where(valid, sigmoid(tl.load(ba + token * ba_pitch + head, valid, 0.0).to(tl.float32)), 0.0)
        a = tl.load(ba + token * ba_pitch + HEADS + head, valid, 0.0).to(tl.float32)
        decay = tl.cumsum(tl.where(valid, log_decay(a, tl.load(a_log + head), tl.load(dt_bias + head)), 0.0), 0)
        lower = i[:, None] >= i[None, :]
        between = tl.where(lower, tl.exp(tl.where(lower, decay[:, None] - decay[None, :], 0.0)), 0.0)
        zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
        keys = dot(k, tl.trans(k), v, zeros, SM) * between * beta[:, None]
        PRECISION: tl.constexpr = "tf32x3" if qkv.dtype.element_ty == tl.float32 else "tf32"
        solved = _inverse(tl.where(i[:, None] > i[None, :], keys, 0.0), CHUNK, NEAR, PRECISION)
        pair = (token * HEADS + head)[:, None]
        values = dot(solved, v.to(tl.float32) * beta[:, None], v, tl.zeros([CHUNK, WIDE_VALUES], tl.float32), SM)
        tl.store(u + pair * VALUES + value, nearest(values, v, SM), is_value)
        faded = k * (beta * tl.exp(decay))[:, None]
        tl.store(w + pair * KEYS + key, nearest(dot(solved, faded, v, tl.zeros([CHUNK, WIDE_KEYS], tl.float32), SM), v, SM), is_key)
        q = load_normed(qkv, own + head // RATIO * KEYS + key, is_key, EPS) * scale
        score = dot(q, tl.trans(k), v, zeros, SM) * between
        tl.store(scores + pair * CHUNK + i[None, :], nearest(score, v, SM), tl.broadcast_to(valid[:, None], score.shape))
        tl.store(decays + token * HEADS + head, decay, valid)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _scan(
    qkv, u, w, scores, decays, state, out, slots, starts, lengths, scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE_KEYS: tl.constexpr,
    SCANNED: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr, SM: tl.constexpr,
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
            decay = tl.load(decays + token * HEADS + head, valid, 0.0)
            last = tl.sum(tl.where(i == tl.minimum(count - first, CHUNK) - 1, decay, 0.0), 0)
            faded = tl.load(w + pair * KEYS + key[None, :], is_key, 0.0)
            new = tl.load(u + pair * VALUES + value, is_value, 0.0).to(tl.float32)
            zeros = tl.zeros([CHUNK, SCANNED], tl.float32)
            new = new - dot(faded, matrix, faded, zeros, SM)
            q = load_normed(qkv, own + head // RATIO * KEYS + key[None, :], is_key, EPS) * (scale * tl.exp(decay))[:, None]
            score = tl.load(scores + pair * CHUNK + i[None, :], tl.broadcast_to(valid[:, None], [CHUNK, CHUNK]), 0.0)
            output = dot(score, new, faded, dot(q, matrix, faded, zeros, SM), SM)
            tl.store(out + pair * VALUES + value, nearest(output, faded, SM), is_value)
            k = load_normed(qkv, own + WIDTH + head // RATIO * KEYS + key[None, :], is_key, EPS)
            k = k * tl.where(valid, tl.exp(last - decay), 0.0)[:, None]
            matrix = dot(tl.trans(k), new, faded, matrix * tl.exp(last), SM)
        tl.store(state + place, matrix, inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts"])
def _norm_and_gate(
    out, z, norm, starts, rows, z_pitch, eps,
    HEADS: tl.constexpr, MOST_HEADS: tl.constexpr, VALUES: tl.constexpr, WIDE_VALUES: tl.constexpr, SM: tl.constexpr,
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
        result = gated_norm(tl.load(place, inside, 0.0).to(tl.float32), weight, gate, eps, VALUES, SM)
        tl.store(place, nearest(result, gate, SM), inside)


def delta_prefill(
    qkv: Tensor, z: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, state: Tensor, rows: StateRows, out: Tensor
) -> None:  # fmt: skip
    """The prefill rows' part of `reference.gated_delta`, behind the convolution, written into `out`."""
    tokens, sm, decodes = len(qkv), sm_arch(qkv.device), rows.decodes
    prefills, pairs = len(rows.lengths) - decodes, len(qkv) * heads.value_heads
    slots, starts, lengths = (each[decodes:] for each in (rows.slots, rows.starts, rows.lengths))
    u, w, scores = (qkv.new_empty((pairs, width)) for width in (heads.value_dim, heads.key_dim, CHUNK))
    decays = torch.empty(pairs, dtype=torch.float32, device=qkv.device)
    wide_keys, wide_values = (triton.next_power_of_2(max(size, 16)) for size in (heads.key_dim, heads.value_dim))
    common = {
        "HEADS": heads.value_heads, "RATIO": heads.ratio, "KEYS": heads.key_dim, "VALUES": heads.value_dim, "CHUNK": CHUNK,
        "WIDE_KEYS": wide_keys, "EPS": NORM_EPS, "SM": sm, "launch_pdl": sm >= 90,
    }  # fmt: skip
    scale, scanned = heads.key_dim**-0.5, min(SCANNED, wide_values)
    _prepare[(rows.chunks, heads.value_heads)](
        qkv, ba, weights.a_log, weights.dt_bias, u, w, scores, decays, starts, prefills, ba.stride(0), scale,
        WIDE_VALUES=wide_values, NEAR=NEAR, MOST=max_chunk_rows(prefills), num_warps=8, num_stages=1, **common,
    )  # fmt: skip
    _scan[(prefills, heads.value_heads, triton.cdiv(heads.value_dim, scanned))](
        qkv, u, w, scores, decays, state, out, slots, starts, lengths, scale, SCANNED=scanned, num_warps=4,
        num_stages=2 if qkv.element_size() == 2 and gpu(qkv.device).shared_memory >= SCAN_BYTES else 1, **common,
    )  # fmt: skip
    _norm_and_gate[(tokens,)](
        out, z, weights.norm, starts, prefills, z.stride(0), weights.eps, HEADS=heads.value_heads,
        MOST_HEADS=triton.next_power_of_2(heads.value_heads), VALUES=heads.value_dim, WIDE_VALUES=wide_values, SM=sm,
        num_warps=4, launch_pdl=sm >= 90,
    )  # fmt: skip
