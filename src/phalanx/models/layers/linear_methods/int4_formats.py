# SPDX-License-Identifier: Apache-2.0
"""What checkpoints with 4-bit integers hold for a layer, and what it means: `tensors` says which parts a rank reads, and `decoded`
makes the same of each format.

A word of 32 bits has eight values of 4 bits, or four of 8, from its lowest bits on. Along which dim they are packed, and in which
order, is the format's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config.quantization import Int4
from phalanx.errors import WeightError
from phalanx.models.slices import WeightPart

_WORD_BITS = 32
_CHUNK_ROWS = 4096  # rounded together, so that their copy in fp32 stays small
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight neighbouring outputs
_INTEGERS, _FLOATS = ("I32",), ("F16", "BF16", "F32")


class StoredPart(NamedTuple):
    """The part `at` of a checkpoint tensor: end, of its name; shape, of all of it; dtypes, that it may have. optional: a layer may
    be without it."""

    end: str
    shape: tuple[int, ...]
    at: tuple[slice, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Decoded(NamedTuple):
    """Rows and columns of a rank, in their order: codes uint8 [rows, columns], scales [rows, groups], zeros [rows, groups] or None
    for 8, or for 128 of values of 8 bits. groups [columns]: that of each column, among those of `scales`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor


def tensors(part: WeightPart, int4: Int4) -> list[StoredPart]:
    """What a rank reads of a layer. A list of groups may lead anywhere, so that with it a rank reads the scales of all groups."""
    (outputs, inputs), rows, columns = part.shape, _span(part.rows), _span(part.columns)
    count = -(-inputs // (int4.group or inputs))
    groups = slice(0, count) if int4.by_index or not int4.group else _words(part.columns, int4.group)
    word = _WORD_BITS // int4.bits
    row_words, column_words = _words(part.rows, word), _words(part.columns, word)
    outputs_in_words, inputs_in_words = -(-outputs // word), -(-inputs // word)
    index_dtypes = ("I32", "I64")
    if int4.form == "packed":
        parts = [
            StoredPart("weight_packed", (outputs, inputs_in_words), (rows, column_words), _INTEGERS),
            StoredPart("weight_scale", (outputs, count), (rows, groups), _FLOATS),
            StoredPart("weight_shape", (2,), (slice(0, 2),), index_dtypes),
            StoredPart("weight_zero_point", (outputs_in_words, count), (row_words, groups), _INTEGERS),
            StoredPart("weight_g_idx", (inputs,), (columns,), index_dtypes),
        ]
        return [each for each in parts if each.end in int4.tensors]
    scales = StoredPart("scales", (count, outputs), (groups, rows), _FLOATS)
    zeros = StoredPart("qzeros", (count, outputs_in_words), (groups, row_words), _INTEGERS)
    if int4.form == "awq":
        return [StoredPart("qweight", (inputs, outputs_in_words), (columns, row_words), _INTEGERS), zeros, scales]
    weight = StoredPart("qweight", (inputs_in_words, outputs), (column_words, rows), _INTEGERS)
    index = StoredPart("g_idx", (inputs,), (columns,), index_dtypes, optional=not int4.by_index)
    return [weight, scales, index, *([zeros] if int4.zeros else [])]


def decoded(part: WeightPart, int4: Int4, stored: Mapping[str, Tensor]) -> Decoded:
    """What the tensors of `tensors` mean, by the ends of their names. Raises WeightError where they contradict config.json."""
    begin = part.columns.start
    positions = torch.arange(begin, part.columns.stop)
    first = 0 if int4.by_index or not int4.group else begin // int4.group
    groups = positions // int4.group - first if int4.group else torch.zeros_like(positions)
    index = stored.get("weight_g_idx", stored.get("g_idx"))
    if int4.by_index:
        assert index is not None
        groups = _checked(part, index.cpu().to(torch.int64), -(-part.shape[1] // int4.group))
    elif index is not None and not torch.equal(index.cpu().to(torch.int64) - first, groups):
        raise WeightError(
            f"{part.name}.g_idx does not list groups of {int4.group or part.shape[1]} neighbours",
            held="quantization_config has desc_act=false, which says that it does", next="use a checkpoint whose files agree",
        )  # fmt: skip
    word, bits = _WORD_BITS // int4.bits, int4.bits
    rows_at, columns_at = _inside(part.rows, word), _inside(part.columns, word)
    zeros: Tensor | None = None
    if int4.form == "packed":
        if (shape := tuple(stored["weight_shape"].tolist())) != part.shape:
            raise WeightError(f"{part.name}.weight_shape is {list(shape)}", held=f"config.json implies {list(part.shape)}")
        codes, scales = unpacked(stored["weight_packed"], 1, range(word), bits)[:, columns_at], stored["weight_scale"]
        if int4.zeros:
            zeros = unpacked(stored["weight_zero_point"], 0, range(word), bits)[rows_at]
    else:
        places = _AWQ_PLACES if int4.form == "awq" else range(word)
        weight, scales = stored["qweight"], stored["scales"].t()
        if int4.form == "awq":
            codes = unpacked(weight, 1, places, bits)[:, rows_at].t()
        else:
            codes = unpacked(weight, 0, places, bits)[columns_at].t()
        if int4.zeros:
            zeros = unpacked(stored["qzeros"], 1, places, bits)[:, rows_at].t() + int4.zero_offset & (1 << bits) - 1
    return Decoded(codes, scales, zeros, groups.to(codes.device))


def unpacked(words: Tensor, dim: int, places: tuple[int, ...] | range, bits: int) -> Tensor:
    """int32 words -> uint8 values of 4 or 8 bits, so many times as many along `dim`, of which the one at j of a word is in its part
    places[j]."""
    sizes = words.shape
    values = torch.empty((*sizes[: dim + 1], len(places), *sizes[dim + 1 :]), dtype=torch.uint8, device=words.device)
    for at, place in enumerate(places):
        values.select(dim + 1, at).copy_(words >> bits * place & (1 << bits) - 1)
    return values.flatten(dim, dim + 1)


def halves(eight: Decoded) -> Decoded:
    """Of values of 8 bits: twice the columns in 4 bits, first the high halves and then the low ones, whose sums are the values."""
    codes, scales, zeros, groups = eight
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8, device=codes.device) if zeros is None else zeros
    return Decoded(
        torch.cat([codes >> 4, codes & 0xF], 1), torch.cat([16 * scales.float(), scales.float()], 1),
        torch.cat([zeros >> 4, zeros & 0xF], 1), torch.cat([groups, groups + scales.shape[1]]),
    )  # fmt: skip


def rounded(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """values [rows, columns] in 16 or 32 bit -> (codes uint8 [rows, columns], scales [rows, groups] in the same dtype): rounded to
    nearest; a group's largest magnitude is 7.5 steps of its scale, as compressed-tensors has it for symmetric integers."""
    columns, codes, scales = values.shape[1], [], []
    count = -(-columns // group)
    for rows in torch.split(values, _CHUNK_ROWS):
        padded = torch.nn.functional.pad(rows.float(), (0, count * group - columns)).view(len(rows), count, group)
        scale = (padded.abs().amax(-1) / 7.5).to(values.dtype)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        code = torch.round(padded / scale.float().unsqueeze(-1)).clamp_(-8, 7) + 8
        codes.append(code.to(torch.uint8).view(len(rows), -1)[:, :columns])
        scales.append(scale)
    return torch.cat(codes), torch.cat(scales)


def _checked(part: WeightPart, index: Tensor, count: int) -> Tensor:
    if bool(((index < 0) | (index >= count)).any()):
        raise WeightError(f"{part.name}.g_idx holds a group that is none of the {count}", next="download the checkpoint again")
    return index


def _span(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _words(numbers: range, unit: int) -> slice:
    """The runs of `unit` numbers that contain these."""
    return slice(numbers.start // unit, -(-numbers.stop // unit))


def _inside(numbers: range, unit: int) -> slice:
    """Where they are in the runs of `_words`."""
    return slice(numbers.start % unit, numbers.start % unit + len(numbers))
