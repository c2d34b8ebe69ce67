# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The causal convolution before the gated delta rule: each channel over the last tokens of its row, then SiLU.

    out[t] = silu(bias + sum over taps j of weight[j] * x[t - taps + 1 + j])        see `reference.causal_conv`

A decode row's program reads what the convolution covers of earlier steps and moves it by one token. Of prefill rows, programs for
chunks of tokens read it, and a second kernel behind them writes what the next step needs. Their slots, starts and lengths begin
anywhere in those of the batch: kernels have no variants for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gated_delta.chunks import chunk_at, row_at, sigmoid
from phalanx.kernels.gated_delta.reference import CHUNK, StateRows, max_chunk_rows
from phalanx.kernels.vectors import nearest

BLOCK, TOKENS = 256, 16
"""Channels of a program; tokens of one of a prefill row."""


@triton.jit
def _conv_decode(
    x, weight, bias, tails, out, slots, starts, lengths, kv_slots, channels, pitch,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    token, count, slot, start = row_at(slots, starts, lengths, row, SM)
    if tl.load(kv_slots + token, count > 0, -1) >= 0:
        tail, going = tails + slot * ((TAPS - 1) * channels) + channel, inside & (start > 0)
        new = tl.load(x + token * pitch + channel, inside, 0.0)
        total = new.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, inside, 0.0).to(tl.float32)
        for tap in tl.static_range(TAPS - 1):
            old = tl.load(tail + tap * channels, going, 0.0)
            total += old * tl.load(weight + channel * TAPS + tap, inside, 0.0).to(tl.float32)
            if tap > 0:
                tl.store(tail + (tap - 1) * channels, old, inside)
        if BIAS:
            total += tl.load(bias + channel, inside, 0.0).to(tl.float32)
        tl.store(tail + (TAPS - 2) * channels, new.to(tl.float32), inside)
        tl.store(out + token * channels + channel, nearest(total * sigmoid(total), new, SM), inside)


@triton.jit
def _before(x, tails, place, j, channel, channels, pitch, begin, going, mask, TAPS: tl.constexpr):
    """Inputs j of a row, in fp32: those of this step, or, where j < 0, those before it."""
    now = tl.load(x + (begin + j) * pitch + channel, mask & (j >= 0), 0.0).to(tl.float32)
    earlier = tl.load(tails + place + (TAPS - 1 + j) * channels + channel, mask & (j < 0) & going, 0.0)
    return tl.where(j >= 0, now, earlier)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _conv_prefill(
    x, weight, bias, tails, out, slots, starts, lengths, rows, channels, pitch, slot_pitch,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The arguments of rows are those of prefill rows."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    first, row, begin, count = chunk_at(starts, rows, tl.program_id(0), TOKENS, MOST)
    if first >= 0:
        i, going = first + tl.arange(0, TOKENS)[:, None], tl.load(lengths + row) > count
        place, start = tl.load(slots + row).to(tl.int64) * slot_pitch, begin.to(tl.int64)
        mask = (i < count) & (channel < channels)
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            taken = _before(x, tails, place, i - (TAPS - 1) + tap, channel, channels, pitch, start, going, mask, TAPS)
            total += taken * tl.load(weight + channel * TAPS + tap, channel < channels, 0.0).to(tl.float32)
        if BIAS:
            total += tl.load(bias + channel, channel < channels, 0.0).to(tl.float32)
        like = tl.load(x + channel, channel < channels, 0.0)
        tl.store(out + (start + i) * channels + channel, nearest(total * sigmoid(total), like, SM), mask)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def _keep_tails(
    x, tails, slots, starts, lengths, channels, pitch, slot_pitch, TAPS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """What the next step needs of a prefill row, in the place of what this one needed."""
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, count, slot, start = row_at(slots, starts, lengths, row, SM)
    if count > 0:
        inside, place = channel < channels, slot * slot_pitch
        for tap in tl.static_range(TAPS - 1):
            taken = _before(x, tails, place, count - (TAPS - 1) + tap, channel, channels, pitch, begin, start > 0, inside, TAPS)
            tl.store(tails + place + tap * channels + channel, taken, inside)


def causal_conv(x: Tensor, weight: Tensor, tails: Tensor, rows: StateRows, bias: Tensor | None = None) -> Tensor:
    """The kernels of `reference.causal_conv`, for x whose rows are contiguous. Tokens of no row have no output."""
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    sm = sm_arch(x.device)
    if rows.decodes:
        _conv_decode[(rows.decodes, triton.cdiv(channels, BLOCK))](
            x, weight, weight if bias is None else bias, tails, out, rows.slots, rows.starts, rows.lengths, rows.kv_slots, channels,
            x.stride(0), TAPS=weight.shape[2], BLOCK=BLOCK, BIAS=bias is not None, SM=sm, num_warps=4, launch_pdl=sm >= 90,
        )  # fmt: skip
    if rows.chunks:
        conv_prefill(x, weight, tails, out, rows, bias)
    return out


def conv_prefill(
    x: Tensor, weight: Tensor, tails: Tensor, out: Tensor, rows: StateRows, bias: Tensor | None = None
) -> None:  # fmt: skip
    """The same of prefill rows, written into `out`. tails [slots, taps - 1 or more, channels]: the first are those before a row."""
    channels, taps, prefills, sm = x.shape[1], weight.shape[2], len(rows.lengths) - rows.decodes, sm_arch(x.device)
    if not prefills:
        return
    slots, starts, lengths = (each[rows.decodes :] for each in (rows.slots, rows.starts, rows.lengths))
    blocks, pitches = triton.cdiv(channels, BLOCK), (x.stride(0), tails.stride(0))
    common = {"TAPS": taps, "BLOCK": BLOCK, "SM": sm, "num_warps": 4, "launch_pdl": sm >= 90}
    _conv_prefill[(rows.chunks * (CHUNK // TOKENS), blocks)](
        x, weight, weight if bias is None else bias, tails, out, slots, starts, lengths, prefills, channels, *pitches,
        TOKENS=TOKENS, MOST=max_chunk_rows(prefills), BIAS=bias is not None, **common,
    )  # fmt: skip
    _keep_tails[(prefills, blocks)](x, tails, slots, starts, lengths, channels, *pitches, **common)
