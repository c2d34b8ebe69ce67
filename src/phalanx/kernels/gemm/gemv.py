# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""One row times a matrix, as fast as the matrix can be read.

    out[0, n] = round(sum over k of x[0, k] * weight[n, k])          in fp32, rounded once

A program has some rows of the weight, and small programs are many on a processor at once: their loads are what is under way. The
first of them is asked for before the kernel waits for the one before it, since no kernel writes weights.
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
def tile(weight, row, there, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `row` [ROWS] of weight [.., COLUMNS], where they are `there`: (the first BLOCK columns [1, BLOCK], which rows are there
    [ROWS, 1], where the first tile lies, what it holds)."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = there[:, None]
    place = weight + row[:, None].to(tl.int64) * COLUMNS + column
    return column, inside, place, tl.load(place, inside & (column < COLUMNS), 0.0)


@triton.jit
def row_sums(x, column, inside, place, coming, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x [COLUMNS] times each row of a `tile`, summed in fp32 -> [ROWS]."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, COLUMNS, BLOCK):
        here = coming
        coming = tl.load(place + begin + BLOCK, inside & (begin + BLOCK + column < COLUMNS), 0.0)
        factor = tl.load(x + begin + column, begin + column < COLUMNS, 0.0)
        total += here.to(tl.float32) * factor.to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def _gemv(x, weight, out, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inside, place, coming = tile(weight, row, row < rows, COLUMNS, BLOCK)
    if SM >= 90:
        gdc_wait()
    total = row_sums(x, column, inside, place, coming, COLUMNS, ROWS, BLOCK)
    tl.store(out + row, nearest(total, coming, SM), row < rows)


def gemv(x: Tensor, weight: Tensor, out: Tensor | None = None, *, rows: int, block: int, warps: int) -> Tensor:
    """x [1, in] times weight [out, in], both contiguous in bf16, fp16 or fp32 -> [1, out], in `out` where one is given.

    rows, block: rows of the weight and columns of each that a program reads at a time.
    """
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if out is None else out
    sm = sm_arch(x.device)
    _gemv[(triton.cdiv(outputs, rows),)](
        x, weight, out, outputs, COLUMNS=inputs, ROWS=rows, BLOCK=block, SM=sm, num_warps=warps, launch_pdl=sm >= 90
    )
    return out
