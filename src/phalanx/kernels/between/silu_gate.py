# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""silu(gate) * up in one pass, and the same in e4m3.

    out = round(round(silu(gate)) * up)                    rounded to the dtype twice, as plain torch does
    quantized: e4m3(out / scale), scale given, or largest |out| of the token / 448

A program of `silu_mul` has a piece of a row; one of `silu_mul_quant_fp8` has a row, which it needs whole for the scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.quantize import FP8_MAX, SMALLEST_AMAX, e4m3_bits
from phalanx.kernels.residual_rms_norm import capability

PIECE = 2048
"""Columns that one program of `silu_mul` works on."""


@triton.jit
def nearest(value, like, PTX: tl.constexpr):
    """fp32 values in the dtype of `like`, rounded to nearest even. Triton's interpreter cuts bf16 off instead."""
    if PTX == 0 and like.dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return value.to(like.dtype)


@triton.jit
def _gated(gate_up, row, column, mask, width, PTX: tl.constexpr):
    """A piece of one row, in its dtype."""
    first = gate_up + row.to(tl.int64) * (2 * width) + column
    gate = tl.load(first, mask, 0.0)
    up = tl.load(first + width, mask, 0.0)
    wide = gate.to(tl.float32)
    turned = nearest(tl.div_rn(wide, 1.0 + tl.exp(-wide)), gate, PTX).to(tl.float32)
    return nearest(turned * up.to(tl.float32), gate, PTX)


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr, PTX: tl.constexpr):
    if PTX >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    tl.store(out + row.to(tl.int64) * width + column, _gated(gate_up, row, column, mask, width, PTX), mask)


@triton.jit
def _silu_mul_quant_fp8(gate_up, out, scales, width, GIVEN: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """scales: read where it is GIVEN, one for all; else written, one per token."""
    if PTX >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = _gated(gate_up, row, column, mask, width, PTX).to(tl.float32)
    if GIVEN:
        scale = tl.load(scales)
    else:
        top = tl.max(tl.abs(value), 0)
        scale = tl.div_rn(tl.where(top < SMALLEST_AMAX, SMALLEST_AMAX, top), FP8_MAX)
        tl.store(scales + row, scale)
    scaled = value * tl.div_rn(1.0, scale)
    place = out + row.to(tl.int64) * width + column
    if PTX >= 89:
        tl.store(place, tl.clamp(scaled, -FP8_MAX, FP8_MAX).to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask)
    else:
        tl.store(place, e4m3_bits(scaled).to(tl.uint8), mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """The kernel of `reference.silu_mul`, for gate_up [T, 2 * I] contiguous (bf16, fp16, fp32)."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        ptx = capability(gate_up.device)
        block = min(PIECE, triton.next_power_of_2(width))
        _silu_mul[(tokens, triton.cdiv(width, block))](
            gate_up, out, width, BLOCK=block, PTX=ptx, num_warps=8 if block >= 2048 else 4, launch_pdl=ptx >= 90
        )
    return out


def silu_mul_quant_fp8(gate_up: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The kernel of `reference.silu_mul_quant_fp8`, for gate_up [T, 2 * I] contiguous (bf16, fp16, fp32)."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=gate_up.device) if scale is None else scale
    if tokens:
        ptx = capability(gate_up.device)
        block = triton.next_power_of_2(width)
        _silu_mul_quant_fp8[(tokens,)](
            gate_up, out.view(torch.uint8), scales, width, GIVEN=scale is not None, BLOCK=block, PTX=ptx,
            num_warps=max(1, min(32 if tokens <= 128 else 16, block // 256)), launch_pdl=ptx >= 90,
        )  # fmt: skip
    return out, scales
