# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Quantization to e4m3, for activations that no norm or SiLU before them has quantized, and for weights as they are loaded.

    quantized: e4m3(x / scale), scale given, or largest |x| of the row / 448

A program has one row, all of which it needs for the scale; of many short rows, as experts' inner activations are, several.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.ops.heuristics import column_warps, quantized_rows
from phalanx.kernels.quantize import clipped, e4m3_byte, scale_of


@triton.jit(do_not_specialize=["count"])
def _quantize_short_rows(
    x, out, scales, counts, count, width, STATIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """As `_quantize_fp8`, ROWS of `count` rows."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    last = tl.load(counts + 1) if counts is not None else count
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS >= last:
        return
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < last) & (column < width)
    place = row[:, None].to(tl.int64) * width + column
    value = tl.load(x + place, mask, 0.0).to(tl.float32)
    if STATIC:
        scaled = clipped(value * tl.div_rn(1.0, tl.load(scales)), SM)
    else:
        scale = scale_of(tl.max(tl.abs(value), 1))
        tl.store(scales + row, scale, row < last)
        scaled = value * tl.div_rn(1.0, scale)[:, None]
    tl.store(out + place, e4m3_byte(scaled, SM), mask)


@triton.jit
def _quantize_fp8(x, out, scales, counts, width, STATIC: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    """scales: with STATIC one scale for all, which is read; else one per row, which is written. counts: see `quantize_fp8`."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    if counts is not None and row >= tl.load(counts + 1):
        return
    column = tl.arange(0, BLOCK)
    mask = column < width
    begin = row.to(tl.int64) * width
    value = tl.load(x + begin + column, mask, 0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(scales)
    else:
        scale = scale_of(tl.max(tl.abs(value), 0))
        tl.store(scales + row, scale)
    scaled = value * tl.div_rn(1.0, scale)
    if STATIC:
        scaled = clipped(scaled, SM)
    tl.store(out + begin + column, e4m3_byte(scaled, SM), mask)


def quantize_fp8(x: Tensor, scale: Tensor | None = None, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The kernel of `reference.quantize_fp8`, for x [T, H] contiguous (bf16, fp16, fp32), H up to
    `MAX_QUANTIZED_COLUMNS`. counts [2] int32: rows from counts[1] on are not quantized, and both results are not set there."""
    tokens, width = x.shape
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=x.device) if scale is None else scale
    if tokens:
        sm = sm_arch(x.device)
        block = triton.next_power_of_2(width)
        rows = quantized_rows(block, tokens)
        if rows > 1:
            _quantize_short_rows[(triton.cdiv(tokens, rows),)](
                x, out.view(torch.uint8), scales, counts, tokens, width, STATIC=scale is not None, ROWS=rows, BLOCK=block, SM=sm,
                num_warps=4, launch_pdl=sm >= 90,
            )  # fmt: skip
        else:
            _quantize_fp8[(tokens,)](
                x, out.view(torch.uint8), scales, counts, width, STATIC=scale is not None, BLOCK=block, SM=sm,
                num_warps=column_warps(block, tokens), launch_pdl=sm >= 90,
            )  # fmt: skip
    return out, scales
