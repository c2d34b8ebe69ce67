# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Apply the scales to the unscaled output of an FP8 GEMM whose reader does not: values * rows * columns, in fp32, rounded once, in
place.

The weight's scales are loaded before the kernel waits for the one before it, since no kernel writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.kernels.vectors import nearest

MAX_BLOCK = 1024
"""Columns of one program."""


@triton.jit
def _apply_scales(values, rows, columns, width, BLOCK: tl.constexpr, SM: tl.constexpr):
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    column_scale = tl.load(columns + column, mask, 0.0)
    if SM >= 90:
        gdc_wait()
    place = values + row.to(tl.int64) * width + column
    value = tl.load(place, mask, 0.0)
    tl.store(place, nearest(value.to(tl.float32) * tl.load(rows + row) * column_scale, value, SM), mask)


def apply_scales(output: Unscaled) -> Tensor:
    """output: values [T, N] in bf16, fp16 or fp32, all contiguous -> the same tensor, which is the finished output now."""
    values, rows, columns = output
    tokens, width = values.shape
    if tokens:
        sm = sm_arch(values.device)
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        _apply_scales[(tokens, triton.cdiv(width, block))](
            values, rows, columns, width, BLOCK=block, SM=sm, num_warps=4, launch_pdl=sm >= 90
        )
    return values
