# SPDX-License-Identifier: Apache-2.0
"""How products with weights scaled by block cut the weight: pure functions of the sizes, as `choice` has them for other weights."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.kernels.products import choice
from phalanx.kernels.products.choice import OneRow


class Blocks(NamedTuple):
    """Several tokens and a weight scaled by block. rows, tokens: of the weight and of x in a program's tile; stages: blocks of
    columns that are under way at once; parts: programs that share a tile's columns, whose sums a second kernel adds up."""

    rows: int
    tokens: int
    warps: int
    stages: int
    parts: int = 1


FEW = 64
"""Tokens up to which tiles are as wide as the tokens: reading the weight is the time. Also the most that are multiplied in 16 bit
by a kernel that widens e4m3 in registers."""
SHARED_MEMORY = 227 * 1024
"""Bytes of one program on Hopper; less elsewhere."""
_LEAST_DEEP = 4  # blocks of columns that a program which shares a tile has at least


def rows(
    tokens: int, outputs: int, blocks: int, *, multiprocessors: int = 132, shared: int = SHARED_MEMORY, width: int = 1,
    large: bool = True,
) -> Blocks:  # fmt: skip
    """For x [tokens, in], of `width` bytes each, and weight [outputs, in] in e4m3 that spans `blocks` blocks of 128 columns. large:
    the device has registers for tiles of 128 rows and 128 tokens, as Blackwell, whose sums come by another way, does not.

    What a kernel is compiled for changes with the magnitude of `tokens` alone: an engine runs each magnitude before it serves.
    """
    tokens = 1 << (tokens - 1).bit_length()
    if tokens <= FEW:
        high, side, warps, deep, programs = 64, 16 if tokens <= 16 else 32 if tokens <= 32 else 64, 4, 6, 3
    elif large and -(-outputs // 128) * -(-tokens // 128) >= multiprocessors:
        high, side, warps, deep, programs = 128, 128, 8, 4, 1
    else:
        high, side, warps, deep, programs = 64, 128, 4, 4, 2
    tiles = -(-outputs // high) * -(-tokens // side)
    parts = max(1, min(programs * multiprocessors // tiles, blocks // _LEAST_DEEP, 8))
    stages = min(deep, (shared // programs - 1024) // (128 * (high + width * side)))
    return Blocks(high, side, warps, max(2, stages), parts)


def one_row(inputs: int) -> OneRow:
    """For one token and a weight scaled by block, whose columns with those of the block before its first are `inputs`."""
    found = choice.fp8(1, 1, inputs)
    assert isinstance(found, OneRow)
    return found
