# SPDX-License-Identifier: Apache-2.0
"""The input of one forward: `Batch`, passed from layer to layer; there is no global context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from phalanx.kernels.gated_delta.reference import StateRows

Words = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class DpTokens:
    """The tokens of a step on all D dp indices, which exchange them for their experts.

    counts: of each index. rows: that each index sends, at least the largest count. padding [D * rows] int64: in a captured graph,
    where counts change from replay to replay, -1 for the rows that are no tokens, and 0 for the others; else None.
    """

    counts: Sequence[int]
    rows: int
    padding: Tensor | None = None

    @classmethod
    def of(cls, counts: Sequence[int]) -> DpTokens:
        """Of a step that no graph runs: no more rows than the largest index has tokens."""
        return cls(counts, max(counts))


@dataclass(frozen=True)
class InnerStates:
    """Where a forward leaves the residual stream before each of some layers, which are numbered in the model; its number of layers
    stands for the end of the last one. out [T, len(layers) * hidden_size]: side by side, in the order of the layers."""

    layers: tuple[int, ...]
    out: Tensor

    def of(self, layer: int) -> Tensor:
        """The columns of one of the layers."""
        width, number = self.out.shape[1] // len(self.layers), self.layers.index(layer)
        return self.out[:, number * width : (number + 1) * width]


class GroupTables(NamedTuple):
    """Where the layers of one group have their keys and values: as of `Batch`."""

    kv_slots: Tensor
    block_tables: Tensor
    block_tables_cpu: Words | None


@dataclass
class Batch:
    """A flattened batch of T tokens from R rows, one row per request. All tensors are on the model's device.

    token_ids [T] int64; positions [T] int64; kv_slots [T] int64: where each token's K and V go, block * block_size + offset, and -1
    for padding. query_starts [R+1] int32: row r's tokens are query_starts[r]..query_starts[r+1]. kv_lengths [R] int32: tokens of
    the row in the cache after this forward has stored its own. block_tables [R, W] int32: block ids, stale or 0 beyond those in
    use; with table_rows [R] int64, row r's table is block_tables[table_rows[r]], and block_tables has more rows than the batch.
    logit_rows [S] int64: which of the T tokens yield logits. `attention` is the back end's plan of this batch. The `*_cpu` fields
    are the same on the host, for back ends that plan there; `block_tables_cpu` is None where none does. Of a fixed batch they tell
    the size only.

    fixed: a batch that a captured graph forwards many times: every tensor keeps its address. Its tables are those of all slots, its
    table_rows the rows' slots; a row may have any length that its table has room for. Its rows 0 .. decodes-1 are decode rows, row
    r with token r; the others are prefill rows of any number of tokens, at query_starts. An absent row has slot 0, no token and a
    KV length of 0; or, where all rows are decode rows, a token and a KV length of 1. Absent tokens come last, and have position 0
    and KV slot -1. short: of a fixed batch: no row gets longer than the back end's `short_kv_limit` for so many rows. last:
    (last_tokens [slots], slots [T]), both int64: a token id of -1 stands for last_tokens[slots[t]], the token sampled last.

    kv_slots, block_tables and block_tables_cpu are of group 0 of the layers; more_groups: those of the groups from 1 on. -1 is
    padding in all of them.
    dp_tokens: where several dp indices exchange tokens for their experts. inner: for a proposer that reads inner states.
    state_rows: for layers that keep a state of each request; the first of them makes it. layer_inputs [T, layers, width]: what each
    layer of the stage, and behind it, gets beside the residual stream (`models.layers.layer_inputs`), which the model sets.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    query_starts_cpu: list[int]
    kv_lengths_cpu: list[int]
    block_tables_cpu: Words | None = None
    table_rows: Tensor | None = None
    attention: Any = None
    fixed: bool = False
    decodes: int = 0
    short: bool = False
    last: tuple[Tensor, Tensor] | None = None
    dp_tokens: DpTokens | None = None
    inner: InnerStates | None = None
    state_rows: StateRows | None = None
    layer_inputs: Tensor | None = None
    more_groups: Sequence[GroupTables] = ()

    def of_group(self, group: int) -> GroupTables:
        """What the layers of a group read and write."""
        return self.more_groups[group - 1] if group else GroupTables(self.kv_slots, self.block_tables, self.block_tables_cpu)


def tokens_of(batch: Batch, hidden: Tensor | None) -> Iterator[tuple[Batch, Tensor | None]]:
    """Each token of a batch that is planned on the host as a batch of its own, in order, with its row of the residual stream
    [T, hidden_size]. Each tensor is in memory of its own, since a library may compute by where its input begins."""
    row = np.repeat(np.arange(len(batch.kv_lengths_cpu)), np.diff(batch.query_starts_cpu)).tolist()
    assert batch.table_rows is not None
    for token, position in enumerate(batch.positions.tolist()):
        here, own = slice(token, token + 1), slice(row[token], row[token] + 1)
        one = replace(
            batch, token_ids=batch.token_ids[here].clone(), positions=batch.positions[here].clone(),
            kv_slots=batch.kv_slots[here].clone(), query_starts=batch.query_starts.new_tensor([0, 1]),
            kv_lengths=batch.kv_lengths.new_tensor([position + 1]), table_rows=batch.table_rows[own],
            logit_rows=batch.logit_rows[:0], query_starts_cpu=[0, 1], kv_lengths_cpu=[position + 1],
            block_tables_cpu=_rows(batch.block_tables_cpu, own),
            more_groups=[
                GroupTables(each.kv_slots[here].clone(), each.block_tables, _rows(each.block_tables_cpu, own))
                for each in batch.more_groups
            ],
        )  # fmt: skip
        yield one, None if hidden is None else hidden[here].clone()


def without_rows(batch: Batch, count: int) -> Batch:
    """The batch without its first `count` rows, decode rows all, as attention reads it."""
    rows, own = batch.table_rows, slice(count, None)
    return replace(
        batch, token_ids=batch.token_ids[own], positions=batch.positions[own], kv_slots=batch.kv_slots[own],
        query_starts=batch.query_starts[own] - count, kv_lengths=batch.kv_lengths[own],
        block_tables=batch.block_tables[own] if rows is None else batch.block_tables,
        table_rows=None if rows is None else rows[own],
        query_starts_cpu=[start - count for start in batch.query_starts_cpu[own]], kv_lengths_cpu=batch.kv_lengths_cpu[own],
        block_tables_cpu=_rows(batch.block_tables_cpu, own),
        more_groups=[each._replace(block_tables_cpu=_rows(each.block_tables_cpu, own)) for each in batch.more_groups],
        attention=None,  # the plan of the full batch, which may hold this one's
    )  # fmt: skip


def _rows(tables: Words | None, rows: slice) -> Words | None:
    return None if tables is None else tables[rows]


def count_leading_decodes(query_starts: Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]) -> int:
    """How many rows at the beginning of the batch have one token. query_starts [R + 1]: see `Batch`."""
    longer = np.diff(np.asarray(query_starts)) != 1
    return int(longer.argmax()) if longer.any() else len(longer)


def first_block(position: int, window: int | None, block_size: int) -> int:
    """The first block of a row that a query at `position` or later sees; table entries before it may be stale."""
    return 0 if window is None else max(0, position - window + 1) // block_size
