# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMV in 16 and 32 bit, as fast as the weight can be read.

    out[0, n] = round(sum over k of x[0, k] * weight[n, k] + bias[n])        in fp32, rounded once, or not at all

A program has some rows of the weight. Programs are small, so that many run on a multiprocessor at once and keep their loads in
flight. The first tile is loaded before the kernel waits for the one before it, since no kernel writes weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.vectors import nearest


@triton.jit
def tile(weight, row, valid, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The first tile of rows `row` [ROWS] of weight [.., COLUMNS], of those that are `valid`: (its columns [1, BLOCK], valid [ROWS,
    1], the addresses of the tile, its values)."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = valid[:, None]
    place = weight + row[:, None].to(tl.int64) * COLUMNS + column
    return column, inside, place, tl.load(place, inside & (column < COLUMNS), 0.0)


@triton.jit
def row_sums(x, column, inside, place, next_values, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x [COLUMNS] times each row of the weight from a `tile` on, summed in fp32 -> [ROWS]."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, COLUMNS, BLOCK):
        values = next_values
        next_values = tl.load(place + begin + BLOCK, inside & (begin + BLOCK + column < COLUMNS), 0.0)
        factor = tl.load(x + begin + column, begin + column < COLUMNS, 0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def _gemv(x, weight, bias, out, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inside, place, next_values = tile(weight, row, row < rows, COLUMNS, BLOCK)
    if bias is not None:
        added = tl.load(bias + row, row < rows, 0.0).to(tl.float32)
    if SM >= 90:
        gdc_wait()
    total = row_sums(x, column, inside, place, next_values, COLUMNS, ROWS, BLOCK)
    if bias is not None:
        total += added
    tl.store(out + row, nearest(total, tl.zeros([ROWS], out.dtype.element_ty), SM), row < rows)


def gemv(
    x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None, *, rows: int, block: int, warps: int
) -> Tensor:  # fmt: skip
    """x [1, in] times weight [out, in], both contiguous in bf16, fp16 or fp32, plus bias [out] -> [1, out], in `out` where one is
    given, which may be in fp32.

    rows, block: rows of the weight and columns of each that a program reads at a time.
    """
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if out is None else out
    sm = sm_arch(x.device)
    _gemv[(triton.cdiv(outputs, rows),)](
        x, weight, bias, out, outputs, COLUMNS=inputs, ROWS=rows, BLOCK=block, SM=sm, num_warps=warps, launch_pdl=sm >= 90
    )
    return out
