# SPDX-License-Identifier: Apache-2.0
"""How the kernels have weights in NVFP4: e2m1 values in the words of MXFP4 (`packing`), a byte for the scale of 16 columns, and a
scale in fp32 for each row, which is that of its checkpoint tensor: layers that run as one GEMM may differ in it.

A scale in e4m3, which is not negative, has a byte of its own here, so that a shift makes a normal number in bf16 of it: five bits
of exponent, biased by SCALE_BIAS, and three of mantissa. e4m3's subnormals are normal numbers there. A scale of zero has none: the
values of its group are zero instead."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.moe import packing

GROUP = 16
"""Columns that share an e4m3 scale."""
BLOCK, TILE_COLUMNS = 32, 128
SCALES_OF_TILE = TILE_COLUMNS // GROUP
SCALE_BIAS = 10
LARGEST_POWER, POWERS = 20, 30
"""Scales are below 2^(LARGEST_POWER + 1), with POWERS exponents: with one more, bf16 would be infinite."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of e2m1 by their four bits."""


class Nvfp4Weight(NamedTuple):
    """A weight [outputs, inputs]: e2m1 * e4m3 scale * the row's scale.

    words: uint8 [rows, columns / 2], rows and columns padded with zeros to multiples of 32, packed and tiled.
    scales: uint8 [rows, 8 * k steps], see above: of 128 columns those of the first halves of the four blocks of 32, and behind
        them those of the last halves; four of each of 32 rows are one run.
    row_scale: fp32 [rows].
    """

    words: Tensor
    scales: Tensor
    row_scale: Tensor
    outputs: int
    inputs: int

    @property
    def rows(self) -> int:
        """Padded outputs."""
        return self.row_scale.shape[-1]


def sizes(outputs: int, inputs: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int]]:
    """The shapes of words, scales and row_scale."""
    rows, columns = -(-outputs // packing.TILE_ROWS) * packing.TILE_ROWS, -(-inputs // BLOCK) * BLOCK
    return (rows, columns // 2), (rows, -(-columns // TILE_COLUMNS) * SCALES_OF_TILE), (rows,)


def packed(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """codes [outputs, inputs / 2] uint8 as on disk, the first of two values in the low nibble; scales [outputs, inputs / 16] e4m3
    -> words and scales of an `Nvfp4Weight`."""
    words, table, (rows,) = sizes(len(codes), 2 * codes.shape[1])
    more = rows - len(codes)
    codes = torch.where((scales.float() == 0).repeat_interleave(GROUP // 2, 1), 0, codes)
    nibbles = F.pad(codes, (0, words[1] - codes.shape[1], 0, more))
    mantissa, exponent = torch.frexp(scales.float())  # a mantissa from 0.5 on
    of_scales = (((exponent + SCALE_BIAS - 1) << 3) + (mantissa * 16).int() - 8).to(torch.uint8)
    by_step = F.pad(of_scales, (0, table[1] - scales.shape[1], 0, more)).view(table[0], -1, SCALES_OF_TILE // 2, 2)
    return packing.tiled(packing.packed(nibbles)), packing.tiled(by_step.transpose(2, 3).reshape(table), packing.SCALES_IN_WORD)


def reorder_rows(words: Tensor, scales: Tensor, row_scale: Tensor, rows: list[int]) -> None:
    """Put the outputs of an `Nvfp4Weight` into this order, in place."""
    order = [*rows, *range(len(rows), len(row_scale))]
    words.copy_(packing.tiled(packing.untiled(words)[order]))
    width = packing.SCALES_IN_WORD
    scales.copy_(packing.tiled(packing.untiled(scales, width)[order], width))
    row_scale.copy_(row_scale[order])


def rows_of(weight: Nvfp4Weight, rows: slice) -> Nvfp4Weight:
    """Some outputs of a weight, from a multiple of `packing.TILE_ROWS` on, as views."""
    first, last, _ = rows.indices(weight.outputs)
    end = -(-last // packing.TILE_ROWS) * packing.TILE_ROWS
    here = slice(first, end)
    return Nvfp4Weight(weight.words[here], weight.scales[here], weight.row_scale[here], last - first, weight.inputs)


def dequantized(weight: Nvfp4Weight, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] in `dtype`, each product rounded once."""
    values = torch.tensor(E2M1, device=weight.words.device)[packing.codes(packing.untiled(weight.words))]
    by_step = packing.untiled(weight.scales, packing.SCALES_IN_WORD).view(len(weight.scales), -1, 2, SCALES_OF_TILE // 2)
    scales = by_step.transpose(2, 3).reshape(weight.scales.shape).int()
    by_group = torch.ldexp(8.0 + (scales & 7), (scales >> 3) - SCALE_BIAS - 3)
    by_column = by_group.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return (values * by_column * weight.row_scale.unsqueeze(1))[: weight.outputs, : weight.inputs].to(dtype)


def quantized(values: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """values [rows, columns] of a multiple of 16 columns, row_scale [rows] -> codes and scales as on disk: rounded to nearest, with
    6 for the largest magnitude of each group."""
    groups = values.float().view(len(values), -1, GROUP)
    scales = (groups.abs().amax(-1) / 6 / row_scale.unsqueeze(1)).to(torch.float8_e4m3fn)
    unit = scales.float() * row_scale.unsqueeze(1)
    return e2m1_codes((groups / torch.where(unit == 0, 1.0, unit).unsqueeze(-1)).flatten(1)), scales


def e2m1_codes(values: Tensor) -> Tensor:
    """values [rows, columns] rounded to nearest, two in a byte as on disk."""
    magnitudes = torch.tensor(E2M1[:8], device=values.device)
    code = torch.bucketize(values.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2).to(torch.uint8)
    code |= (values < 0).to(torch.uint8) << 3
    return code[:, 0::2] | code[:, 1::2] << 4
