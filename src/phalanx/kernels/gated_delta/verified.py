# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The gated delta rule of decode rows whose tokens may be drafts: see `reference.with_drafts`, which these kernels compute.

The first row of each slot computes all rows of the slot, one token after the other. A program has some channels of the convolution,
or one value head; each has its own copy of the position up to which the state is. `flush` takes in what a slot has kept before the
prefill kernels go on from its state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gated_delta.chunks import gated_norm, log_decay, row_at, sigmoid
from phalanx.kernels.gated_delta.reference import NORM_EPS, DeltaWeights, StateRows
from phalanx.kernels.vectors import nearest

BLOCK = 256
"""Channels of a program of the convolution."""


@triton.jit
def first_of_slot(slots, kv_slots, row, token, count, NEW: tl.constexpr):
    """Whether a row's program computes the rows of its slot."""
    first = count > 0
    if NEW:
        before = tl.load(slots + row - 1, row > 0, -1)
        first = (before != tl.load(slots + row)) & (tl.load(kv_slots + token, count > 0, -1) >= 0)
    return first


@triton.jit
def is_next(slots, starts, kv_slots, row, token, i, rows):
    """Whether row + i is of the slot of the row, and has a token with a block. Rows that are none are of slot 0."""
    inside = (row + i < rows) & (tl.load(starts + row + i + 1, row + i < rows, 0) > token + i)
    same = tl.load(slots + row + i, inside, -1) == tl.load(slots + row)
    return inside & same & (tl.load(kv_slots + token + i, inside, -1) >= 0)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _conv_verify(
    x, weight, bias, tails, out, accepted, slots, starts, lengths, kv_slots, rows, channels, pitch, slot_pitch,
    TAPS: tl.constexpr, KEPT: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """accepted [rows * KEPT, channels]: the convolved inputs that a slot has kept, of its first row. bias: of channels, or None."""
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    token, count, slot, start = row_at(slots, starts, lengths, row, SM)
    if first_of_slot(slots, kv_slots, row, token, count, NEW):
        kept = tails + slot * slot_pitch + channel
        origin = kept + (TAPS - 1 + KEPT) * channels
        going = inside & (start > 0)
        at = tl.max(tl.load(origin, going, 0.0), 0).to(tl.int64)
        taken = tl.where(start > 0, tl.minimum(tl.maximum(start - at, 0), KEPT), 0)  # steps that measure memory begin anywhere
        like = tl.load(weight + channel * TAPS, inside, 0.0)
        added = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            added += tl.load(bias + channel, inside, 0.0).to(tl.float32)
        for j in range(0, taken):
            total = added
            for tap in tl.static_range(TAPS):
                earlier = tl.load(kept + (j + tap) * channels, inside, 0.0)
                total += earlier * tl.load(weight + channel * TAPS + tap, inside, 0.0).to(tl.float32)
            tl.store(accepted + (row * KEPT + j) * channels + channel, nearest(total * sigmoid(total), like, SM), inside)
        if NEW:
            for i in range(0, KEPT):
                if is_next(slots, starts, kv_slots, row, token, i, rows):
                    total = added
                    for tap in tl.static_range(TAPS):
                        place = i + tap - (TAPS - 1)
                        earlier = tl.load(kept + (taken + TAPS - 1 + place) * channels, going & (place < 0), 0.0)
                        now = tl.load(x + (token + place) * pitch + channel, inside & (place >= 0), 0.0).to(tl.float32)
                        both = tl.where(place < 0, earlier, now)
                        total += both * tl.load(weight + channel * TAPS + tap, inside, 0.0).to(tl.float32)
                    tl.store(out + (token + i) * channels + channel, nearest(total * sigmoid(total), like, SM), inside)
        for tap in tl.static_range(TAPS - 1):
            tl.debug_barrier()  # a warp may store what another one still loads
            earlier = tl.load(kept + (taken + tap) * channels, going, 0.0)
            tl.debug_barrier()
            tl.store(kept + tap * channels, earlier, inside)
        tl.debug_barrier()
        if NEW:
            for i in range(0, KEPT):
                if is_next(slots, starts, kv_slots, row, token, i, rows):
                    now = tl.load(x + (token + i) * pitch + channel, inside, 0.0).to(tl.float32)
                    tl.store(kept + (TAPS - 1 + i) * channels, now, inside)
            tl.store(origin, tl.zeros([BLOCK], tl.float32) + start.to(tl.float32), inside)
        else:
            tl.store(origin, tl.zeros([BLOCK], tl.float32) + (start + count).to(tl.float32), inside)


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


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _delta_verify(
    qkv, accepted, z, ba, a_log, dt_bias, norm, state, pending, out, slots, starts, lengths, kv_slots, rows, z_pitch, ba_pitch, eps,
    scale, HEADS: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE_KEYS: tl.constexpr,
    WIDE_VALUES: tl.constexpr, KEPT: tl.constexpr, NEW: tl.constexpr, EPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """pending [slots, HEADS, 2 * KEPT + 1]: b, then a of the tokens that a slot has kept, then the position of its state."""
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, WIDE_KEYS)[:, None], tl.arange(0, WIDE_VALUES)[None, :]
    is_key, is_value = key < KEYS, value < VALUES
    token, count, slot, start = row_at(slots, starts, lengths, row, SM)
    if first_of_slot(slots, kv_slots, row, token, count, NEW):
        CHANNELS: tl.constexpr = 2 * (HEADS // RATIO * KEYS) + HEADS * VALUES
        kept = pending + (slot * HEADS + head) * (2 * KEPT + 1)
        at = tl.load(kept + 2 * KEPT, start > 0, 0.0).to(tl.int64)
        taken = tl.where(start > 0, tl.minimum(tl.maximum(start - at, 0), KEPT), 0)  # steps that measure memory begin anywhere
        place = (slot * HEADS + head) * (KEYS * VALUES) + key * VALUES + value
        matrix = tl.load(state + place, is_key & is_value & (start > 0), 0.0)
        log, bias = tl.load(a_log + head), tl.load(dt_bias + head)
        for j in range(0, taken):
            own = accepted + (row * KEPT + j).to(tl.int64) * CHANNELS
            b, a = tl.load(kept + j), tl.load(kept + KEPT + j)
            matrix, _ = delta_token(
                matrix, own, b, a, log, bias, head, key, value, is_key, is_value, scale, HEADS, RATIO, KEYS, VALUES, EPS
            )
        tl.store(state + place, matrix, is_key & is_value & ((taken > 0) | (start == 0)))
        tl.debug_barrier()  # a warp may store what another one still loads
        if NEW:
            for i in range(0, KEPT):
                if is_next(slots, starts, kv_slots, row, token, i, rows):
                    now = token + i
                    b = tl.load(ba + now * ba_pitch + head).to(tl.float32)
                    a = tl.load(ba + now * ba_pitch + HEADS + head).to(tl.float32)
                    tl.store(kept + i, b)
                    tl.store(kept + KEPT + i, a)
                    matrix, q = delta_token(
                        matrix, qkv + now * CHANNELS, b, a, log, bias, head, key, value, is_key, is_value, scale,
                        HEADS, RATIO, KEYS, VALUES, EPS,
                    )  # fmt: skip
                    store_output(matrix, q, z, norm, out, now, head, value, is_value, z_pitch, eps, HEADS, VALUES, SM)
            tl.store(kept + 2 * KEPT, start.to(tl.float32))
        else:
            tl.store(kept + 2 * KEPT, (start + count).to(tl.float32))


def conv_verify(
    x: Tensor, weight: Tensor, tails: Tensor, out: Tensor, rows: StateRows, part: slice, kept: int, *, new: bool,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`reference.conv_behind_state` of the rows of a part, written into `out`; those of the tokens that were kept are returned:
    [rows of the part * kept, channels]. new: the tokens of the rows may be drafts."""
    slots, lengths, channels, sm = rows.slots[part], rows.lengths[part], x.shape[1], sm_arch(x.device)
    accepted = out.new_empty(len(slots) * kept, channels)
    _conv_verify[(len(slots), triton.cdiv(channels, BLOCK))](
        x, weight, bias, tails, out, accepted, slots, rows.starts[part.start :], lengths, rows.kv_slots, len(slots), channels,
        x.stride(0), tails.stride(0), TAPS=weight.shape[2], BLOCK=BLOCK, KEPT=kept, NEW=new, SM=sm, num_warps=4,
        launch_pdl=sm >= 90,
    )  # fmt: skip
    return accepted


def verify(
    qkv: Tensor, z: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, conv: Tensor, state: Tensor, pending: Tensor,
    rows: StateRows, convolved: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """The decode rows of `reference.with_drafts`: their outputs are written into `out`."""
    _launch(qkv, z, ba, heads, weights, conv, state, pending, rows, convolved, out, slice(0, rows.decodes), new=True)


def flush(
    qkv: Tensor, z: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, conv: Tensor, state: Tensor, pending: Tensor,
    rows: StateRows, convolved: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Bring the states of prefill rows to where these begin, before they are computed; the position becomes that of their end."""
    _launch(qkv, z, ba, heads, weights, conv, state, pending, rows, convolved, out, slice(rows.decodes, None), new=False)


def _launch(
    qkv: Tensor, z: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, conv: Tensor, state: Tensor, pending: Tensor,
    rows: StateRows, convolved: Tensor, out: Tensor, part: slice, *, new: bool,
) -> None:  # fmt: skip
    slots, lengths, starts = rows.slots[part], rows.lengths[part], rows.starts[part.start :]
    count, sm = len(slots), sm_arch(qkv.device)
    accepted = conv_verify(qkv, weights.conv, conv, convolved, rows, part, heads.kept, new=new)
    common = {"KEPT": heads.kept, "NEW": new, "SM": sm, "launch_pdl": sm >= 90}
    _delta_verify[(count, heads.value_heads)](
        convolved, accepted, z, ba, weights.a_log, weights.dt_bias, weights.norm, state, pending, out, slots, starts, lengths,
        rows.kv_slots, count, z.stride(0), ba.stride(0), weights.eps, heads.key_dim**-0.5,
        HEADS=heads.value_heads, RATIO=heads.ratio, KEYS=heads.key_dim, VALUES=heads.value_dim,
        WIDE_KEYS=triton.next_power_of_2(heads.key_dim), WIDE_VALUES=triton.next_power_of_2(heads.value_dim), EPS=NORM_EPS,
        num_warps=8, **common,
    )  # fmt: skip
