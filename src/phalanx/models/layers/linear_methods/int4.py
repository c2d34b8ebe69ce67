# SPDX-License-Identifier: Apache-2.0
"""Weights of 4-bit integers with a scale for each group of columns, and activations in 16 bit.

A checkpoint's tensors are packed anew, as kernels read them, once all of a layer are there. Formats differ in `int4_formats` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.quantization import GROUP_UNIT, Int4
from phalanx.errors import ModelError, WeightError
from phalanx.kernels.gemm.int4_mm import FP8_MIN_TOKENS, int4_fp8_plain, int4_mm, quantizes
from phalanx.kernels.gemm.int4_packing import TILE_COLUMNS, TILE_ROWS, Int4Weight, dequantized, packed, reorder_rows, rows_of
from phalanx.layout.quantized_bytes import scale_words
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear_methods.int4_formats import Decoded, decoded, halves, rounded, tensors
from phalanx.models.layers.linear_methods.method import Fusion, LinearMethod
from phalanx.models.slices import LayerContext, Slice, WeightPart

_CHUNK_ROWS = 64 * TILE_ROWS  # packed together, so that what is made on the way stays small
_DTYPES = {"I32": torch.int32, "I64": torch.int64}


class Int4Linear(LinearMethod):
    """words, weight_scales: see `Int4Weight`. group: columns of a scale here. order [columns] int64: which input each column
    multiplies, where columns are not in the order of inputs (act order, and slices that begin within a block of 32).

    Values of 8 bits are two of 4 (`int4_formats.halves`), which multiply the inputs twice.
    """

    def __init__(
        self, parts: Sequence[WeightPart], context: LayerContext, memory: Sequence[Tensor] | None = None
    ) -> None:  # fmt: skip
        """memory: for words and scales, of an expert; act order over ranks needs more, and is refused there."""
        super().__init__(parts, context)
        self.int4, self.fp8 = _int4(context), context.int4_fp8
        if memory is not None and (self.int4.by_index or self.int4.bits == 8):
            raise ModelError(
                f"{parts[0].name} is an expert in {'act order' if self.int4.by_index else '8-bit integers'}",
                held="act order and 8-bit integers are read for dense layers only",
                next="use a checkpoint in 4 bits that was quantized with desc_act=false, or actorder='weight'",
            )  # fmt: skip
        self.group = _whole_groups(self.int4, parts[0].columns)
        self.order: nn.Parameter | None = None
        self.columns = self.in_features * self.int4.bits // 4
        words, scales = memory or [context.weight(*each.shape, dtype=each.dtype) for each in self.memory_of(parts, context)]
        self.words, self.weight_scales = words, scales
        self._stored: dict[tuple[int, str], Tensor] = {}

    @staticmethod
    def memory_of(parts: Sequence[WeightPart], context: LayerContext) -> list[Tensor]:
        """Tensors like words and scales of these parts, on the meta device."""
        int4, in_pairs = _int4(context), context.dtype != torch.float32
        rows, columns = sum(len(part.rows) for part in parts), _padded(len(parts[0].columns) * int4.bits // 4, TILE_COLUMNS)
        rows = _padded(rows, TILE_ROWS)
        shape = scale_words(
            columns, _whole_groups(int4, parts[0].columns), zeros=int4.zeros or int4.bits == 8, in_pairs=in_pairs
        )  # fmt: skip
        return [
            torch.empty(rows * columns // 4, dtype=torch.int16, device="meta"),
            torch.empty(*shape, rows, dtype=torch.int32 if in_pairs else torch.float32, device="meta"),
        ]

    def multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        return int4_mm(self._ordered(x), self.weight, bias, fp8=self.fp8)

    def plain_multiply(self, x: Activation, bias: Tensor | None = None) -> Tensor:
        return self._plain(self._ordered(x), self.weight, bias)

    def plain_rows(self, x: Activation, rows: slice) -> Tensor:
        return self._plain(self._ordered(x), rows_of(self.weight, rows))

    def _plain(self, x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
        if self.fp8 and quantizes(x):
            return int4_fp8_plain(x, weight, bias)
        return F.linear(x, dequantized(weight, self.dtype), bias)

    def dequantized(self, dtype: torch.dtype, rows: slice) -> Tensor:
        values = dequantized(rows_of(self.weight, rows), dtype)
        if self.order is not None:
            return values.new_zeros(len(values), self.in_features).index_add_(1, self.order, values)  # what pads a group is 0
        return values if self.int4.bits == 4 else values.view(len(values), 2, -1).sum(1)

    def _ordered(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        if self.order is not None:
            return x.index_select(1, self.order)
        return x if self.int4.bits == 4 else torch.cat([x, x], 1)

    @property
    def weight(self) -> Int4Weight:
        """As the kernels take it."""
        rows = self.weight_scales.shape[-1]
        zeros = self.int4.zeros or self.int4.bits == 8
        return Int4Weight(
            self.words, self.weight_scales, zeros, rows, self.out_features, self.columns, self.group, self.dtype
        )  # fmt: skip

    def fuses(self, fusion: Fusion) -> bool:
        return fusion == "bias"

    def reorder_rows(self, rows: list[int]) -> None:
        reorder_rows(self.words, self.weight_scales, rows)

    def reading(self) -> None:
        super().reading()
        self._stored.clear()  # of a read that failed

    def slices(self) -> Iterator[Slice]:
        if self.int4.form == "load":
            yield from self.dummy_slices()
            return
        for number, part in enumerate(self.parts):
            every = tensors(part, self.int4)
            for stored in every:
                sizes = [range(*at.indices(size)) for at, size in zip(stored.at, stored.shape, strict=True)]
                like = torch.empty([len(size) for size in sizes], dtype=_DTYPES.get(stored.dtypes[0], self.dtype), device="meta")
                take = partial(self._take, number, stored.end)
                yield Slice(
                    f"{part.name}.{stored.end}", stored.shape, like, at=stored.at, take=take, dtypes=stored.dtypes,
                    absent=partial(take, None) if stored.optional else None,
                )  # fmt: skip

    def dummy_slices(self) -> Iterator[Slice]:
        return self.plain_slices(self._round)

    def _take(self, number: int, end: str, values: Tensor | None) -> None:
        """Keep the tensor of a part; once all are there, pack them."""
        self._require_finite(number, end, values)
        self._stored[number, end] = torch.empty(0) if values is None else values
        if len(self._stored) == sum(len(tensors(part, self.int4)) for part in self.parts):
            self._pack_stored()

    def _round(self, number: int, values: Tensor) -> None:
        """Keep a part's weight, rounded; once all are there, pack them."""
        self._require_finite(number, "weight", values)
        self._stored[number, "codes"], self._stored[number, "scales"] = rounded(values.to(self.words.device), self.group)
        if len(self._stored) == 2 * len(self.parts):
            numbers = range(len(self.parts))
            codes, scales = (torch.cat([self._stored[each, kind] for each in numbers]) for kind in ("codes", "scales"))
            self._stored.clear()
            self.order = None
            if self.int4.bits == 8:
                groups = torch.arange(codes.shape[1], device=codes.device) // self.group
                self._pack_ordered(halves(Decoded(codes << 4, scales / 16, None, groups)))
            else:
                self._pack(codes, scales, torch.full_like(scales, 8) if self.int4.zeros else None, self.group)

    def _require_finite(self, number: int, end: str, values: Tensor | None) -> None:
        if values is not None and values.is_floating_point() and not bool(torch.isfinite(values).all()):
            name = f"{self.parts[number].name}.{end}"
            raise WeightError(f"{name} holds a value that is NaN or infinite", next="download the checkpoint again")

    def _pack_stored(self) -> None:
        device, every = self.words.device, []
        for number, part in enumerate(self.parts):
            stored = {end: values.to(device) for (at, end), values in self._stored.items() if at == number and values.numel()}
            every.append(decoded(part, self.int4, stored))
        self._stored.clear()
        others = [part.name for part, each in zip(self.parts, every, strict=True) if not each.groups.equal(every[0].groups)]
        if others:
            raise WeightError(
                f"{others[0]} and {self.parts[0].name} have different act orders", why="they run as one GEMM of one input",
                next="use a checkpoint that was quantized with desc_act=false, or actorder='weight'",
            )  # fmt: skip
        codes, scales = torch.cat([each.codes for each in every]), torch.cat([each.scales for each in every])
        zeros = torch.cat([each.zeros for each in every if each.zeros is not None]) if self.int4.zeros else None
        begin, size = self.parts[0].columns.start, self.int4.group
        if self.int4.bits == 8:
            self._pack_ordered(halves(Decoded(codes, scales, zeros, every[0].groups)))
        elif not self.int4.by_index and (not size or (begin % GROUP_UNIT == 0)):
            if size:  # a group of the checkpoint may be several here, so that all are whole
                which = torch.arange(-(-self.in_features // self.group), device=device) * self.group + begin % size
                scales, zeros = scales[:, which // size], None if zeros is None else zeros[:, which // size]
            self.order = None
            self._pack(codes, scales, zeros, self.group)
        else:
            self._pack_ordered(Decoded(codes, scales, zeros, every[0].groups))

    def _pack_ordered(self, all_parts: Decoded) -> None:
        """Columns in the order of their groups, each group padded to whole blocks of columns whose scale is 0."""
        codes, scales, zeros, groups = all_parts
        by_group = torch.argsort(groups, stable=True)
        present, counts = torch.unique_consecutive(groups[by_group], return_counts=True)
        size = int(counts[0])
        equal = bool((counts[:-1] == size).all()) and int(counts[-1]) <= size
        if equal and (size in (GROUP_UNIT, 64) or size % TILE_COLUMNS == 0):
            moved = not torch.equal(by_group, torch.arange(len(by_group), device=by_group.device))
            self.order = nn.Parameter(by_group % self.in_features, requires_grad=False) if moved else None
            self._pack(codes[:, by_group], scales[:, present], None if zeros is None else zeros[:, present], size)
            return
        blocks = (counts + GROUP_UNIT - 1) // GROUP_UNIT
        first = (torch.cumsum(blocks, 0) - blocks) * GROUP_UNIT
        inside = torch.arange(len(groups), device=groups.device) - torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
        at = torch.repeat_interleave(first, counts) + inside
        columns = int(blocks.sum()) * GROUP_UNIT
        order = torch.zeros(columns, dtype=torch.int64, device=groups.device)
        order[at] = by_group
        # A column that pads a block multiplies the first input by 0: its value is its zero.
        of_block = torch.repeat_interleave(present, blocks)
        spread = torch.full((len(codes), columns), 8, dtype=torch.uint8, device=codes.device)
        if zeros is not None:
            spread.copy_(zeros[:, of_block].to(torch.uint8).repeat_interleave(GROUP_UNIT, 1))
        spread[:, at] = codes[:, by_group]
        self.order = nn.Parameter(order % self.in_features, requires_grad=False)
        self._pack(spread, scales[:, of_block], None if zeros is None else zeros[:, of_block], GROUP_UNIT)

    def _pack(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> None:
        """Fill words and scales, by runs of rows."""
        self.group, self.columns = group, codes.shape[1]
        words, tables = [], []
        for at in range(0, len(codes), _CHUNK_ROWS):
            rows = slice(at, at + _CHUNK_ROWS)
            weight = packed(codes[rows], scales[rows], None if zeros is None else zeros[rows], group, self.dtype)
            words.append(weight.words)
            tables.append(weight.scales)
        for target, values in ((self.words, torch.cat(words)), (self.weight_scales, torch.cat(tables, -1))):
            if target.shape == values.shape:
                target.copy_(values)
            else:  # act order over ranks: how many columns pad the groups, the list of groups says
                target.data = values

    @classmethod
    def describe(cls, context: LayerContext) -> str:
        assert context.quantization is not None
        assert context.quantization.int4 is not None
        dtype = str(context.dtype).removeprefix("torch.")
        line = f"weights are in {context.quantization.int4.bits}-bit integers, and GEMMs run in {dtype}"
        if context.int4_fp8:
            line += f", of {FP8_MIN_TOKENS} tokens and more in FP8"
        if context.quantization.int4.form == "load":
            line += (
                ": weights were rounded to nearest in groups of 128 while they were loaded. That is no AWQ and no GPTQ, whose"
                " calibrated checkpoints lose less"
            )
        return line


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _int4(context: LayerContext) -> Int4:
    assert context.quantization is not None
    assert context.quantization.int4 is not None
    return context.quantization.int4


def _whole_groups(int4: Int4, columns: range) -> int:
    """The columns of a scale on this rank: those of the checkpoint, or, where a slice begins within a group, fewer."""
    if not int4.group:
        return _padded(len(columns), TILE_COLUMNS)
    begin = 0 if int4.form == "load" else columns.start
    size = math.gcd(begin, int4.group)
    if size % TILE_COLUMNS == 0:
        return size
    return 64 if size % 64 == 0 else GROUP_UNIT
