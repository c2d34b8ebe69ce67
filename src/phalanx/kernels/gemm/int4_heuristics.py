# SPDX-License-Identifier: Apache-2.0
"""How `int4_gemm` tiles weights and tokens: a pure function of the sizes."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.kernels.gemm.int4_packing import TILE_COLUMNS


class Int4Tiling(NamedTuple):
    """rows: of the weight that a program has. tokens: of its tile. parts: programs that share a tile's columns (split-K)."""

    rows: int
    tokens: int
    warps: int
    stages: int
    parts: int


def select(tokens: int, outputs: int, inputs: int, *, num_sms: int) -> Int4Tiling:
    """As `benchmarks/kernels/int4_gemm.py --sweep` found on an H200: few rows of tiles are shared by many programs; of one token,
    small programs have few steps under way, several on a multiprocessor."""
    columns = max(8, min(64, 1 << (tokens - 1).bit_length()))
    many_rows, deep = outputs >= 96 * num_sms, inputs >= 16384
    if columns == 8:
        rows, warps, stages, parts = (64, 2, 3, 2) if many_rows else (128, 4, 6, 8) if deep else (64, 4, 2, 8)
    elif columns == 16:
        rows, warps, stages, parts = (128, 4, 3, 2) if many_rows else (128, 8, 3, 8)
    else:
        rows, warps, stages, parts = (128, 8, 3, 1 if many_rows else 4)
    parts = max(1, min(parts, inputs // (4 * TILE_COLUMNS), 8 * num_sms * 64 // (-(-outputs // rows) * rows)))
    return Int4Tiling(rows, columns, warps, stages, parts)


class SkinnyInt4Tiling(NamedTuple):
    """rows: of a tile of the weight; programs: that share all tiles evenly (stream-K)."""

    rows: int
    warps: int
    stages: int
    programs: int


def select_skinny(tokens: int, outputs: int, *, num_sms: int) -> SkinnyInt4Tiling:
    """As a sweep on an H200 found (benchmarks/results/kernels_int4_gemm.json): few tokens leave room for four programs on a
    multiprocessor, and more of them take the registers and the time of the tensor cores."""
    narrow = outputs <= 96 * num_sms
    if tokens <= 16:
        return SkinnyInt4Tiling(128, 4, 3, 4 * num_sms)
    if tokens <= 32:
        return SkinnyInt4Tiling(64, 4, 3, 4 * num_sms) if narrow else SkinnyInt4Tiling(128, 4, 3, 3 * num_sms)
    if tokens <= 64:
        return SkinnyInt4Tiling(64 if narrow else 128, 4, 3, 2 * num_sms)
    return SkinnyInt4Tiling(128, 4, 3, num_sms)
