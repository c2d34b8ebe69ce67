# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies, and how it cuts the weight: pure functions of the sizes, with thresholds measured on H200.

None means torch's product: cuBLAS in 16 bit, CUTLASS with scales by row and column in e4m3.
"""

from __future__ import annotations

from typing import NamedTuple


class OneRow(NamedTuple):
    """One token. rows, block: rows of the weight and columns of each that a program reads at a time."""

    rows: int
    block: int
    warps: int


class FewRows(NamedTuple):
    """Up to 128 tokens. rows, block: rows of the weight and columns of a tile; splits: programs that share the columns; stages:
    tiles under way in shared memory; ahead: tiles called into L2 before the kernel's wait (0, or a power of 2)."""

    rows: int
    block: int
    splits: int
    stages: int = 4
    warps: int = 4
    ahead: int = 4


class ManyRows(NamedTuple):
    """tokens, rows: of a tile of the product; block: columns at a time; per_processor: programs that stay (0: one a tile)."""

    tokens: int = 128
    rows: int = 128
    block: int = 128
    stages: int = 4
    warps: int = 8
    per_processor: int = 1


Tiling = OneRow | FewRows | ManyRows

FEW_FP8, FEW_SIXTEEN = 64, 1
"""The most tokens for which `FewRows` is faster than torch."""
MANY_FP8 = range(0)
"""For how many tokens `ManyRows` is."""
WIDEST_TO_QUANTIZE = 8192
"""Inputs up to which every program of one row quantizes it again, rather than one kernel before it."""


def fp8(tokens: int, outputs: int, inputs: int) -> Tiling | None:
    """For x [tokens, inputs] and weight [outputs, inputs] in e4m3."""
    if tokens == 1:
        return OneRow(rows=4, block=2048, warps=4)
    if 0 < tokens <= FEW_FP8:
        return _few(tokens, outputs, inputs, width=1)
    return ManyRows() if tokens in MANY_FP8 else None


def sixteen(tokens: int, outputs: int, inputs: int) -> Tiling | None:
    """For x [tokens, inputs] and weight [outputs, inputs] in bf16 or fp16."""
    if tokens == 1:
        return OneRow(rows=4, block=2048, warps=8)
    return _few(tokens, outputs, inputs, width=2) if 0 < tokens <= FEW_SIXTEEN else None


def _few(tokens: int, outputs: int, inputs: int, *, width: int) -> FewRows:
    """width: bytes of a number. More tokens want more rows in a tile, since each program reads all tokens of its columns."""
    if tokens <= 32:
        rows, block, programs, warps = 64, 256 // width, 396, 4
    else:
        rows, block, programs, warps = 128, 128 // width, 264, 8
    return FewRows(rows, block, shared_columns(outputs, inputs, rows, block, programs), stages=4, warps=warps, ahead=4)


def shared_columns(outputs: int, inputs: int, rows: int, block: int, programs: int) -> int:
    """How many programs share the columns, so that there are about `programs`: the fewest that reach it of those that divide the
    blocks evenly, up to 16; the most of them if none does."""
    tiles, blocks = -(-outputs // rows), -(-inputs // block)
    even = [splits for splits in range(1, 17) if blocks % splits == 0]
    return next((splits for splits in even if tiles * splits >= programs), even[-1])
