# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMV with a weight in e4m3 that has a scale per row and 128 columns, as fast as the weight can be read.

    out[0, n] = round(sum over blocks b of (sum over k in b of x[0, k] * weight[n, k]) * x_scale[0, b] * scale[n, b])

x is in e4m3 with a scale per block; or in 16 or 32 bit: then each program quantizes it, as `reference.per_token_group_quant_fp8`
does, or multiplies it unquantized. Loads are arranged as in `gemv_fp8`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.block_scaled_gemm import BLOCK_COLUMNS
from phalanx.kernels.gemm.gemv_fp8 import HALF, LANE, _halves
from phalanx.kernels.gemm.heuristics import GemvTiling
from phalanx.kernels.quantize import e4m3_byte, scale_of, widened
from phalanx.kernels.vectors import largest_along, nearest

LANES = tl.constexpr(8)
"""Runs of LANE columns in a block."""


@triton.jit
def _scale_of_lanes(low, high, BLOCK: tl.constexpr):
    """Scales of the blocks that values [1, BLOCK / LANE, HALF] and their other halves make up, for each lane [1, BLOCK / LANE]."""
    top = tl.maximum(
        largest_along(tl.abs(low), 2), largest_along(tl.abs(high), 2), propagate_nan=tl.PropagateNan.ALL
    )  # fmt: skip
    top = largest_along(tl.reshape(top, [1, BLOCK // BLOCK_COLUMNS, LANES]), 2)
    return tl.reshape(tl.broadcast_to(scale_of(top), [1, BLOCK // BLOCK_COLUMNS, LANES]), [1, BLOCK // LANE])


@triton.jit
def _as_e4m3(value, inverse, SM: tl.constexpr):
    return widened(e4m3_byte(value * inverse[:, :, None], SM), value, SM)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _block_scaled_gemv(
    x, x_scale, weight, scale, out, rows, blocks, COLUMNS: tl.constexpr, SKIP: tl.constexpr, QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """x_scale [blocks] for x in e4m3, which comes as uint8 as the weight does, else None; then it is quantized here, or (with
    QUANTIZE off) not at all."""
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (row < rows)[:, None]
    column = tl.arange(0, BLOCK)[None, :] - SKIP
    place = weight + row[:, None].to(tl.int64) * COLUMNS + column
    block = (tl.arange(0, BLOCK // LANE) // LANES)[None, :]
    scale_place = scale + row[:, None].to(tl.int64) * blocks + block
    next_values = tl.load(place, valid & (column >= 0) & (column < COLUMNS), 0)
    factor = tl.load(scale_place, valid & (block < blocks), 0.0)
    if SM >= 90:
        gdc_wait()
    lane = tl.arange(0, BLOCK // LANE)[None, :, None] * LANE + tl.arange(0, HALF)[None, None, :] - SKIP
    total = tl.zeros([ROWS, BLOCK // LANE], tl.float32)
    for begin in range(0, SKIP + COLUMNS, BLOCK):
        values, unit = next_values, factor
        after = begin + BLOCK
        next_values = tl.load(place + after, valid & (after + column < COLUMNS), 0)
        factor = tl.load(scale_place + after // BLOCK_COLUMNS, valid & (after // BLOCK_COLUMNS + block < blocks), 0.0)
        below, above = begin + lane, begin + lane + HALF
        low = tl.load(x + below, (below >= 0) & (below < COLUMNS), 0)
        high = tl.load(x + above, (above >= 0) & (above < COLUMNS), 0)
        if x_scale is not None:
            low, high = widened(low, total, SM), widened(high, total, SM)
            unit *= tl.load(x_scale + begin // BLOCK_COLUMNS + block, begin // BLOCK_COLUMNS + block < blocks, 0.0)
        else:
            low, high = low.to(tl.float32), high.to(tl.float32)
            if QUANTIZE:
                own = _scale_of_lanes(low, high, BLOCK)
                inverse = tl.div_rn(1.0, own)
                low, high = _as_e4m3(low, inverse, SM), _as_e4m3(high, inverse, SM)
                unit *= own
        first, second = _halves(values, ROWS, BLOCK)
        total += (tl.sum(widened(first, total, SM) * low, 2) + tl.sum(widened(second, total, SM) * high, 2)) * unit
    tl.store(out + row, nearest(tl.sum(total, 1), tl.zeros([ROWS], out.dtype.element_ty), SM), row < rows)


def block_scaled_gemv(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, begin: int, quantize: bool,
    tiling: GemvTiling,
) -> Tensor:  # fmt: skip
    """x [1, in] times weight [out, in] e4m3 with scale [out, blocks] fp32, contiguous -> [1, out] in `dtype`.

    x in e4m3 with x_scale [1, blocks]; or in bf16, fp16 or fp32 and x_scale None, and then quantized on the way or not. begin:
    which column of its block of 128 the first one is. `in` and begin are multiples of 16, tiling.block is one of 128.
    """
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=dtype, device=x.device)
    sm = sm_arch(x.device)
    _block_scaled_gemv[(triton.cdiv(outputs, tiling.rows),)](
        x if x_scale is None else x.view(torch.uint8), x_scale, weight.view(torch.uint8), scale, out, outputs, scale.shape[1],
        COLUMNS=inputs, SKIP=begin, QUANTIZE=quantize, ROWS=tiling.rows, BLOCK=tiling.block, SM=sm, num_warps=tiling.warps,
        launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
