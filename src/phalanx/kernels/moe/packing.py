# SPDX-License-Identifier: Apache-2.0
"""How the kernels have MXFP4 weights: in words of 16 bits with four e2m1 values each, so that a register with two words becomes
four registers with two bf16 each by masks and shifts that leave every value in its half; and in tiles that are one run of memory.

A word has the columns i, i + 8, i + 16 and i + 24 of 32 that share a scale; in a checkpoint a byte has two neighbours. The same
bytes hold the same columns, 32 together in 16 bytes.

What a turn of a GEMM reads of 32 rows, 128 columns of each, is one run. As rows of their own these are 64 bytes here and there, for
which memory gives little more than half of its speed."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNS = (15, 12, 14, 13)
"""The bit of a word that is the sign of the value at each of its four places."""
MAGNITUDES = (6, 3, 0, 9)
"""The lowest of the three bits below the sign of each."""
BLOCK_BYTES = 16
"""Of 32 columns, which share a scale."""
SCALES_IN_WORD = 4
TILE_ROWS = 32
"""Rows whose blocks of the same columns are one run of memory. Experts have a multiple of them: their rows are columns of another
projection, in blocks of 32."""
_BLOCKS_AT_ONCE = 1 << 19
"""Blocks of 32 values that are packed together, so that what is needed in between stays small: an expert's gate and up of
gpt-oss-120b."""


def packed(blocks: Tensor) -> Tensor:
    """blocks [rows, columns / 2] uint8 as on disk, the first of two values in the low nibble -> the same values as words, in bytes
    [rows, columns / 2]. columns: a multiple of 32."""
    every = blocks.reshape(-1, BLOCK_BYTES)
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


def tiled(words: Tensor, width: int = BLOCK_BYTES) -> Tensor:
    """words [rows, bytes] uint8 -> the same shape and bytes as [rows / TILE_ROWS, bytes / width, TILE_ROWS, width]. For weights, width
    is a block's; for scales, SCALES_IN_WORD. rows: a multiple of TILE_ROWS; bytes: of width."""
    return words.reshape(-1, TILE_ROWS, words.shape[1] // width, width).transpose(1, 2).reshape(words.shape)


def untiled(words: Tensor, width: int = BLOCK_BYTES) -> Tensor:
    """The inverse of `tiled`."""
    return words.reshape(-1, words.shape[1] // width, TILE_ROWS, width).transpose(1, 2).reshape(words.shape)
