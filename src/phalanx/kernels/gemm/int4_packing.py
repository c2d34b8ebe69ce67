# SPDX-License-Identifier: Apache-2.0
"""How the kernels have weights of 4-bit integers: in words of 16 bits with four values each, in tiles that are one run of memory.

A tile is what a k step of a GEMM reads of `TILE_ROWS` rows: `TILE_COLUMNS` columns of each, 64 bytes, row after row. The word at
place i of a row has the columns `ORDER[i]`, 32 + `ORDER[i]`, 64 + `ORDER[i]` and 96 + `ORDER[i]` of the tile, in its nibbles from
the lowest on. So two neighbouring words are one register, in which a shift and a mask give two values in 16-bit halves; and eight
neighbouring words, one load of 16 bytes, have what a thread holds of a row in the tensor cores' instruction for 32 columns.

Scales and offsets are words of 32 bits, since loads of fewer are not made ahead: [k steps or groups, planes, rows]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 128
BLOCK = 32
"""Columns of one nibble of a row's words."""
ORDER = [16 * (i >> 2 & 1) + 8 * (i >> 1 & 1) + 2 * (i >> 3) + (i & 1) for i in range(BLOCK)]
"""The column of 32 at each place of a row's words."""
MAGIC = {torch.bfloat16: 128.0, torch.float16: 1024.0}
"""The number to which the kernel adds a value by setting its lowest mantissa bits, by the dtype of x."""


