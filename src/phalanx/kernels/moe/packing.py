# SPDX-License-Identifier: Apache-2.0
"""How the kernels have MXFP4 weights: in words of 16 bits with four e2m1 values each, so that a register with two words becomes
four registers with two bf16 each by masks and shifts that leave every value in its half; and in tiles that are one run of memory.

A word has the columns i, i + 8, i + 16 and i + 24 of 32 that share a scale; in a checkpoint a byte has two neighbours. The same
bytes hold the same columns, 32 together in 16 bytes.

What a k step of a GEMM reads of 32 rows, 128 columns of each, is one run, row after row, so that eight threads read 128 bytes. They
read 64 here and there in weights whose rows are runs of their own, and the GEMM then waits for them."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNS = (15, 12, 14, 13)
"""The bit of a word that is the sign of the value at each of its four places."""
MAGNITUDES = (6, 3, 0, 9)
"""The lowest of the three bits below the sign of each."""
TILE_ROWS, TILE_BYTES = 32, 64
"""Rows of a tile, and bytes of each: 128 columns. Experts have a multiple of so many rows: they are columns of another projection,
in blocks of 32."""
SCALES_IN_WORD = 4
_BLOCK_BYTES = 16
_BLOCKS_AT_ONCE = 1 << 19
"""Blocks of 32 values that are packed together, so that what is needed in between stays small: an expert's gate and up of
gpt-oss-120b."""


def packed(blocks: Tensor) -> Tensor:
    """blocks [rows, columns / 2] uint8 as on disk, the first of two values in the low nibble -> the same values as words, in bytes
    [rows, columns / 2]. columns: a multiple of 32."""
    every = blocks.reshape(-1, _BLOCK_BYTES)
    return torch.cat([_packed(some) for some in torch.split(every, _BLOCKS_AT_ONCE)]).view(blocks.shape) if len(every) else blocks


def _packed(blocks: Tensor) -> Tensor:
    each = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).view(-1, 4, 8).to(torch.int16)
    words = torch.zeros_like(each[:, 0])
    for place, (sign, magnitude) in enumerate(zip(SIGNS, MAGNITUDES, strict=True)):
        words |= (each[:, place] >> 3 << sign) | ((each[:, place] & 7) << magnitude)
    return words.view(torch.uint8)


def codes(words: Tensor) -> Tensor:
    """What `packed` gives -> the e2m1 codes [rows, columns] int32, 0..15."""
    pairs = words.reshape(-1, 8, 2).int()
    each = pairs[..., 0] | (pairs[..., 1] << 8)
    parts = [(each >> sign & 1) << 3 | (each >> magnitude & 7) for sign, magnitude in zip(SIGNS, MAGNITUDES, strict=True)]
    return torch.stack(parts, dim=1).view(words.shape[0], -1)


def tiled(words: Tensor, width: int = TILE_BYTES) -> Tensor:
    """words [rows, bytes] uint8 -> the same shape and bytes, TILE_ROWS rows of the first `width` bytes before those of the next;
    the last may be fewer. rows: a multiple of TILE_ROWS. For scales, width is SCALES_IN_WORD."""
    groups = words.reshape(-1, TILE_ROWS, words.shape[1])
    return torch.cat([tile.flatten(1) for tile in torch.split(groups, width, dim=2)], dim=1).view(words.shape)


def untiled(words: Tensor, width: int = TILE_BYTES) -> Tensor:
    """The inverse of `tiled`."""
    every = words.shape[1]
    sizes = [TILE_ROWS * min(width, every - first) for first in range(0, every, width)]
    parts = torch.split(words.reshape(-1, TILE_ROWS * every), sizes, dim=1)
    return torch.cat([part.reshape(len(part), TILE_ROWS, -1) for part in parts], dim=2).view(words.shape)
