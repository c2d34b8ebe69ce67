# SPDX-License-Identifier: Apache-2.0
"""How products with weights scaled by block cut the weight: pure functions of the sizes, as `choice` has them for other weights.

Measured on H200: benchmarks/results/kernels_block_scaled.json has every cut of the shapes of 8B and of 70B on four ranks, at 1, 8,
64, 256 and 2048 tokens, beside torch's product. 17 to 32 tokens were not measured: they have what their neighbours have.

For one token, activations that stay in 16 bit would be up to 9 percent faster. They are quantized all the same, so that what a
token gives depends on how many there are beside it by the order of sums alone.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.kernels.products import choice
from phalanx.kernels.products.choice import OneRow

WIDTH = 128
"""Columns of a block, and of a group of activations."""


class Blocks(NamedTuple):
    """Several tokens and a weight scaled by block. rows, tokens: of the weight and of x in a program's tile; stages: blocks of
    columns that are under way at once; parts: programs that share a tile's columns, whose sums a second kernel adds up."""

    rows: int
    tokens: int
    warps: int
    stages: int
    parts: int = 1


class _Case(NamedTuple):
    """rows, tokens, warps: of `Blocks`. stages: the most where a multiprocessor has one program, two, and so on, the last for more.
    programs: tiles are cut in parts until a multiprocessor has so many; least: blocks of columns that a part has at least."""

    rows: int
    tokens: int
    warps: int
    stages: tuple[int, ...]
    programs: int
    least: int


FEW = 64
"""Tokens up to which tiles are as wide as the tokens: reading the weight is the time. Also the most that are multiplied in 16 bit
by a kernel that widens e4m3 in registers."""
SHARED_MEMORY = 227 * 1024
"""Bytes of one program on Hopper; less elsewhere."""
QUANTIZED_APART = 24_000_000
"""Bytes of a weight from which on one token is quantized by a kernel of its own: with fewer, each program does so sooner."""
_MOST_PARTS = 8

_NARROW = {
    16: _Case(64, 16, 4, stages=(8, 8, 6, 4), programs=4, least=8),
    32: _Case(64, 32, 4, stages=(6,), programs=3, least=8),
    64: _Case(64, 64, 4, stages=(6,), programs=2, least=16),
}
"""By the most tokens: weights of no more than 64 rows for each multiprocessor."""
_WIDE = {
    16: _Case(128, 16, 8, stages=(6,), programs=2, least=8),
    64: _Case(128, 64, 8, stages=(4,), programs=2, least=8),
}
"""By the most tokens: weights of more rows."""
_WIDENED = {side: _Case(64, side, 4, stages=(6,), programs=3, least=4) for side in (16, 32, 64)}
"""x in 16 bit: no other tile was tried."""
_MANY = _Case(64, 128, 4, stages=(4,), programs=2, least=4)
"""Two programs on a multiprocessor multiply and add up in turns."""
_ONE_WAVE = _Case(128, 128, 8, stages=(3,), programs=1, least=4)
"""Twice the tile: where all are under way at once, fewer bytes are read."""


def rows(
    tokens: int, outputs: int, blocks: int, *, multiprocessors: int = 132, shared: int = SHARED_MEMORY, width: int = 1,
    large: bool = True,
) -> Blocks:  # fmt: skip
    """For x [tokens, in], of `width` bytes each, and weight [outputs, in] in e4m3 that spans `blocks` blocks of 128 columns. large:
    the device has registers for tiles of 128 rows and 128 tokens, as Blackwell, whose sums come by another way, does not.

    What a kernel is compiled for changes with the magnitude of `tokens` alone: an engine runs each magnitude before it serves.
    """
    tokens = 1 << (tokens - 1).bit_length()
    case = _case(tokens, outputs, multiprocessors, width, large)
    tiles = -(-outputs // case.rows) * -(-tokens // case.tokens)
    parts = max(1, min(case.programs * multiprocessors // tiles, blocks // case.least, _MOST_PARTS))
    programs = min(case.programs, -(-tiles * parts // multiprocessors))
    stages = case.stages[min(programs, len(case.stages)) - 1]
    held = (shared // programs - 1024) // (WIDTH * (case.rows + width * case.tokens))
    return Blocks(case.rows, case.tokens, case.warps, max(2, min(stages, held)), parts)


def _case(tokens: int, outputs: int, multiprocessors: int, width: int, large: bool) -> _Case:
    if tokens <= FEW:
        wide = -(-outputs // 64) > multiprocessors
        table = _WIDENED if width > 1 else _WIDE if wide else _NARROW
        return table[min(side for side in table if side >= tokens)]
    tiles = -(-outputs // _ONE_WAVE.rows) * -(-tokens // _ONE_WAVE.tokens)
    # Fewer tiles than a third would be cut in three parts or more, which are better made of the smaller ones.
    return _ONE_WAVE if large and multiprocessors // 3 < tiles <= multiprocessors else _MANY


def torchs(tokens: int, outputs: int, inputs: int) -> bool:
    """Whether torch's product is faster than `rows`, on Hopper: about half of its time at 2048 tokens, half to nine tenths at
    fewer. Its programs have all of the inputs: where outputs are few as well, few tokens leave most of the GPU without one."""
    if tokens >= 256 or (tokens >= 8 and outputs >= 14336):
        return True
    return tokens >= 64 and (outputs >= 6144 or (tokens >= 128 and inputs <= 4096))


def one_row(inputs: int, *, quantizes: bool = False) -> OneRow:
    """For one token and a weight scaled by block, whose columns with those of the block before its first are `inputs`. quantizes:
    each program quantizes the token."""
    if quantizes and 2048 < inputs <= 4096:
        return OneRow(rows=4, block=4096, warps=8)  # more rows than others, as each program quantizes but once
    found = choice.fp8(1, 1, inputs)
    assert isinstance(found, OneRow)
    return found


def quantizes(outputs: int, inputs: int) -> bool:
    """Whether every program of `one_row` quantizes the token, rather than one kernel before it."""
    return inputs <= choice.WIDEST_TO_QUANTIZE and outputs * inputs < QUANTIZED_APART
