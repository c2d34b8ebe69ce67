# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Mamba-2 behind its convolution: of a decode row, a program has one head, and reads and writes its state once. Of a prefill row, a
program has a run of one head's values, and goes through the row chunk by chunk (`reference.many_tokens` has the formulas)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.config.gated_delta import CHUNK
from phalanx.config.mamba import Mamba2
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gated_delta.chunks import dot, row_at, sigmoid, softplus
from phalanx.kernels.gated_delta.reference import StateRows
from phalanx.kernels.mamba2.reference import MambaWeights

SCANNED = 32
"""Values of a program of `_scan`."""


@triton.jit
def _decode(
    x, groups, z, steps, a_log, skip, dt_bias, state, out, slots, starts, lengths, kv_slots, z_pitch, step_pitch,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, WIDE_STATE: tl.constexpr,
    WIDE_VALUES: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """x [T, HEADS * VALUES] and groups [T, 2 * GROUPS * STATE], contiguous; z and steps with pitches."""
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, WIDE_STATE)[:, None], tl.arange(0, WIDE_VALUES)[None, :]
    is_key, is_value = key < STATE, value < VALUES
    token, count, slot, start = row_at(slots, starts, lengths, row, SM)
    if tl.load(kv_slots + token, count > 0, -1) >= 0:
        place = (slot * HEADS + head) * (STATE * VALUES) + key * VALUES + value
        matrix = tl.load(state + place, is_key & is_value & (start > 0), 0.0)
        own = groups + token * (2 * GROUPS * STATE) + head // (HEADS // GROUPS) * STATE + key
        b = tl.load(own, is_key, 0.0).to(tl.float32)
        c = tl.load(own + GROUPS * STATE, is_key, 0.0).to(tl.float32)
        v = tl.load(x + (token * HEADS + head) * VALUES + value, is_value, 0.0).to(tl.float32)
        step = softplus(tl.load(steps + token * step_pitch + head).to(tl.float32) + tl.load(dt_bias + head))
        matrix = matrix * tl.exp(-tl.exp(tl.load(a_log + head)) * step) + b * (step * v)
        tl.store(state + place, matrix, is_key & is_value)
        gate = tl.load(z + token * z_pitch + head * VALUES + value, is_value, 0.0).to(tl.float32)
        y = tl.sum(matrix * c, 0, keep_dims=True) + tl.load(skip + head) * v
        tl.store(out + (token * HEADS + head) * VALUES + value, y * gate * sigmoid(gate), is_value)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _scan(
    x, groups, z, steps, a_log, skip, dt_bias, state, out, slots, starts, lengths, z_pitch, step_pitch,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, WIDE_STATE: tl.constexpr,
    SCANNED: tl.constexpr, CHUNK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    begin = tl.load(starts + row)
    count = tl.load(starts + row + 1) - begin
    if count > 0:
        i, key = tl.arange(0, CHUNK), tl.arange(0, WIDE_STATE)
        value = tl.program_id(2) * SCANNED + tl.arange(0, SCANNED)[None, :]
        place = (tl.load(slots + row).to(tl.int64) * HEADS + head) * (STATE * VALUES) + key[:, None] * VALUES + value
        inside = (key[:, None] < STATE) & (value < VALUES)
        matrix = tl.load(state + place, inside & (tl.load(lengths + row) > count), 0.0)
        rate, bias, through = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
        lower, zeros = i[:, None] >= i[None, :], tl.zeros([CHUNK, SCANNED], tl.float32)
        for first in range(0, count, CHUNK):
            valid, token = first + i < count, (begin + first + i).to(tl.int64)
            is_key, is_value = valid[:, None] & (key[None, :] < STATE), valid[:, None] & (value < VALUES)
            own = (token * (2 * GROUPS * STATE))[:, None] + head // (HEADS // GROUPS) * STATE + key[None, :]
            b = tl.load(groups + own, is_key, 0.0)
            c = tl.load(groups + own + GROUPS * STATE, is_key, 0.0)
            at = (token * HEADS + head)[:, None] * VALUES + value
            v = tl.load(x + at, is_value, 0.0)
            step = softplus(tl.load(steps + token * step_pitch + head, valid, 0.0).to(tl.float32) + bias)
            step = tl.where(valid, step, 0.0)
            decay = tl.cumsum(rate * step, 0)
            last = tl.sum(rate * step, 0)
            between = tl.where(lower, tl.exp(tl.where(lower, decay[:, None] - decay[None, :], 0.0)), 0.0)
            score = dot(c, tl.trans(b), v, tl.zeros([CHUNK, CHUNK], tl.float32), SM) * between
            scaled = v.to(tl.float32) * step[:, None]
            # In fp32: where the state, which the loop carries, is an operand in 16 bit, Triton 3.6 gives wrong sums on Hopper.
            y = dot(c.to(tl.float32) * tl.exp(decay)[:, None], matrix, matrix, zeros, SM)
            y = dot(score, scaled, v, y, SM) + through * v.to(tl.float32)
            gate = tl.load(z + token[:, None] * z_pitch + head * VALUES + value, is_value, 0.0).to(tl.float32)
            tl.store(out + at, y * gate * sigmoid(gate), is_value)
            faded = b.to(tl.float32) * tl.exp(last - decay)[:, None]
            matrix = dot(tl.trans(faded), scaled, v, matrix * tl.exp(last), SM)
        tl.store(state + place, matrix, inside)


def scan(
    x: Tensor, groups: Tensor, z: Tensor, steps: Tensor, sizes: Mamba2, weights: MambaWeights, state: Tensor, rows: StateRows,
    verified: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What follows the convolution in `reference.mamba2`. x and groups are contiguous. verified: outputs in which those of the
    decode rows are already."""
    out = torch.empty((len(x), sizes.inner), dtype=torch.float32, device=x.device) if verified is None else verified
    sm, decodes, prefills = sm_arch(x.device), rows.decodes, len(rows.lengths) - rows.decodes
    inputs = x, groups, z, steps, weights.a_log, weights.d, weights.dt_bias, state, out
    pitches = z.stride(0), steps.stride(0)
    wide_values = triton.next_power_of_2(max(sizes.head_dim, 16))
    common = {
        "HEADS": sizes.heads, "GROUPS": sizes.groups, "STATE": sizes.state_dim, "VALUES": sizes.head_dim,
        "WIDE_STATE": triton.next_power_of_2(max(sizes.state_dim, 16)), "SM": sm, "num_warps": 4, "launch_pdl": sm >= 90,
    }  # fmt: skip
    if decodes and verified is None:
        _decode[(decodes, sizes.heads)](
            *inputs, rows.slots, rows.starts, rows.lengths, rows.kv_slots, *pitches, WIDE_VALUES=wide_values, **common
        )
    if prefills and rows.chunks:
        slots, starts, lengths = (each[decodes:] for each in (rows.slots, rows.starts, rows.lengths))
        scanned = min(SCANNED, wide_values)
        _scan[(prefills, sizes.heads, triton.cdiv(sizes.head_dim, scanned))](
            *inputs, slots, starts, lengths, *pitches, SCANNED=scanned, CHUNK=CHUNK, num_stages=1, **common
        )
    return out
