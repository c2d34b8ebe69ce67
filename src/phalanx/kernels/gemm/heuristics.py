# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a GEMM, and how it tiles the weight: pure functions of the sizes, with thresholds measured on H200.

In e4m3 our kernels beat torch up to 64 tokens: by themselves only in some shapes from two tokens on, but also behind a kernel that
still runs while they load the weight. In 16 bit torch is faster for all but one token.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class GemvTiling(NamedTuple):
    """One token. rows, block: rows of the weight and columns of each that a program reads at a time."""

    rows: int
    block: int
    warps: int


class FusedGemvTiling(NamedTuple):
    """One token, by a kernel that also runs the op behind the GEMV on pairs of its outputs. pairs, block: pairs of rows of the
    weight and columns of each row that a program reads at a time."""

    pairs: int
    block: int
    warps: int


class SkinnyTiling(NamedTuple):
    """A few tokens in e4m3, on Hopper (`fp8_skinny`). rows: of a tile of the weight, 64, 128 or 256; stages: tiles that shared
    memory holds; programs: how many share the weight; warps: 4 for every 64 rows, at most. More programs than multiprocessors need
    tiles of which one multiprocessor has room for two programs'."""

    rows: int
    stages: int
    programs: int
    warps: int


class Cublas(Enum):
    """Torch's GEMM in e4m3."""

    SCALED = "with scales by row and column"
    UNSCALED = "without scales, which is faster for few tokens; they are applied after it"


GEMV_QUANT_MAX_INPUTS = 8192
"""Inputs up to which every program of a GEMV quantizes the token again, rather than one kernel before it."""
WIDE_OUTPUTS = 8192
"""Outputs above which leaving out the scales gains little, and the weight's scales are much to read again for each token."""
UNSCALED_MAX_TOKENS_WIDE, UNSCALED_MAX_TOKENS_READER_SCALES, UNSCALED_MAX_TOKENS = 64, 1024, 255
"""The most tokens for which cuBLAS without scales is faster than with them: for more than WIDE_OUTPUTS outputs, where the reader
applies the scales, and else."""
SHALLOW_INPUTS = 2048
"""Inputs up to which leaving out the scales gains less than a kernel that applies them costs."""


TILE_K = 128
"""Inputs of a tile of `SkinnyTiling`: as many bytes as Hopper's shared memory is swizzled over."""
TILE_BYTES = 220 * 1024
"""Bytes of a multiprocessor's shared memory for such tiles: 7 KiB less than a program may have, for barriers and for data that
threads exchange."""
SKINNY_MAX_TOKENS = 64
"""Tokens for which `SkinnyTiling` gains: more of them would read as much of x as of the weight."""
LARGE_WEIGHT = 50_000_000
"""Bytes of a weight from which on `SkinnyTiling` gains for one token, too, unless one token with so many inputs comes unquantized
from the kernel before (`fuses_silu`); and from which on split-K is worth adding up for any number of tokens."""
SPLIT_K_4_MAX_TOKENS, SPLIT_K_2_MAX_TOKENS = 16, 48
"""The most tokens for which a weight of few outputs is split along its inputs (split-K) in 4 and in 2 parts. The more tokens there
are, the longer it takes to add up the parts."""


def tile_tokens(tokens: int) -> int:
    """Tokens in a tile of x of `SkinnyTiling`, which are the columns of the tensor cores' instruction."""
    return max(8, 1 << (tokens - 1).bit_length())


def num_stages(rows: int, tokens: int) -> int:
    """How many tiles of so many rows of the weight, each with its tile of x, fit shared memory."""
    return TILE_BYTES // ((rows + tile_tokens(tokens)) * TILE_K)


