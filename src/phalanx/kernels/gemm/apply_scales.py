# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The scales of a product in e4m3 whose reader does not apply them: sums * rows * columns, in fp32, rounded once, in place.

The weight's scales are asked for before the kernel waits for the one before it, since no kernel writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.kernels.vectors import nearest

PIECE = 1024
"""Columns of one program."""


@triton.jit
def _scale_sums(sums, rows, columns, width, BLOCK: tl.constexpr, SM: tl.constexpr):
    if SM >= 90:
        gdc_launch_dependents()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    column_scale = tl.load(columns + column, mask, 0.0)
    if SM >= 90:
        gdc_wait()
    place = sums + row.to(tl.int64) * width + column
    value = tl.load(place, mask, 0.0)
    tl.store(place, nearest(value.to(tl.float32) * tl.load(rows + row) * column_scale, value, SM), mask)


def apply_scales(product: Unscaled) -> Tensor:
    """product: values [T, N] in bf16, fp16 or fp32, all contiguous -> its values, which are the finished product now."""
    values, rows, columns = product
    tokens, width = values.shape
    if tokens:
        sm = sm_arch(values.device)
        block = min(PIECE, triton.next_power_of_2(width))
        _scale_sums[(tokens, triton.cdiv(width, block))](
            values, rows, columns, width, BLOCK=block, SM=sm, num_warps=4, launch_pdl=sm >= 90
        )
    return values