class Int4Weight(NamedTuple):
    """A weight [outputs, inputs] of unsigned 4-bit integers q: (q - zero) * scale.

    words: int16 [rows * columns / 4], rows and columns padded to whole tiles with q = 0.
    scales: int32 pairs of 16-bit values. Groups of TILE_COLUMNS and more: [groups, 1, rows], the scale twice, or with zeros the
        scale below the offset -(MAGIC + zero). Smaller ones: [k steps, 2, rows], the scales of four blocks, and with zeros [.., 4,
        rows], their offsets, too. 0 where padded. With fp32 (on a CPU), fp32 [groups or blocks, 1 or 2, rows].
    zeros: whether each group has a zero of its own; else every zero is 8.
    rows: padded outputs.
    group: columns of one scale; BLOCK, 64 or a multiple of TILE_COLUMNS.
    """

    words: Tensor
    scales: Tensor
    zeros: bool
    rows: int
    outputs: int
    inputs: int
    group: int
    dtype: torch.dtype


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def packed(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, dtype: torch.dtype) -> Int4Weight:
    """codes [outputs, inputs] 0..15 of any integer dtype, scales [outputs, groups], zeros [outputs, groups] integers or None for 8;
    groups = ceil(inputs / group). dtype: of x, and of the scales in the kernel (fp32 where x is: CPU only).

    Raises ValueError where the sizes do not fit."""
    outputs, inputs = codes.shape
    groups = -(-inputs // group)
    if group % BLOCK or scales.shape != (outputs, groups) or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(f"codes {list(codes.shape)}, scales {list(scales.shape)} and groups of {group} do not fit each other")
    rows, columns = _padded(outputs, TILE_ROWS), _padded(inputs, TILE_COLUMNS)
    padded = torch.zeros(rows, columns, dtype=torch.int16, device=codes.device)
    padded[:outputs, :inputs] = codes.to(torch.int16)
    nibbles = padded.view(rows, columns // TILE_COLUMNS, 4, BLOCK)[..., ORDER]
    words = nibbles[:, :, 0] | nibbles[:, :, 1] << 4 | nibbles[:, :, 2] << 8 | nibbles[:, :, 3] << 12
    tiles = words.view(rows // TILE_ROWS, TILE_ROWS, columns // TILE_COLUMNS, BLOCK).transpose(1, 2).contiguous()
    tables = [_by_row(scales, group, rows, columns, dtype)]
    if zeros is not None:
        tables.append(_by_row(-(MAGIC.get(dtype, 0.0) + zeros.to(torch.float32)), group, rows, columns, dtype))
    table = torch.stack(tables, 1)
    if dtype != torch.float32:
        if group >= TILE_COLUMNS:
            pairs = torch.stack((tables[0], tables[-1]), -1).unsqueeze(1)
        else:
            blocks = table.view(-1, 2, 2, len(tables), rows)  # k step, half of it, block of that, scale or offset
            pairs = blocks.permute(0, 3, 1, 4, 2).reshape(len(blocks), 2 * len(tables), rows, 2)
        table = pairs.contiguous().view(torch.int32).squeeze(-1)
    return Int4Weight(tiles.view(-1), table.contiguous(), zeros is not None, rows, outputs, inputs, group, dtype)


def reorder_rows(words: Tensor, scales: Tensor, rows: list[int]) -> None:
    """Put the outputs of an `Int4Weight` into this order, in place."""
    padded = scales.shape[-1]
    order = [*rows, *range(len(rows), padded)]
    by_row = words.view(padded // TILE_ROWS, -1, TILE_ROWS, BLOCK).transpose(1, 2).flatten(0, 1)[order]
    words.copy_(by_row.view(-1, TILE_ROWS, *by_row.shape[1:]).transpose(1, 2).reshape(-1))
    scales.copy_(scales[..., order])


def rows_of(weight: Int4Weight, rows: slice) -> Int4Weight:
    """Some outputs of a weight, from a multiple of TILE_ROWS on; words are a view."""
    first, last, _ = rows.indices(weight.outputs)
    end = _padded(last, TILE_ROWS)
    words = weight.words.view(weight.rows, -1)[first:end].view(-1)
    scales = weight.scales[..., first:end].contiguous()
    return weight._replace(words=words, scales=scales, rows=end - first, outputs=last - first)


def _by_row(values: Tensor, group: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """values [outputs, groups] -> [groups, rows], or of small groups [blocks, rows]; 0 where padded."""
    outputs, groups = values.shape
    every = torch.zeros(_padded(columns, group) // group, rows, dtype=dtype, device=values.device)
    every[:groups, :outputs] = values.t().to(dtype)
    return every if group >= TILE_COLUMNS else every.repeat_interleave(group // BLOCK, 0)[: columns // BLOCK]


def _by_column(weight: Int4Weight, place: int) -> Tensor:
    """The scales (0) or offsets (1) of each column -> fp32 [outputs, inputs]."""
    table, rows, kinds = weight.scales, weight.rows, 2 if weight.zeros else 1
    if weight.dtype != torch.float32:
        pairs = table.unsqueeze(-1).view(weight.dtype)
        if weight.group >= TILE_COLUMNS:
            table = pairs[:, 0].transpose(1, 2)
        else:
            table = pairs.view(-1, kinds, 2, rows, 2).permute(0, 2, 4, 1, 3).reshape(-1, kinds, rows)
    column = torch.arange(weight.inputs, device=table.device) // (weight.group if weight.group >= TILE_COLUMNS else BLOCK)
    return table[column, place, : weight.outputs].to(torch.float32).t()


def dequantized(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """(q - zero) * scale [outputs, inputs] in `dtype`, each product rounded once."""
    rows, columns = weight.rows, weight.words.numel() * 4 // weight.rows
    tiles = weight.words.view(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_ROWS, BLOCK).transpose(1, 2)
    each = torch.empty_like(tiles.reshape(rows, -1, 1, BLOCK), dtype=torch.int32)
    each[..., ORDER] = tiles.reshape(rows, -1, 1, BLOCK).to(torch.int32)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=each.device)
    codes = (each >> shifts[None, None, :, None] & 0xF).reshape(rows, columns)[: weight.outputs, : weight.inputs].to(torch.float32)
    zeros = -_by_column(weight, 1) - MAGIC.get(weight.dtype, 0.0) if weight.zeros else 8.0
    return ((codes - zeros) * _by_column(weight, 0)).to(dtype)
