# SPDX-License-Identifier: Apache-2.0
"""How `biased_gemm` tiles weights and tokens: a pure function of the sizes, as `heuristics` for experts without biases."""

from __future__ import annotations

from phalanx.kernels.moe.heuristics import BLOCK_K, ExpertTiling, pairs_of_tile

_SHARED = {80: 156 * 1024, 90: 220 * 1024}
"""Bytes of shared memory that the programs of a multiprocessor have together, by the least compute capability."""


def tile_pairs(tokens: int, top_k: int, experts: int, *, in_4_bits: bool) -> int:
    """Pairs of a full tile: as `heuristics.pairs_of_tile`, but 8 are the fewest columns of `mma.sync`, by which MXFP4 of few
    tokens is multiplied."""
    return pairs_of_tile(tokens, top_k, experts, least=8 if in_4_bits else 16)


def select(
    experts: int, tokens: int, outputs: int, inputs: int, *, gated: bool, in_4_bits: bool, num_sms: int, sm: int, itemsize: int = 2
) -> ExpertTiling:  # fmt: skip
    """experts: of this rank, that a step reaches; tokens: of a tile. outputs, inputs: of one projection. sm: compute capability
    times 10. itemsize: bytes of an element of x, and of the weights where they are not in MXFP4.

    A k step's weights have 64 bytes a row in MXFP4, and are widened in the registers that the tensor cores read: instructions,
    rather than bytes, take the time. With few tokens, programs have two warps, whose products (`mma.sync`) need no warpgroup, and
    many of them run on a multiprocessor. As `benchmarks/kernels/biased_gemm.py --sweep` found on an H200."""
    if in_4_bits and tokens <= 8:
        return _few_in_4_bits(experts, tokens, outputs, inputs, gated, num_sms)
    few, row_bytes = tokens <= 32, itemsize * BLOCK_K
    rows, warps, programs = (64, 4, 2) if tokens <= 64 else (64 if gated else 128, 8, 1)
    if in_4_bits:
        rows, warps, programs = _in_4_bits(tokens, gated, sm)
    weight_rows = rows * (2 if gated else 1)
    stage = weight_rows * (BLOCK_K // 2 if in_4_bits else row_bytes) + tokens * row_bytes
    stages = max(2, min(6, _SHARED[90 if sm >= 90 else 80] // programs // stage))
    parts = 1
    if not gated and few:
        tiles = experts * -(-outputs // rows)
        parts = max(1, min(4, 6 * num_sms // tiles, inputs // (4 * BLOCK_K)))
    return ExpertTiling(rows, tokens, warps, stages, 4 if few else 8, parts)


def _few_in_4_bits(experts: int, tokens: int, outputs: int, inputs: int, gated: bool, num_sms: int) -> ExpertTiling:
    """As `--sweep` found on an H100: of few experts, small programs, several on a multiprocessor, and few columns, whose
    first steps are all under way at once."""
    if gated:
        return ExpertTiling(16 if experts * -(-outputs // 32) < 4 * num_sms else 32, tokens, 2, 4, 4)
    parts = max(1, min(4, 6 * num_sms // (experts * -(-outputs // 64)), inputs // (4 * BLOCK_K)))
    return ExpertTiling(64, tokens, 4 if experts <= 64 else 2, 2 if parts == 4 else 4, 4, parts)


def _in_4_bits(tokens: int, gated: bool, sm: int) -> tuple[int, int, int]:
    """Rows, warps, and programs on a multiprocessor."""
    if tokens <= 16:
        return (32 if gated else 64), 2, 8
    if tokens <= 32:
        return (64 if gated else 128), 4, 3
    if tokens <= 64:
        return (64 if gated else 128), 8, 3
    if sm >= 100:
        # Triton 3.6 makes an empty kernel for Blackwell of 128 x 128 sums of products of 32 columns.
        return (32 if gated else 64), 4, 2
    if sm >= 90:
        return (128 if gated else 256), 8, 1
    return (64 if gated else 128), 8, 1  # registers hold no more
