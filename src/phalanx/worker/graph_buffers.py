# SPDX-License-Identifier: Apache-2.0
"""The tensors that CUDA graphs read and write, at fixed addresses: `DecodeGraphBuffers` for steps of decode rows that all sample,
`MixedGraphBuffers` for steps of any rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from phalanx.config.quantization import on_load
from phalanx.kernels.adapters.rows import FEW, AdapterRows, grouped, most_tiles, tile_of
from phalanx.layout import Layout, graphs
from phalanx.layout.graphs import GraphSize as GraphSize
from phalanx.layout.graphs import graph_sizes as graph_sizes
from phalanx.models.batch import Batch, DpTokens, GroupTables, count_leading_decodes
from phalanx.models.decoder import Decoder
from phalanx.worker.input_batch import HostBatch, Ints, Words

NewBlocks = tuple[Ints, Words]
"""Entries [K] of the flattened block tables of all slots, and the block ids [K] that are new there: see `BlockTables.append`."""

NO_BLOCKS: NewBlocks = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))

PINNED_COPIES = 4
"""Steps whose inputs may wait for the device at a time, before the host waits."""


def max_graph_tokens(model: Decoder) -> int:
    """Up to how many tokens an eager step would have the GPU wait for the host. Computed from the shape alone: ranks may differ in
    some scales or heads of a layer, and must capture the same sizes."""
    fp8 = any(parameter.dtype == torch.float8_e4m3fn for parameter in model.layers[0].parameters())
    dtype = "int4" if model.context.quantization == on_load("int4") else "fp32" if model.context.dtype.itemsize == 4 else "bf16"
    context = model.context
    layout = Layout(1, context.dp.size, context.group.size, context.moe_ep, context.redundant_experts)
    return graphs.max_graph_tokens(model.shape, "fp8" if fp8 else dtype, layout)


Array = TypeVar("Array", Tensor, np.ndarray[Any, Any])


@dataclass(frozen=True)
class DecodeColumns(Generic[Array]):
    """The inputs of a decode graph: named views of the rows of one int64 matrix, so that one copy moves all of them to the device.

    Of tokens: token_ids (-1: the id that was sampled into slot `slots` last), positions, kv_slots (-1: padding, which writes
    nothing), slots; more_kv_slots [G - 1, tokens], of the other groups of layers. Of rows: kv_lengths (int32). New blocks:
    table_entries (of the flattened block tables; -1: none), block_ids.
    """

    token_ids: Array
    positions: Array
    kv_slots: Array
    slots: Array
    kv_lengths: Array
    table_entries: Array
    block_ids: Array
    more_kv_slots: Array


@dataclass(frozen=True)
class MixedColumns(DecodeColumns[Array]):
    """The inputs of a mixed graph: also, of rows, row_slots and query_starts (int32); logit_rows, the tokens whose logits are
    wanted; sampled_slots, of the rows that sample. Here `slots` is set only for tokens with an id of -1."""

    row_slots: Array
    query_starts: Array
    logit_rows: Array
    sampled_slots: Array


Columns = TypeVar("Columns", bound=DecodeColumns[Any])
_INT32 = {"kv_lengths", "query_starts"}


def _views(kind: type[Columns], matrix: Tensor | np.ndarray[Any, Any]) -> Columns:
    """The columns of a matrix [columns, width]; of type int32 they have twice the width. What is left is more_kv_slots."""
    int32: Any = torch.int32 if isinstance(matrix, Tensor) else np.int32
    names = _names(kind)
    columns = {name: matrix[i].view(int32) if name in _INT32 else matrix[i] for i, name in enumerate(names)}
    return kind(**columns, more_kv_slots=matrix[len(names) :])


def _names(kind: type[Columns]) -> list[str]:
    """The columns of one row of the matrix each."""
    return [column.name for column in fields(kind) if column.name != "more_kv_slots"]


class GraphBuffers(ABC, Generic[Columns]):
    """What graphs of one kind, of up to `width` tokens, read and write.

    columns: their inputs (on the device). hidden [width, stream_width]: the residual stream from the stage before; out
    [width, output_width]: the residual stream that a forward ends with; both with what a family has beside it. Where decode rows
    end with them, instead of `out`: logits [width, columns of the LM head], of this rank, in the model's dtype, and tokens [width]
    int64, the argmax over all ranks.
    """

    out: Tensor | None = None
    logits: Tensor | None = None

    def __init__(
        self, kind: type[Columns], width: int, model: Decoder, *, first: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        matrix = torch.zeros(len(_names(kind)) + model.cache_groups - 1, width, dtype=torch.int64, device=device)
        self.width = width
        self.columns = _views(kind, matrix)
        self.hidden = None if first else torch.zeros(width, model.stream_width, dtype=dtype, device=device)
        self._ring = PinnedRing(matrix, lambda array: _views(kind, array))
        self.clear()

    def clear(self) -> None:
        """Have the input of a step without tokens, of which nothing is stored. Graphs run with it around their capture: with the
        rows of a larger step they would read and write beyond their own."""
        self._ring.clear()
        self.columns.kv_slots[:] = self.columns.table_entries[:] = self.columns.more_kv_slots[:] = -1

    @property
    def max_new_blocks(self) -> int:
        """How many new blocks `fill` takes."""
        return self.width

    @abstractmethod
    def batch(self, size: GraphSize, tables: Tensor, last_tokens: Tensor | None) -> Batch:
        """The batch of a size. tables: the block tables of all groups and slots; last_tokens: see `Batch.last`."""

    def _more_groups(self, size: GraphSize, tables: Tensor) -> list[GroupTables]:
        columns = self.columns.more_kv_slots
        return [GroupTables(column[: size.tokens], table, None) for column, table in zip(columns, tables[1:], strict=True)]

    def fill(self, host_batch: HostBatch, new: NewBlocks, size: GraphSize) -> None:
        """Write the inputs of a step, then padding up to `size`, and its new blocks, at most `max_new_blocks`: one copy to the
        device."""
        count, (entries, block_ids) = len(host_batch.token_ids), new
        with self._ring.next() as columns:
            columns.token_ids[:count], columns.token_ids[count : size.tokens] = host_batch.token_ids, 0
            columns.token_ids[host_batch.from_slot_at] = -1
            columns.positions[:count], columns.positions[count : size.tokens] = host_batch.positions, 0
            columns.kv_slots[:count], columns.kv_slots[count : size.tokens] = host_batch.kv_slots, -1
            if len(columns.more_kv_slots):
                columns.more_kv_slots[:, count : size.tokens] = -1
                for column, values in zip(columns.more_kv_slots, host_batch.more_kv_slots, strict=False):  # none of an empty batch
                    column[:count] = values
            self._fill_rows(columns, host_batch, size)
            columns.table_entries[: len(entries)], columns.table_entries[len(entries) :] = entries, -1
            columns.block_ids[: len(entries)] = block_ids

    @abstractmethod
    def _fill_rows(self, columns: Columns, host_batch: HostBatch, size: GraphSize) -> None:
        """Write the columns of the rows, which differ between the kinds."""


class DecodeGraphBuffers(GraphBuffers[DecodeColumns[Any]]):
    """Of decode graphs, of up to `max_rows` decode rows: the slot of token r is the slot of row r."""

    def __init__(self, max_rows: int, model: Decoder, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(DecodeColumns, max_rows, model, first=first, dtype=dtype, device=device)
        self._row_numbers = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.out = None if last else torch.zeros(max_rows, model.output_width, dtype=dtype, device=device)
        if model.lm_head is not None:
            self.logits = torch.zeros(max_rows, model.lm_head.width, dtype=dtype, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """As of `GraphBuffers`."""
        super().clear()
        self.columns.kv_lengths[:] = 1

    def batch(self, size: GraphSize, tables: Tensor, last_tokens: Tensor | None) -> Batch:
        rows, columns = size.decode_rows, self.columns
        slots = columns.slots[:rows]
        return Batch(
            token_ids=columns.token_ids[:rows], positions=columns.positions[:rows], kv_slots=columns.kv_slots[:rows],
            query_starts=self._query_starts[: rows + 1], kv_lengths=columns.kv_lengths[:rows], block_tables=tables[0],
            table_rows=slots, logit_rows=self._row_numbers[:rows], query_starts_cpu=list(range(rows + 1)),
            kv_lengths_cpu=[1] * rows, fixed=True, decodes=rows, last=None if last_tokens is None else (last_tokens, slots),
            more_groups=self._more_groups(size, tables),
        )  # fmt: skip

    def _fill_rows(self, columns: DecodeColumns[Any], host_batch: HostBatch, size: GraphSize) -> None:
        rows = len(host_batch.slots)
        columns.slots[:rows], columns.slots[rows : size.tokens] = host_batch.slots, 0
        columns.kv_lengths[:rows], columns.kv_lengths[rows : size.tokens] = host_batch.kv_lengths, 1


class MixedGraphBuffers(GraphBuffers[MixedColumns[Any]]):
    """Of mixed graphs, of up to `largest` tokens and rows."""

    def __init__(self, largest: GraphSize, model: Decoder, *, first: bool, dtype: torch.dtype, device: torch.device) -> None:
        width = max(largest.tokens, largest.decode_rows + largest.prefill_rows)
        super().__init__(MixedColumns, width, model, first=first, dtype=dtype, device=device)
        self.out = torch.zeros(width, model.output_width, dtype=dtype, device=device)

    def batch(self, size: GraphSize, tables: Tensor, last_tokens: Tensor | None) -> Batch:
        tokens, decodes, rows, columns = size.tokens, size.decode_rows, size.decode_rows + size.prefill_rows, self.columns
        return Batch(
            token_ids=columns.token_ids[:tokens], positions=columns.positions[:tokens], kv_slots=columns.kv_slots[:tokens],
            query_starts=columns.query_starts[: rows + 1], kv_lengths=columns.kv_lengths[:rows], block_tables=tables[0],
            table_rows=columns.row_slots[:rows], logit_rows=columns.logit_rows[:0],
            query_starts_cpu=[*range(decodes + 1), *[tokens] * size.prefill_rows], kv_lengths_cpu=[1] * rows, fixed=True,
            decodes=decodes, last=None if last_tokens is None else (last_tokens, columns.slots[:tokens]),
            more_groups=self._more_groups(size, tables),
        )  # fmt: skip

    def _fill_rows(self, columns: MixedColumns[Any], host_batch: HostBatch, size: GraphSize) -> None:
        """Decode rows come first, then padding up to `size.decode_rows`, then prefill rows, then padding again."""
        rows, count = len(host_batch.slots), len(host_batch.token_ids)
        decodes, begin = count_leading_decodes(host_batch.query_starts), size.decode_rows
        end, total = begin + rows - decodes, begin + size.prefill_rows
        for column, values in ((columns.row_slots, host_batch.slots), (columns.kv_lengths, host_batch.kv_lengths)):
            column[:decodes], column[decodes:begin] = values[:decodes], 0
            column[begin:end], column[end:total] = values[decodes:], 0
        starts = columns.query_starts
        starts[:decodes], starts[decodes:begin] = host_batch.query_starts[:decodes], decodes
        starts[begin : end + 1], starts[end + 1 : total + 1] = host_batch.query_starts[decodes:], count
        columns.slots[host_batch.from_slot_at] = host_batch.from_slot
        columns.logit_rows[: len(host_batch.logit_rows)] = host_batch.logit_rows
        columns.sampled_slots[: len(host_batch.sampled_slots)] = host_batch.sampled_slots


class DpGraphTokens:
    """The tokens of each dp index in a step, on the device at a fixed address, where indices exchange tokens inside graphs of up to
    `width` tokens."""

    def __init__(self, indices: int, width: int, device: torch.device) -> None:
        self._counts = torch.zeros(indices, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(width, dtype=torch.int64, device=device)
        self._ring = PinnedRing(self._counts, lambda array: array)
        self.clear = self._ring.clear

    def fill(self, counts: Sequence[int]) -> None:
        with self._ring.next() as host:
            host[:] = counts

    def of(self, size: GraphSize) -> DpTokens:
        """For the forward of a size, inside its graph: counts of the step that is replayed are read there."""
        valid = self._row_numbers[: size.tokens] < self._counts.unsqueeze(1)
        return DpTokens([size.tokens] * len(self._counts), size.tokens, valid.view(-1).long() - 1)


_LAST_NUMBER = (1 << 31) - 1


class AdapterInputs:
    """Which tokens have which adapter, on the device at fixed addresses, in graphs of up to `width` tokens of adapters in `slots`
    slots, and the number of the step: see `AdapterRows`."""

    def __init__(self, width: int, slots: int, device: torch.device) -> None:
        self._slots, self._number = slots, 0
        most = most_tiles(width, slots, FEW)

        def views(matrix: Any) -> tuple[Any, Any, Any]:
            int32: Any = torch.int32 if isinstance(matrix, Tensor) else np.int32
            others = matrix[width:].view(int32)
            return matrix[:width], others[: 3 * most].reshape(most, 3), others[3 * most : 3 * most + 1]

        all_three = torch.zeros(width + (3 * most + 2) // 2, dtype=torch.int64, device=device)
        self._order, self._tiles, self._step = views(all_three)
        self._ring = PinnedRing(all_three, views)
        self.clear = self._ring.clear

    def rows(self, size: GraphSize) -> AdapterRows:
        """For the forward of a size, inside its graph: what the step that is replayed has is read there."""
        tile = tile_of(size.tokens)
        tiles = self._tiles[: most_tiles(size.tokens, self._slots, tile)]
        return AdapterRows(size.tokens, self._order[: size.tokens], tiles, tile, step=self._step)

    def fill(self, slots: Ints | None, size: GraphSize) -> None:
        """slots [T]: of each token's adapter, -1 for none; None: no token has any."""
        order, tiles = grouped(np.empty(0, dtype=np.int64) if slots is None else slots, tile_of(size.tokens))
        self._number = self._number % _LAST_NUMBER + 1
        with self._ring.next() as (order_views, tile_views, step):
            order_views[: len(order)] = order
            step[:] = self._number
            tile_views[: len(tiles)], tile_views[len(tiles) :] = tiles, 0


View = TypeVar("View")


class PinnedRing(Generic[View]):
    """Page-locked copies of a small tensor, filled in rotation, since a copy may still wait in the device's queue when the next one
    is filled. On CPU there is one.

    view: applied once to the numpy array of each copy; `next` gives the result.
    """

    def __init__(self, target: Tensor, view: Callable[[np.ndarray[Any, Any]], View]) -> None:
        self._target, on_gpu = target, target.is_cuda
        copies = PINNED_COPIES if on_gpu else 1
        self._host = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=on_gpu) for _ in range(copies)]
        self._views = [view(host.numpy()) for host in self._host]
        self._copied = [torch.cuda.Event() for _ in self._host] if on_gpu else []  # type: ignore[no-untyped-call]
        self._next = 0

    def clear(self) -> None:
        """Zeros on the device, behind the copies that are queued."""
        self._target.zero_()

    @contextmanager
    def next(self) -> Iterator[View]:
        """The next copy, with its last content. Its copy to the device begins at the end of the block."""
        index, self._next = self._next, (self._next + 1) % len(self._host)
        if self._copied:
            self._copied[index].synchronize()
        yield self._views[index]
        self._target.copy_(self._host[index], non_blocking=True)
        if self._copied:
            self._copied[index].record()
