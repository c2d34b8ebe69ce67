# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies, and how it cuts the weight: pure functions of the sizes, with thresholds measured on H200.

Up to 64 tokens are faster here than in torch: by themselves only in some shapes from two tokens on, but behind a kernel that still
runs while the weight is on its way. In 16 bit, torch has all but one token.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class OneRow(NamedTuple):
    """One token. rows, block: rows of the weight and columns of each that a program reads at a time."""

    rows: int
    block: int
    warps: int


class Pairs(NamedTuple):
    """One token, by a kernel that also does what follows the product to pairs of its elements. pairs, block: pairs of rows of the
    weight and columns of each row that a program reads at a time."""

    pairs: int
    block: int
    warps: int


class FewRows(NamedTuple):
    """A few tokens in e4m3, on Hopper. rows: of a tile of the weight, 64, 128 or 256; stages: tiles that shared memory
    holds; programs: how many share the weight; warps: 4 for every 64 rows, at most. More programs than multiprocessors need tiles
    for which two have room on one."""

    rows: int
    stages: int
    programs: int
    warps: int


class Torchs(Enum):
    """Torch's product in e4m3."""

    SCALED = "with scales by row and column"
    SUMS = "the bare sums, faster for few tokens; scales come after"


WIDEST_TO_QUANTIZE = 8192
"""Inputs up to which every program of one row quantizes it again, rather than one kernel before it."""
WIDE = 8192
"""Outputs above which sums alone gain little, and the weight's scales are much to read again for each token: `FEW_WIDE`."""
FEW_WIDE, FEW_READ, FEW = 64, 1024, 255
"""The most tokens for which torch's sums alone are faster than its scaled ones: of wide products, of those whose reader applies the
scales, and of others."""
SHALLOW = 2048
"""Inputs up to which what sums alone gain is less than a kernel that scales them takes."""


DEPTH = 128
"""Inputs of a tile of `FewRows`: as many bytes as Hopper's shared memory is swizzled over."""
ROOM = 220 * 1024
"""Bytes of a multiprocessor's shared memory for such tiles: 7 KiB less than a program may have, for barriers and what moves between
threads."""
MOST_FEW = 64
"""Tokens for which `FewRows` gains: more of them would read as much of x as of the weight."""
LARGE = 50_000_000
"""Bytes of a weight from which on `FewRows` gains for one token, too, unless its input is so wide that one token has it from a
kernel that quantizes nothing (`gates`); and parts of any number of tokens are worth adding up."""
SPLIT_IN_FOUR, SPLIT_IN_TWO = 16, 48
"""The most tokens for which a weight of few outputs is cut along its inputs, in so many parts. Sums of parts take longer to add
up, the more tokens there are."""


def columns_for(tokens: int) -> int:
    """Of the tensor cores' product of `FewRows`: tokens in a tile of x."""
    return max(8, 1 << (tokens - 1).bit_length())


def stages_for(rows: int, tokens: int) -> int:
    """As many as shared memory holds of tiles of so many rows of the weight and so many tokens."""
    return ROOM // ((rows + columns_for(tokens)) * DEPTH)


def few_rows(tokens: int, outputs: int, inputs: int, processors: int) -> FewRows | None:
    """For x [tokens, inputs] and weight [outputs, inputs], both in e4m3; None: `fp8` says. processors: the GPU's.

    Programs have whole rows of tiles, in the smallest tiles of which there are no more than processors; or nearly whole ones, where
    rows do not divide evenly, as all have as many tiles. Where half of the processors would have none, rows are cut throughout.
    """
    large = outputs * inputs >= LARGE
    if not 0 < tokens <= MOST_FEW or (tokens == 1 and (not large or inputs > WIDEST_TO_QUANTIZE)):
        return None
    if -(-outputs // 64) <= processors // 2:
        rows, parts = (128, 4) if tokens <= SPLIT_IN_FOUR else (64, 2)
        along = -(-outputs // rows)
        parts = min(parts, processors // along, -(-inputs // DEPTH))
        return FewRows(rows, stages_for(rows, tokens), along * parts, 4) if tokens <= SPLIT_IN_TWO or large else None
    rows = 64 if -(-outputs // 64) <= processors else 128
    along = -(-outputs // rows)
    return FewRows(rows, stages_for(rows, tokens), -(-along // -(-along // processors)), 4)


def fp8(tokens: int, outputs: int, inputs: int, *, reader_scales: bool = False) -> OneRow | Torchs:
    """For x [tokens, inputs] and weight [outputs, inputs] in e4m3. reader_scales: what reads the product can apply the scales."""
    if tokens == 1:
        return _one_row_fp8(inputs)
    few = FEW_WIDE if outputs > WIDE else FEW_READ if reader_scales else FEW
    return Torchs.SUMS if 1 < tokens <= few and (reader_scales or inputs > SHALLOW) else Torchs.SCALED


def _one_row_fp8(inputs: int) -> OneRow:
    """A program that holds its rows whole asks for all of them at once; wider ones than registers hold come in turns."""
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


def pairs(tokens: int, inputs: int, *, fp8: bool, quantized: bool = True) -> Pairs | None:
    """For x [tokens, inputs] and a weight [2 * any, inputs] in 16 bit, or in e4m3 (fp8). quantized: x is in e4m3, too. None: the
    product and what follows it are two kernels.

    A pair is two rows, so that of the tilings for one row it is the one of as many bytes for each thread.
    """
    if tokens != 1 or (fp8 and not quantized and inputs > WIDEST_TO_QUANTIZE):
        return None
    if fp8:
        rows, block, warps = _one_row_fp8(inputs)
        return Pairs(rows // 2, block, warps)
    return Pairs(pairs=1, block=2048, warps=4)


def gates(inner: int, *, down_is_fp8: bool) -> bool:
    """Whether one token's gate_up product should give silu(gate) * up [1, inner] itself. Not where the kernel apart quantizes it on
    the way: each program of the down product would do so again, which costs more than that kernel."""
    return not down_is_fp8 or inner > WIDEST_TO_QUANTIZE
