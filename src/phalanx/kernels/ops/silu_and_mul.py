# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""silu(gate) * up in one pass, and the same in e4m3; or gelu(gate) * up.

    out = round(round(silu(gate)) * up)                    rounded to the dtype twice, as plain torch does
    out = round(silu(gate) * up)                           of an unscaled GEMM output: its scales are applied first, all in fp32
    quantized: e4m3(out / scale), scale given, or largest |out| of the token / 448

A program of `silu_mul` has a block of a row; one of `silu_mul_quant_fp8` has one row, all of which it needs for the scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.ops.heuristics import column_warps
from phalanx.kernels.quantize import clipped, e4m3_byte, scale_of
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.kernels.vectors import nearest

MAX_BLOCK = 2048
"""Columns that one program of `silu_mul` works on."""


@triton.jit
def _activated(value, GELU: tl.constexpr, SM: tl.constexpr):
    """SiLU, or GELU by tanh, in fp32: value / (1 + exp(-t)), where t is the value, or 2 sqrt(2 / pi) (value + 0.044715 value^3).

    With an exact quotient this, and not memory, would bound the time of a long row; the fast quotient is wrong in at most the last
    two of 24 bits. Where exp() overflows fp32 it gives the limit, 0."""
    if GELU:
        exponent = value * (1.0 + 0.044715 * value * value) * -2.302208198
    else:
        exponent = value * -1.4426950408889634
    one_more = 1.0 + tl.exp2(exponent)
    if SM == 0:
        activated = value / one_more
    else:
        activated = libdevice.fast_dividef(value, one_more)
    return activated


@triton.jit
def _column_scales(columns, column, mask, width):
    """The column scales of gate and up. No kernel writes them, so that they are loaded before the wait."""
    if columns is not None:
        gate, up = tl.load(columns + column, mask, 0.0), tl.load(columns + width + column, mask, 0.0)
    else:
        gate, up = 1.0, 1.0
    return gate, up


@triton.jit
def silu_mul_rounded(gate, up, SM: tl.constexpr, GELU: tl.constexpr = False):
    """silu(gate) * up of a finished GEMM output, in its dtype."""
    activated = nearest(_activated(gate.to(tl.float32), GELU, SM), gate, SM)
    return nearest(activated.to(tl.float32) * up.to(tl.float32), gate, SM)


@triton.jit
def _silu_mul_block(gate_up, rows, gate_scale, up_scale, row, column, mask, width, GELU: tl.constexpr, SM: tl.constexpr):
    """silu(gate) * up of a block of one row, in the dtype of gate_up."""
    first = gate_up + row.to(tl.int64) * (2 * width) + column
    gate = tl.load(first, mask, 0.0)
    up = tl.load(first + width, mask, 0.0)
    if rows is not None:
        unit = tl.load(rows + row)
        activated = _activated(gate.to(tl.float32) * unit * gate_scale, GELU, SM)
        out = nearest(activated * (up.to(tl.float32) * unit * up_scale), gate, SM)
    else:
        out = silu_mul_rounded(gate, up, SM, GELU)
    return out


@triton.jit
def _silu_mul(gate_up, rows, columns, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    """rows, columns: the scales of an unscaled GEMM output, or None."""
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_scale, up_scale = _column_scales(columns, column, mask, width)
    if SM >= 90:
        gdc_wait()
    value = _silu_mul_block(gate_up, rows, gate_scale, up_scale, row, column, mask, width, GELU, SM)
    tl.store(out + row.to(tl.int64) * width + column, value, mask)


@triton.jit
def _silu_mul_quant_fp8(
    gate_up, rows, columns, out, scales, width, STATIC: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """scales: with STATIC one scale for all, which is read; else one per token, which is written. rows, columns: as for
    `_silu_mul`."""
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    gate_scale, up_scale = _column_scales(columns, column, mask, width)
    if SM >= 90:
        gdc_wait()
    value = _silu_mul_block(gate_up, rows, gate_scale, up_scale, row, column, mask, width, GELU, SM).to(tl.float32)
    if STATIC:
        scale = tl.load(scales)
    else:
        scale = scale_of(tl.max(tl.abs(value), 0))
        tl.store(scales + row, scale)
    scaled = value * tl.div_rn(1.0, scale)
    place = out + row.to(tl.int64) * width + column
    if STATIC:
        scaled = clipped(scaled, SM)
    tl.store(place, e4m3_byte(scaled, SM), mask)


def silu_mul(gate_up: Tensor | Unscaled, *, gelu: bool = False) -> Tensor:
    """The kernel of `reference.silu_mul`, for gate_up [T, 2 * I] contiguous (bf16, fp16, fp32)."""
    values, rows, columns = Unscaled.parts(gate_up)
    tokens, doubled = values.shape
    width = doubled // 2
    out = torch.empty((tokens, width), dtype=values.dtype, device=values.device)
    if tokens:
        sm = sm_arch(values.device)
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        _silu_mul[(tokens, triton.cdiv(width, block))](
            values, rows, columns, out, width, GELU=gelu, BLOCK=block, SM=sm, num_warps=8 if block >= 2048 else 4,
            launch_pdl=sm >= 90,
        )  # fmt: skip
    return out


def silu_mul_quant_fp8(
    gate_up: Tensor | Unscaled, scale: Tensor | None = None, *, gelu: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernel of `reference.silu_mul_quant_fp8`, for gate_up [T, 2 * I] contiguous (bf16, fp16, fp32)."""
    values, rows, columns = Unscaled.parts(gate_up)
    tokens, doubled = values.shape
    width = doubled // 2
    out = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=values.device) if scale is None else scale
    if tokens:
        sm = sm_arch(values.device)
        block = triton.next_power_of_2(width)
        _silu_mul_quant_fp8[(tokens,)](
            values, rows, columns, out.view(torch.uint8), scales, width, STATIC=scale is not None, GELU=gelu, BLOCK=block, SM=sm,
            num_warps=column_warps(block, tokens), launch_pdl=sm >= 90,
        )  # fmt: skip
    return out, scales
