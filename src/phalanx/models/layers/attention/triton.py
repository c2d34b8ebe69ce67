# SPDX-License-Identifier: Apache-2.0
"""Paged attention with the house's kernels: one for the rows of one token, which come first in a batch, and one for the others,
unless another back end is better at them.

The kernels read lengths, block tables and where rows begin on the device, and what there is to plan a kernel plans there, once a
forward: a captured forward is replayed with whatever its batch's tensors hold by then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from phalanx.kernels import attention as kernels
from phalanx.models.batch import Batch, KvCache, leading_ones

if TYPE_CHECKING:
    from phalanx.models.layers.attention import AttentionBackend, AttentionPlan


class DecodeBackend:
    """others: for rows of several tokens. own: which of those the house's kernel takes instead: those over a cache in e4m3, all, or
    none, as there is no kernel for them; where there is one, it takes all of a fixed batch."""

    captures = True

    def __init__(
        self, others: AttentionBackend, device: torch.device, own: Literal["none", "e4m3", "all"] = "none"
    ) -> None:  # fmt: skip
        self.others, self.name, self.own = others, f"triton+{others.name}", own
        self.captures_prompts = own != "none"
        self.workspace = kernels.Workspace(device)
        self.met: set[kernels.Kind] = set()

    def plan(self, batch: Batch) -> DecodePlan:
        """For one forward, and of a fixed batch before the first kernel of that."""
        return DecodePlan(self, batch)

    def short_up_to(self, rows: int) -> int:
        held = self.workspace
        return max((kernels.short_up_to(rows, kind.heads, held.processors, held.shared) for kind in self.met), default=0)


class DecodePlan:
    """One batch: rows 0 .. decodes-1 have one token each, the others any number. Of a fixed batch some may not be there; what is
    then written for a row of one token stands where a token of another row, or none, is, and the other rows come behind."""

    def __init__(self, backend: DecodeBackend, batch: Batch) -> None:
        self._batch, self._backend = batch, backend
        rows = len(batch.kv_lengths_cpu)
        self._decodes = batch.decodes if batch.fixed else leading_ones(batch.query_starts_cpu)
        self._prompts = rows - self._decodes
        lengths = batch.kv_lengths_cpu[: self._decodes]
        self._short = batch.short if batch.fixed else max(lengths, default=0) <= kernels.SHORT
        # Of a fixed batch, lengths and table rows are copied to the device before its graph runs, and no kernel of the graph writes
        # them. So the pieces of all kinds of layers that were met are found first of all, and may be read early.
        self._pieces = {kind: self._cut(kind) for kind in backend.met} if batch.fixed and self._decodes else {}
        # What comes of the batch at the first layer, whose cache says which kernel is the better one.
        self._tiles: int | None = None
        self._rest: AttentionPlan | None = None

    def forward(
        self, query: Tensor, cache: KvCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan."""
        batch, backend = self._batch, self._backend
        query = query.contiguous()
        out = torch.empty_like(query) if out is None else out
        if self._decodes:
            kind, rows = kernels.Kind.of(query, cache.key, window), slice(self._decodes)
            early = batch.fixed
            if kind not in self._pieces:
                self._pieces[kind] = self._cut(kind)
                early &= self._pieces[kind] is None  # else by a kernel that is still under way
            # Tables are not read early: the graph's first kernel writes the new blocks into them.
            tables, held = batch.block_tables, batch.table_rows
            kernels.decode_attention(
                query[rows], cache.key, cache.value, tables if held is not None else tables[rows],
                None if held is None else held[rows], batch.kv_lengths[rows], scale=scale, window=window, kv_scales=kv_scales,
                workspace=backend.workspace, short=self._short, pieces=self._pieces[kind], early_lengths=early, out=out[rows],
            )  # fmt: skip
        backend.met.add(kernels.Kind.of(query, cache.key, window))
        if self._prompts:
            if batch.fixed or backend.own == "all" or (backend.own == "e4m3" and cache.key.dtype == torch.float8_e4m3fn):
                self._attend_prompts(query, cache, window, scale, kv_scales, out)
            else:
                if self._rest is None:
                    self._rest = backend.others.plan(without_rows(batch, self._decodes) if self._decodes else batch)
                at = self._decodes
                self._rest.forward(query[at:], cache, window=window, scale=scale, kv_scales=kv_scales, out=out[at:])
        return out

    def _cut(self, kind: kernels.Kind) -> Tensor | None:
        rows, held = slice(self._decodes), self._batch.table_rows
        lengths, held = self._batch.kv_lengths[rows], None if held is None else held[rows]
        return kernels.cut_rows(lengths, held, kind, self._backend.workspace, short=self._short)

    def _attend_prompts(
        self, query: Tensor, cache: KvCache, window: int | None, scale: float, kv_scales: tuple[float, float] | None, out: Tensor
    ) -> None:
        """The rows behind those of one token, by the house's kernel. Its grid is as large as these rows need, or, of a fixed batch,
        as any may."""
        batch, at = self._batch, self._decodes
        if not batch.fixed and self._tiles is None:
            self._tiles = kernels.prefill_tiles(batch.query_starts_cpu[at:], query.shape[1] // cache.key.shape[2])
        rows = batch.table_rows
        kernels.prefill_attention(
            query, cache.key, cache.value, batch.block_tables if rows is not None else batch.block_tables[at:],
            None if rows is None else rows[at:], batch.query_starts[at:], batch.kv_lengths[at:], scale=scale, window=window,
            kv_scales=kv_scales, tiles=self._tiles, early_lengths=batch.fixed, out=out,
        )  # fmt: skip


def without_rows(batch: Batch, count: int) -> Batch:
    """The batch without its first `count` rows, of one token each, as attention looks at it."""
    rows = batch.table_rows
    return replace(
        batch, token_ids=batch.token_ids[count:], positions=batch.positions[count:], kv_slots=batch.kv_slots[count:],
        query_starts=batch.query_starts[count:] - count, kv_lengths=batch.kv_lengths[count:],
        block_tables=batch.block_tables[count:] if rows is None else batch.block_tables,
        table_rows=None if rows is None else rows[count:],
        query_starts_cpu=[start - count for start in batch.query_starts_cpu[count:]], kv_lengths_cpu=batch.kv_lengths_cpu[count:],
        block_tables_cpu=None if batch.block_tables_cpu is None else batch.block_tables_cpu[count:],
        attention=None,  # the whole batch's plan, which may hold this one's
    )  # fmt: skip