def select_fp8_skinny(tokens: int, outputs: int, inputs: int, num_sms: int) -> SkinnyTiling | None:
    """For x [tokens, inputs] and weight [outputs, inputs], both in e4m3; None: `select_fp8` decides. num_sms: the GPU's.

    Programs have whole rows of tiles, in the smallest tiles of which there are no more than multiprocessors; or nearly whole ones,
    where rows do not divide evenly, as all have as many tiles. Where half of the multiprocessors would have none, rows of tiles are
    cut anywhere.
    """
    large = outputs * inputs >= LARGE_WEIGHT
    if not 0 < tokens <= SKINNY_MAX_TOKENS or (tokens == 1 and (not large or inputs > GEMV_QUANT_MAX_INPUTS)):
        return None
    if -(-outputs // 64) <= num_sms // 2:
        rows, parts = (128, 4) if tokens <= SPLIT_K_4_MAX_TOKENS else (64, 2)
        tile_rows = -(-outputs // rows)
        parts = min(parts, num_sms // tile_rows, -(-inputs // TILE_K))
        if tokens > SPLIT_K_2_MAX_TOKENS and not large:
            return None
        return SkinnyTiling(rows, num_stages(rows, tokens), tile_rows * parts, 4)
    rows = 64 if -(-outputs // 64) <= num_sms else 128
    tile_rows = -(-outputs // rows)
    return SkinnyTiling(rows, num_stages(rows, tokens), -(-tile_rows // -(-tile_rows // num_sms)), 4)


def select_fp8(tokens: int, outputs: int, inputs: int, *, reader_scales: bool = False) -> GemvTiling | Cublas:
    """For x [tokens, inputs] and weight [outputs, inputs] in e4m3, where `select_fp8_skinny` gives None. reader_scales: the kernel
    that reads the output can apply the scales."""
    if tokens == 1:
        return gemv_fp8_tiling(inputs)
    if outputs > WIDE_OUTPUTS:
        most = UNSCALED_MAX_TOKENS_WIDE
    else:
        most = UNSCALED_MAX_TOKENS_READER_SCALES if reader_scales else UNSCALED_MAX_TOKENS
    unscaled = 1 < tokens <= most and (reader_scales or inputs > SHALLOW_INPUTS)
    return Cublas.UNSCALED if unscaled else Cublas.SCALED


def gemv_fp8_tiling(inputs: int) -> GemvTiling:
    """A program that holds its rows entirely loads all of them at once; rows wider than registers hold are read in several
    blocks."""
    if inputs <= 2048:
        return GemvTiling(rows=4, block=2048, warps=2)
    if inputs <= 4096 or inputs > 16384:
        return GemvTiling(rows=2, block=4096, warps=4)
    return GemvTiling(rows=2, block=8192, warps=4) if inputs <= 8192 else GemvTiling(rows=2, block=16384, warps=8)


def select_16bit(tokens: int, inputs: int) -> GemvTiling | None:
    """For x [tokens, inputs] and weight [out, inputs] in bf16 or fp16; None: torch."""
    if tokens != 1:
        return None
    return GemvTiling(rows=2, block=16384, warps=16) if 8192 < inputs <= 16384 else GemvTiling(rows=1, block=2048, warps=4)


def select_fused_gemv(tokens: int, inputs: int, *, fp8: bool, quantized: bool = True) -> FusedGemvTiling | None:
    """For x [tokens, inputs] and a weight [2 * any, inputs] in 16 bit, or in e4m3 (fp8). quantized: x is in e4m3, too. None: the
    GEMM and the op behind it are two kernels.

    A pair is two rows, so that of the tilings for one row it is the one of as many bytes for each thread.
    """
    if tokens != 1 or (fp8 and not quantized and inputs > GEMV_QUANT_MAX_INPUTS):
        return None
    if fp8:
        rows, block, warps = gemv_fp8_tiling(inputs)
        return FusedGemvTiling(rows // 2, block, warps)
    return FusedGemvTiling(pairs=1, block=2048, warps=4)


def fuses_silu(inner: int, *, down_is_fp8: bool) -> bool:
    """Whether one token's gate_up_proj should give silu(gate) * up [1, inner] itself. Not where the separate SiLU kernel also
    quantizes: each program of down_proj would quantize again, which costs more than that kernel."""
    return not down_is_fp8 or inner > GEMV_QUANT_MAX_INPUTS


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Token counts up to max_tokens that between them launch every variant of these kernels that any count does: GEMV and its
    fusions for one token; `fp8_skinny` for each tile of tokens and on both sides of each split-K threshold; none of ours beyond.
    But what reads the output is another variant where it has scales to apply, so there is a count on both sides of that, too."""
    tiles = {tile_tokens(tokens) for tokens in range(2, SKINNY_MAX_TOKENS + 1)}
    counts = {1, 2, SPLIT_K_4_MAX_TOKENS, SPLIT_K_2_MAX_TOKENS, SKINNY_MAX_TOKENS, 2 * SKINNY_MAX_TOKENS} | tiles
    counts |= {UNSCALED_MAX_TOKENS_READER_SCALES, UNSCALED_MAX_TOKENS_READER_SCALES + 1}
    return sorted({min(count, max_tokens) for count in counts} - {0})
