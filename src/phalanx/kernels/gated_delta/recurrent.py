# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The gated delta rule of decode rows: a program has one value head of a row. It reads the head's state once and writes it once,
which is most of the time that it takes, and ends with the gated norm."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gated_delta.chunks import log_decay, sigmoid
from phalanx.kernels.gated_delta.reference import NORM_EPS, DeltaWeights, StateRows
from phalanx.kernels.vectors import nearest


class DeltaTiling(NamedTuple):
    """values: of a head's state, in a tile; stages: tiles under way at once. One tiling for all numbers of rows: the order of sums
    depends on it."""

    values: int
    stages: int
    warps: int
    registers: int | None = None


TILING = DeltaTiling(64, 2, 4)
"""On an H200, 32 heads of 128 x 128: 64 rows take 76 us, 3.5 TB/s; 16 rows 23, one row 6. Tiles of 32 take 81, whole heads 95."""


@triton.jit
def _delta_decode(
    qkv, z, ba, a_log, dt_bias, norm, state, out, slots, starts, lengths, kv_slots, z_pitch, ba_pitch, eps, scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE_KEYS: tl.constexpr,
    WIDE_VALUES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """qkv [T, channels], contiguous; z and ba with pitches. The state is read and written in tiles of TILE values, of which up to
    STAGES - 1 are loaded ahead. One pass over S, the decayed state before the token, gives both sums: S^T k, and for the output
    S^T q + (k . q) delta. The first tiles are under way before the norms of q and k are computed."""
    row, head = tl.program_id(0), tl.program_id(1)
    TILES: tl.constexpr = WIDE_VALUES // TILE
    WIDTH: tl.constexpr = HEADS // RATIO * KEYS
    key, tile_value = tl.arange(0, WIDE_KEYS), tl.arange(0, TILE)[None, :]
    each = tl.arange(0, TILES)[:, None]
    value = each * TILE + tile_value
    decay, bias, weight = tl.load(a_log + head), tl.load(dt_bias + head), tl.load(norm + value, value < VALUES, 0.0)
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1) - token
    going = tl.load(lengths + row) > count
    exists = count > 0
    is_stored = tl.load(kv_slots + token, exists, -1) >= 0
    own = qkv + token * (2 * WIDTH + HEADS * VALUES)
    place = state + (slot * HEADS + head) * (KEYS * VALUES) + key[:, None] * VALUES + tile_value
    gate = tl.load(z + token * z_pitch + head * VALUES + value, (value < VALUES) & exists, 0.0)
    q, k = tl.zeros([WIDE_KEYS], tl.float32), tl.zeros([WIDE_KEYS], tl.float32)
    kept, beta, both = 0.0, 0.0, 0.0
    result = tl.zeros([TILES, TILE], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        if tile == 0:
            q = tl.load(own + head // RATIO * KEYS + key, (key < KEYS) & exists, 0.0).to(tl.float32)
            k = tl.load(own + WIDTH + head // RATIO * KEYS + key, (key < KEYS) & exists, 0.0).to(tl.float32)
            b = tl.load(ba + token * ba_pitch + head, exists, 0.0).to(tl.float32)
            a = tl.load(ba + token * ba_pitch + HEADS + head, exists, 0.0).to(tl.float32)
            kept, beta = tl.exp(log_decay(a, decay, bias)), sigmoid(b)
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
            both = tl.sum(q * k, 0)
        inside = tile * TILE + tile_value < VALUES
        cell = inside & (key < KEYS)[:, None]
        matrix = tl.load(place + tile * TILE, cell & going, 0.0, eviction_policy="evict_first")
        v = tl.load(own + 2 * WIDTH + head * VALUES + tile * TILE + tile_value, inside & exists, 0.0).to(tl.float32)
        matrix *= kept
        by_key = tl.sum(matrix * k[:, None], 0, keep_dims=True)
        by_query = tl.sum(matrix * q[:, None], 0, keep_dims=True)
        delta = (v - by_key) * beta
        tl.store(place + tile * TILE, matrix + k[:, None] * delta, cell & is_stored, eviction_policy="evict_first")
        result = tl.where(each == tile, by_query + both * delta, result)
    inverse = tl.rsqrt(tl.sum(tl.sum(result * result, 1, keep_dims=True), 0, keep_dims=True) / VALUES + eps)
    result = nearest(nearest(result * inverse, gate, SM).to(tl.float32) * weight.to(tl.float32), gate, SM).to(tl.float32)
    result *= gate.to(tl.float32) * sigmoid(gate.to(tl.float32))
    tl.store(out + token * (HEADS * VALUES) + head * VALUES + value, nearest(result, gate, SM), (value < VALUES) & is_stored)


def delta_decode(
    qkv: Tensor, z: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, state: Tensor, rows: StateRows, out: Tensor,
    tiling: DeltaTiling | None = None,
) -> None:  # fmt: skip
    """The decode rows' part of `reference.gated_delta`, behind the convolution, written into `out`."""
    sm, tiling, wide_values = sm_arch(qkv.device), tiling or TILING, triton.next_power_of_2(heads.value_dim)
    _delta_decode[(rows.decodes, heads.value_heads)](
        qkv, z, ba, weights.a_log, weights.dt_bias, weights.norm, state, out, rows.slots, rows.starts, rows.lengths, rows.kv_slots,
        z.stride(0), ba.stride(0), weights.eps, heads.key_dim**-0.5,
        HEADS=heads.value_heads, RATIO=heads.ratio, KEYS=heads.key_dim, VALUES=heads.value_dim,
        WIDE_KEYS=triton.next_power_of_2(heads.key_dim), WIDE_VALUES=wide_values, TILE=min(tiling.values, wide_values),
        STAGES=tiling.stages, EPS=NORM_EPS, SM=sm, num_warps=tiling.warps, maxnreg=tiling.registers, launch_pdl=sm >= 90,
    )  # fmt: skip
