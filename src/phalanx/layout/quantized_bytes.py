# SPDX-License-Identifier: Apache-2.0
"""The size of a quantized weight as kernels have it: tests compare it with what is allocated."""

from __future__ import annotations

from phalanx.config.quantization import GROUP_UNIT, Quantization

TILE_ROWS, TILE_COLUMNS = 64, 128


def scale_words(columns: int, group: int, *, zeros: bool, in_pairs: bool) -> tuple[int, int]:
    """Of a weight with so many (padded) columns: how many words of 32 bits a row has for scales and zeros, as a product. in_pairs:
    of 16-bit values; else of fp32."""
    kinds = 2 if zeros else 1
    if group >= TILE_COLUMNS:
        return -(-columns // group), 1 if in_pairs else kinds
    return (columns // TILE_COLUMNS, 2 * kinds) if in_pairs else (columns // GROUP_UNIT, kinds)


def quantized_bytes(scheme: Quantization, rows: int, columns: int, *, in_pairs: bool) -> int:
    """Bytes of a weight [rows, columns], its scales among them. in_pairs: see `scale_words`."""
    if scheme.int4 is not None:  # see `kernels.gemm.int4_packing.Int4Weight`
        eight = scheme.int4.bits == 8  # as two of 4, with zeros
        inputs, rows, columns = columns, _padded(rows, TILE_ROWS), _padded(columns * scheme.int4.bits // 4, TILE_COLUMNS)
        group = scheme.int4.group or (inputs if eight else columns)
        runs, words = scale_words(columns, group, zeros=scheme.int4.zeros or eight, in_pairs=in_pairs)
        return rows * (columns // 2 + 4 * runs * words)
    if scheme.weights in ("nvfp4", "mxfp4_packed"):  # a scale of 16, and one of a row in fp32: see `Nvfp4Weight`
        return _padded(rows, GROUP_UNIT) * (_padded(columns, GROUP_UNIT) // 2 + _padded(columns, TILE_COLUMNS) // 16 + 4)
    if scheme.weights == "mxfp4":  # a scale of 32, padded to four
        return rows * (columns // 2 + _padded(columns, TILE_COLUMNS) // 32)
    return rows * columns + 4 * rows * (1 if scheme.block is None else -(-columns // scheme.block[1]))


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
