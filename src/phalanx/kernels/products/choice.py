# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies, and how it cuts the weight: pure functions of the sizes, with thresholds measured on H200.

Only one token is faster here than in torch: from two on, cuBLAS and CUTLASS read the weight as fast as it can be read.
"""

from __future__ import annotations

from typing import NamedTuple


class OneRow(NamedTuple):
    """One token. rows, block: rows of the weight and columns of each that a program reads at a time."""

    rows: int
    block: int
    warps: int


WIDEST_TO_QUANTIZE = 8192
"""Inputs up to which every program of one row quantizes it again, rather than one kernel before it."""


def fp8(tokens: int, inputs: int) -> OneRow | None:
    """For x [tokens, inputs] and weight [out, inputs] in e4m3; None: torch, with scales by row and column.

    A program that holds its rows whole asks for all of them at once; wider ones than registers hold come in turns.
    """
    if tokens != 1:
        return None
    if inputs <= 2048:
        return OneRow(rows=4, block=2048, warps=2)
    if inputs <= 4096 or inputs > 16384:
        return OneRow(rows=2, block=4096, warps=4)
    return OneRow(rows=2, block=8192, warps=4) if inputs <= 8192 else OneRow(rows=2, block=16384, warps=8)


def sixteen(tokens: int, inputs: int) -> OneRow | None:
    """For x [tokens, inputs] and weight [out, inputs] in bf16 or fp16; None: torch."""
    if tokens != 1:
        return None
    return OneRow(rows=2, block=16384, warps=16) if 8192 < inputs <= 16384 else OneRow(rows=1, block=2048, warps=4)
