# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMV with a weight in e4m3, as fast as the weight can be read; for Ada, Hopper and later.

    out[0, n] = round((sum over k of x[0, k] * weight[n, k]) * x_scale * scale[n])          in fp32, rounded once

x is in e4m3, or in 16 or 32 bit: then each program quantizes it, as `reference.quantize_fp8` does. In 16 bit that gives the same
bits as a kernel that quantizes before this one: see `row_sums_fp8`. The weight's first tile is loaded before the kernel waits for
the one before it, since no kernel writes weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.gemv import tile
from phalanx.kernels.gemm.heuristics import GemvTiling
from phalanx.kernels.quantize import clipped, e4m3_byte, scale_of
from phalanx.kernels.vectors import nearest

LANE, HALF = tl.constexpr(16), tl.constexpr(8)
"""Adjacent values in e4m3 and in 16 bit that one load of a thread brings."""


@triton.jit
def _halves(values, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The lower and the upper HALF of each LANE of values [ROWS, BLOCK]: two of [ROWS, BLOCK / LANE, HALF]."""
    return tl.split(tl.permute(tl.reshape(values, [ROWS, BLOCK // LANE, 2, HALF]), (0, 1, 3, 2)))


@triton.jit
def _quantized(values, inverse, SM: tl.constexpr):
    """Rounded to e4m3, in fp32."""
    return e4m3_byte(clipped(values.to(tl.float32) * inverse, SM), SM).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def row_sums_fp8(
    x, x_scale, column, inside, place, next_values, COLUMNS: tl.constexpr, PADDED: tl.constexpr, QUANTIZE: tl.constexpr,
    STATIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """x [COLUMNS] times each row of the weight from a `tile` on, summed in fp32, times x's scale -> [ROWS].

    QUANTIZE: x is not in e4m3 yet. STATIC: x_scale is its scale, else it is computed here. PADDED: COLUMNS up to a power of 2.

    A thread adds up the values that its own load of the weight brought, in halves, because a load of x in 16 bit brings half as
    many. Without the halves, x would be spread over threads in another way than the weight; the compiler would move the weight to
    the layout of x, and sums would be added up in another order than those of x in e4m3."""
    if STATIC:
        x_unit = tl.load(x_scale)
    else:
        columns = tl.arange(0, PADDED)
        x_unit = scale_of(tl.max(tl.abs(tl.load(x + columns, columns < COLUMNS, 0.0).to(tl.float32)), 0))
    inverse = tl.div_rn(1.0, x_unit)
    lane = tl.arange(0, BLOCK // LANE)[None, :, None] * LANE + tl.arange(0, HALF)[None, None, :]
    total = tl.zeros([ROWS, BLOCK // LANE], tl.float32)
    for begin in range(0, COLUMNS, BLOCK):
        values = next_values
        next_values = tl.load(place + begin + BLOCK, inside & (begin + BLOCK + column < COLUMNS), 0.0)
        if QUANTIZE:
            low = _quantized(tl.load(x + begin + lane, begin + lane < COLUMNS, 0.0), inverse, SM)
            high = _quantized(tl.load(x + begin + lane + HALF, begin + lane + HALF < COLUMNS, 0.0), inverse, SM)
        else:
            low, high = _halves(tl.load(x + begin + column, begin + column < COLUMNS, 0.0), 1, BLOCK)
        first, second = _halves(values, ROWS, BLOCK)
        total += tl.sum(first.to(tl.float32) * low.to(tl.float32), 2) + tl.sum(second.to(tl.float32) * high.to(tl.float32), 2)
    return tl.sum(total, 1) * x_unit


@triton.jit
def _gemv_fp8(
    x, x_scale, weight, scale, out, rows, COLUMNS: tl.constexpr, PADDED: tl.constexpr, QUANTIZE: tl.constexpr, STATIC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inside, place, next_values = tile(weight, row, row < rows, COLUMNS, BLOCK)
    row_scale = tl.load(scale + row, row < rows, 0.0)
    if SM >= 90:
        gdc_wait()
    total = row_sums_fp8(x, x_scale, column, inside, place, next_values, COLUMNS, PADDED, QUANTIZE, STATIC, ROWS, BLOCK, SM)
    tl.store(out + row, nearest(total * row_scale, tl.zeros([ROWS], out.dtype.element_ty), SM), row < rows)


def gemv_fp8(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, tiling: GemvTiling
) -> Tensor:  # fmt: skip
    """x [1, in] times weight [out, in] e4m3 with scale [out] fp32, all contiguous, `in` a multiple of 16 -> [1, out] in `dtype`.

    x in e4m3 means x * x_scale. x in bf16, fp16 or fp32 is quantized with x_scale, or with its own scale where that is None.
    x_scale: one fp32 number, of any shape.
    """
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=dtype, device=x.device)
    sm = sm_arch(x.device)
    quantize = x.dtype != torch.float8_e4m3fn
    _gemv_fp8[(triton.cdiv(outputs, tiling.rows),)](
        x, scale if x_scale is None else x_scale, weight, scale, out, outputs,
        COLUMNS=inputs, PADDED=triton.next_power_of_2(inputs), QUANTIZE=quantize, STATIC=x_scale is not None, ROWS=tiling.rows,
        BLOCK=tiling.block, SM=sm, num_warps=tiling.warps, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
