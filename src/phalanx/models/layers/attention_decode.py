# SPDX-License-Identifier: Apache-2.0
"""Paged attention with the house's kernel for the rows of one token, which come first in a batch, and another back end for the
others.

The kernel reads lengths and block tables on the device, so for such rows there is nothing to plan: a captured forward is replayed
with whatever its batch's tensors hold by then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from phalanx.kernels import attention as kernels
from phalanx.models.batch import Batch, KvCache

if TYPE_CHECKING:
    from phalanx.models.layers.attention import AttentionBackend, AttentionPlan


class DecodeBackend:
    """others: for the rows of several tokens."""

    captures = True

    def __init__(self, others: AttentionBackend, device: torch.device) -> None:
        self.others, self.name = others, f"triton+{others.name}"
        self.workspace = kernels.Workspace(device)
        self.met: set[kernels.Heads] = set()

    def plan(self, batch: Batch) -> DecodePlan:
        return DecodePlan(self, batch)

    def short_up_to(self, rows: int) -> int:
        held = self.workspace
        return max((kernels.short_up_to(rows, heads, held.processors, held.shared) for heads in self.met), default=0)


class DecodePlan:
    """One batch: rows 0 .. decodes-1 have one token each, the others any number."""

    def __init__(self, backend: DecodeBackend, batch: Batch) -> None:
        self._batch, self._backend = batch, backend
        self._decodes = len(batch.kv_lengths_cpu) if batch.fixed else leading_decodes(batch)
        lengths = batch.kv_lengths_cpu[: self._decodes]
        self._short = batch.short if batch.fixed else max(lengths, default=0) <= kernels.SHORT
        self._rest: AttentionPlan | None = None
        if self._decodes < len(batch.kv_lengths_cpu):
            self._rest = backend.others.plan(without_rows(batch, self._decodes) if self._decodes else batch)

    def forward(
        self, query: Tensor, cache: KvCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan."""
        batch, count = self._batch, self._decodes
        query = query.contiguous()
        out = torch.empty_like(query) if out is None else out
        if count:
            rows = batch.table_rows
            self._backend.met.add(kernels.Heads.of(query, cache.key))
            # Of a fixed batch, lengths and table rows are copied to the device before its graph runs, and no kernel of the graph
            # writes them. Tables are no such thing: the graph's first kernel writes the new blocks into them.
            kernels.decode_attention(
                query[:count], cache.key, cache.value, batch.block_tables, None if rows is None else rows[:count],
                batch.kv_lengths[:count], scale=scale, window=window, kv_scales=kv_scales, workspace=self._backend.workspace,
                short=self._short, early_lengths=batch.fixed, out=out[:count],
            )  # fmt: skip
        if self._rest is not None:
            self._rest.forward(query[count:], cache, window=window, scale=scale, kv_scales=kv_scales, out=out[count:])
        return out


def leading_decodes(batch: Batch) -> int:
    """How many rows, from the first on, have one token."""
    longer = np.diff(np.asarray(batch.query_starts_cpu)) != 1
    return int(longer.argmax()) if longer.any() else len(longer)


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
    )  # fmt: skip
