# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The gated delta rule of decode rows: a program has one value head of a row. It reads the head's state once and writes it once,
which is most of the time that it takes, and ends with the gated norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gated_delta.chunks import log_decay, row_at, sigmoid
from phalanx.kernels.gated_delta.reference import NORM_EPS, DeltaWeights, StateRows
from phalanx.kernels.vectors import nearest


@triton.jit
def gated_norm(values, weight, z, eps, DIM: tl.constexpr, SM: tl.constexpr):
    """values [rows, dims] in fp32, 0 beyond DIM -> round(values / rms) * weight * silu(z), in fp32."""
    inverse = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)
    normed = nearest(nearest(values * inverse[:, None], z, SM).to(tl.float32) * weight.to(tl.float32), z, SM).to(tl.float32)
    gate = z.to(tl.float32)
    return normed * (gate * sigmoid(gate))


@triton.jit
def delta_token(
    matrix, own, b, a, log, bias, head, key, value, is_key, is_value, scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """own: a token's convolved channels. Returns the state behind it, and the query."""
    WIDTH: tl.constexpr = HEADS // RATIO * KEYS
    q = tl.load(own + head // RATIO * KEYS + key, is_key, 0.0).to(tl.float32)
    k = tl.load(own + WIDTH + head // RATIO * KEYS + key, is_key, 0.0).to(tl.float32)
    v = tl.load(own + 2 * WIDTH + head * VALUES + value, is_value, 0.0).to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, 0, keep_dims=True) + EPS) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0, keep_dims=True) + EPS)
    matrix = matrix * tl.exp(log_decay(a, log, bias))
    delta = (v - tl.sum(matrix * k, 0, keep_dims=True)) * sigmoid(b)
    return matrix + k * delta, q


@triton.jit
def store_output(
    matrix, q, z, norm, out, token, head, value, is_value, z_pitch, eps, HEADS: tl.constexpr, VALUES: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """The gated norm of what a token's query reads of the state behind it."""
    gate = tl.load(z + token * z_pitch + head * VALUES + value, is_value, 0.0)
    weight = tl.load(norm + value, is_value, 0.0)
    result = gated_norm(tl.sum(matrix * q, 0, keep_dims=True), weight, gate, eps, VALUES, SM)
    tl.store(out + token * (HEADS * VALUES) + head * VALUES + value, nearest(result, gate, SM), is_value)


@triton.jit
def _delta_decode(
    qkv, z, ba, a_log, dt_bias, norm, state, out, slots, starts, lengths, kv_slots, z_pitch, ba_pitch, eps, scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE_KEYS: tl.constexpr,
    WIDE_VALUES: tl.constexpr, EPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """qkv [T, channels], contiguous; z and ba with pitches."""
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, WIDE_KEYS)[:, None], tl.arange(0, WIDE_VALUES)[None, :]
    is_key, is_value = key < KEYS, value < VALUES
    token, count, slot, start = row_at(slots, starts, lengths, row, SM)
    if tl.load(kv_slots + token, count > 0, -1) >= 0:
        CHANNELS: tl.constexpr = 2 * (HEADS // RATIO * KEYS) + HEADS * VALUES
        place = (slot * HEADS + head) * (KEYS * VALUES) + key * VALUES + value
        matrix = tl.load(state + place, is_key & is_value & (start > 0), 0.0)
        b = tl.load(ba + token * ba_pitch + head).to(tl.float32)
        a = tl.load(ba + token * ba_pitch + HEADS + head).to(tl.float32)
        log, bias = tl.load(a_log + head), tl.load(dt_bias + head)
        matrix, q = delta_token(
            matrix, qkv + token * CHANNELS, b, a, log, bias, head, key, value, is_key, is_value, scale,
            HEADS, RATIO, KEYS, VALUES, EPS,
        )  # fmt: skip
        tl.store(state + place, matrix, is_key & is_value)
        store_output(matrix, q, z, norm, out, token, head, value, is_value, z_pitch, eps, HEADS, VALUES, SM)


def delta_decode(
    qkv: Tensor, z: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, state: Tensor, rows: StateRows, out: Tensor
) -> None:  # fmt: skip
    """The decode rows' part of `reference.gated_delta`, behind the convolution, written into `out`."""
    sm = sm_arch(qkv.device)
    _delta_decode[(rows.decodes, heads.value_heads)](
        qkv, z, ba, weights.a_log, weights.dt_bias, weights.norm, state, out, rows.slots, rows.starts, rows.lengths, rows.kv_slots,
        z.stride(0), ba.stride(0), weights.eps, heads.key_dim**-0.5,
        HEADS=heads.value_heads, RATIO=heads.ratio, KEYS=heads.key_dim, VALUES=heads.value_dim,
        WIDE_KEYS=triton.next_power_of_2(heads.key_dim), WIDE_VALUES=triton.next_power_of_2(heads.value_dim),
        EPS=NORM_EPS, SM=sm, num_warps=8, launch_pdl=sm >= 90,
    )  # fmt: skip
