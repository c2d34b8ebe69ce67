# SPDX-License-Identifier: Apache-2.0
"""How GEMMs with weights scaled by block tile the weight: pure functions of the sizes, as `heuristics` has them for other weights.

Measured on H200: benchmarks/results/kernels_block_gemm.json has every tiling of the shapes of 8B and of 70B on four ranks, at 1,
8, 64, 256 and 2048 tokens, beside cuBLAS. 17 to 32 tokens were not measured: they have what their neighbours have.

For one token, activations that stay in 16 bit would be up to 9 percent faster. They are quantized all the same, so that a token's
result depends on how many tokens there are beside it by the order of sums alone.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.kernels.gemm import heuristics
from phalanx.kernels.gemm.heuristics import GemvTiling

BLOCK_K = 128
"""Columns of a block, and of a group of activations."""


class BlockTiling(NamedTuple):
    """Several tokens and a weight scaled by block. rows, tokens: of the weight and of x in a program's tile; stages: blocks of
    columns that are under way at once; parts: programs that share a tile's columns (split-K), whose sums a second kernel adds
    up."""

    rows: int
    tokens: int
    warps: int
    stages: int
    parts: int = 1


class _Case(NamedTuple):
    """rows, tokens, warps: of `BlockTiling`. stages: the most where a multiprocessor has one program, two, and so on, the last for
    more. programs: tiles are split along K until a multiprocessor has so many; least: blocks of columns that a part has at
    least."""

    rows: int
    tokens: int
    warps: int
    stages: tuple[int, ...]
    programs: int
    least: int


FEW_TOKENS = 64
"""Tokens up to which tiles are as wide as the tokens: reading the weight is the time. Also the most that are multiplied in 16 bit
by a kernel that widens e4m3 in registers."""
SHARED_MEMORY = 227 * 1024
"""Bytes of one program on Hopper; less elsewhere."""
QUANTIZED_APART = 24_000_000
"""Bytes of a weight from which on one token is quantized by a kernel of its own: with fewer, it is faster that each program
does."""
_MAX_PARTS = 8

_NARROW = {
    16: _Case(64, 16, 4, stages=(8, 8, 6, 4), programs=4, least=8),
    32: _Case(64, 32, 4, stages=(6,), programs=3, least=8),
    64: _Case(64, 64, 4, stages=(6,), programs=2, least=16),
}
"""By the most tokens: weights of no more than 64 rows for each multiprocessor."""
_TALL = {
    16: _Case(128, 16, 8, stages=(6, 6, 2), programs=2, least=8),
    64: _Case(128, 64, 8, stages=(4,), programs=2, least=8),
}
"""By the most tokens: weights of more rows."""
_16BIT = {side: _Case(64, side, 4, stages=(6,), programs=3, least=4) for side in (16, 32, 64)}
"""x in 16 bit: no other tile was tried."""
_MANY = _Case(64, 128, 4, stages=(4,), programs=2, least=4)
"""Two programs on a multiprocessor alternate between the tensor cores and the sums in fp32."""
_ONE_WAVE = _Case(128, 128, 8, stages=(3,), programs=1, least=4)
"""Twice the tile: where all programs run at once, fewer bytes are read."""


def block_tiling(
    tokens: int, outputs: int, blocks: int, *, num_sms: int = 132, shared_memory: int = SHARED_MEMORY, itemsize: int = 1,
    large: bool = True,
) -> BlockTiling:  # fmt: skip
    """For x [tokens, in], of `itemsize` bytes each, and weight [outputs, in] in e4m3 that spans `blocks` blocks of 128 columns.
    large: the device has registers for tiles of 128 rows and 128 tokens, as Blackwell, whose sums come by another way, does not.

    The tiling depends on the magnitude of `tokens` alone: see `warmup_token_counts`.
    """
    tokens = 1 << (tokens - 1).bit_length()
    case = _case(tokens, outputs, num_sms, itemsize, large)
    tiles = -(-outputs // case.rows) * -(-tokens // case.tokens)
    parts = max(1, min(case.programs * num_sms // tiles, blocks // case.least, _MAX_PARTS))
    programs = min(max(case.programs, len(case.stages)), -(-tiles * parts // num_sms))
    stages = case.stages[min(programs, len(case.stages)) - 1]
    fitting = (shared_memory // programs - 1024) // (BLOCK_K * (case.rows + itemsize * case.tokens))
    return BlockTiling(case.rows, case.tokens, case.warps, max(2, min(stages, fitting)), parts)


def _case(tokens: int, outputs: int, num_sms: int, itemsize: int, large: bool) -> _Case:
    if tokens <= FEW_TOKENS:
        tall = -(-outputs // 64) > num_sms
        table = _16BIT if itemsize > 1 else _TALL if tall else _NARROW
        return table[min(side for side in table if side >= tokens)]
    tiles = -(-outputs // _ONE_WAVE.rows) * -(-tokens // _ONE_WAVE.tokens)
    # Fewer tiles than a third would be split in three parts or more, for which the smaller tiles are better.
    return _ONE_WAVE if large and num_sms // 3 < tiles <= num_sms else _MANY


def prefers_cublas(tokens: int, outputs: int, inputs: int) -> bool:
    """Whether cuBLAS is faster than `block_tiling`, on Hopper: about half of its time at 2048 tokens, half to nine tenths at
    fewer. Its programs have all of the inputs: where outputs are few as well, few tokens leave most of the GPU without one."""
    if tokens >= 256 or (tokens >= 8 and outputs >= 14336):
        return True
    return tokens >= 64 and (outputs >= 6144 or (tokens >= 128 and inputs <= 4096))


def gemv_tiling(inputs: int, *, quantizes: bool = False) -> GemvTiling:
    """For one token and a weight scaled by block, whose columns with those of the block before its first are `inputs`. quantizes:
    each program quantizes the token."""
    if quantizes and 2048 < inputs <= 4096:
        return GemvTiling(rows=4, block=4096, warps=8)  # more rows than others, as each program quantizes but once
    return heuristics.gemv_fp8_tiling(inputs)


def gemv_quantizes(outputs: int, inputs: int) -> bool:
    """Whether every program of the GEMV quantizes the token, rather than one kernel before it."""
    return inputs <= heuristics.GEMV_QUANT_MAX_INPUTS and outputs * inputs < QUANTIZED_APART


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Token counts up to max_tokens that between them launch every variant of these kernels that any count does: one of each
    magnitude, since tilings depend on nothing else."""
    return sorted({*(1 << power for power in range(max_tokens.bit_length())), max_tokens} - {0})
