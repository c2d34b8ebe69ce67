# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over latents (DeepSeek-V3.2, arXiv 2512.02556): a query that sees more than `topk` tokens attends to those
`topk` that the indexer chooses. All other queries are the dense back end's, and so a batch of these alone runs as it would without
an indexer.

Of a captured forward the host does not know which queries these are: there all of them have their tokens chosen, and a second one,
for rows of no more than `topk` tokens, is dense.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend, absorbed_output, absorbed_query
from phalanx.models.layers.attention.sparse_rows import GatheredRows, KernelRows, SparseRows
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend


class _Part(NamedTuple):
    """Some of a batch's queries, as a batch. tokens [T']: which of its tokens they are; None: all."""

    tokens: Tensor | None
    batch: Batch


def divided(batch: Batch, topk: int) -> tuple[_Part | None, _Part | None]:
    """The queries of a batch that see no more than topk tokens, and those that see more; None for none. Where lengths on the host
    are too high (of rows behind drafts that may be rejected), some of the second see no more, either."""
    starts = np.asarray(batch.query_starts_cpu, dtype=np.int64)
    lengths = np.asarray(batch.kv_lengths_cpu, dtype=np.int64)
    counts = np.diff(starts)
    dense = np.clip(topk - (lengths - counts), 0, counts)  # of each row, whose first queries these are
    if np.array_equal(dense, counts):
        return _Part(None, batch), None
    if not dense.any():
        return None, _Part(None, batch)
    return (
        _part(batch, starts[:-1], dense, lengths - counts + dense),
        _part(batch, starts[:-1] + dense, counts - dense, lengths),
    )


_Words = np.ndarray[tuple[int], np.dtype[np.int64]]


def _part(batch: Batch, first: _Words, counts: _Words, lengths: _Words) -> _Part:
    """Of each row `counts` tokens from token `first` on, the last of which sees `lengths` tokens, or fewer."""
    (rows,) = counts.nonzero()
    first, counts, lengths = first[rows], counts[rows], lengths[rows]
    starts = np.append(0, counts.cumsum())
    tokens = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
    device = batch.block_tables.device
    host = torch.from_numpy(np.concatenate((tokens, rows, starts)))
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    token, row, start = torch.split(sent, [len(tokens), len(rows), len(starts)])
    positions = batch.positions[token]
    tables = batch.block_tables_cpu
    table_rows = row if batch.table_rows is None else batch.table_rows[row]
    lengths_there = (positions[start[1:] - 1] + 1).int()
    return _Part(token, replace(
        batch, token_ids=batch.token_ids[token], positions=positions, kv_slots=batch.kv_slots[token], query_starts=start.int(),
        kv_lengths=lengths_there, table_rows=table_rows, query_starts_cpu=starts.tolist(), kv_lengths_cpu=lengths.tolist(),
        block_tables_cpu=None if tables is None else tables[rows], more_groups=(), attention=None,
    ))  # fmt: skip


class SparseLatentBackend:
    """dense: of the queries that see no more than topk tokens."""

    captures_prefill = True

    def __init__(self, dense: SdpaLatentBackend | TritonLatentBackend, topk: int) -> None:
        self.name, self.dense, self.topk = f"sparse {dense.name}", dense, topk

    @property
    def graphs(self) -> SparseLatentBackend | None:
        """As AttentionBackend."""
        return None if self.dense.graphs is None else self

    def plan(self, batch: Batch) -> SparseLatentPlan:
        """As AttentionBackend."""
        return SparseLatentPlan(self, batch)

    def rows(self, batch: Batch) -> SparseRows:
        """All queries of a batch, as those that see more than topk tokens."""
        if isinstance(self.dense, TritonLatentBackend):
            return KernelRows(batch, self.topk, self.dense.workspace)
        return GatheredRows(batch, self.topk)

    def prompt_wave(self) -> tuple[int, int]:
        """As GraphSupport."""
        return 0, 0

    def max_prefill_pairs(self) -> float:
        """As GraphSupport: as without an indexer, which makes a graph's work for such a pair less where contexts are long."""
        return math.inf if self.dense.graphs is None else self.dense.graphs.max_prefill_pairs()

    def short_kv_limit(self, rows: int) -> int:
        """As GraphSupport."""
        return self.topk


class SparseLatentPlan:
    """As LatentAttentionPlan."""

    def __init__(self, backend: SparseLatentBackend, batch: Batch) -> None:
        self.kv_slots = batch.kv_slots
        if batch.fixed:
            everything = _Part(None, batch)
            parts: tuple[_Part | None, _Part | None] = (everything, None) if batch.short else (None, everything)
        else:
            parts = divided(batch, backend.topk)
        self._short, self._long = parts
        self._dense = None if self._short is None else backend.dense.plan(self._short.batch)
        self._sparse = None if self._long is None else backend.rows(self._long.batch)

    def forward(
        self, query: Tensor, cache: LayerCache, *, up: Tensor, scale: float, index: IndexQuery | None = None
    ) -> Tensor:  # fmt: skip
        """As LatentAttentionPlan. A stage begins with a layer that has an indexer."""
        if self._sparse is None or self._long is None:
            assert self._dense is not None
            return self._dense.forward(query, cache, up=up, scale=scale)
        tokens = self._long.tokens
        if index is not None:
            self._sparse.choose(index if tokens is None else IndexQuery(index.query[tokens], index.weights[tokens]), cache)
        nope = query.shape[2] - (cache["latent"].shape[3] - up.shape[2])
        own = query if tokens is None else query[tokens]
        mixed = self._sparse.attend(absorbed_query(own, up, nope), own[..., nope:], cache["latent"], scale)
        out = query.new_empty(*query.shape[:2], up.shape[1] - nope)
        if self._short is None or self._dense is None:
            absorbed_output(mixed, up, nope, out)
            return out
        out[self._short.tokens] = self._dense.forward(query[self._short.tokens], cache, up=up, scale=scale)
        out[tokens] = absorbed_output(mixed, up, nope)
        return out
