# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over latents (DeepSeek-V3.2, arXiv 2512.02556): a query that sees more than `topk` tokens attends to those
`topk` that the indexer chooses. All other queries are the dense back end's, and so a batch of these alone runs as it would without
an indexer.

A chosen token is a page of one token: the chosen ones of a query are its block table, and the kernel of decode rows over latents
reads them, whether the query decodes or is a prompt's. It is in use on GPUs; elsewhere the chosen latents are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import dispatch as kernels
from phalanx.kernels.attention.heuristics import SplitKvWorkspace
from phalanx.kernels.attention.indexer import SCORES_BYTES, IndexQuery, best_keys, index_scores, read_index_keys
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.backend import LatentAttentionPlan
from phalanx.models.layers.attention.sdpa import Bundle, BundledPlan, Scratch
from phalanx.models.layers.attention.sdpa_latent import (
    EXPANDED_BYTES,
    SdpaLatentBackend,
    absorbed_output,
    absorbed_query,
    slots_of,
)
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(absorbed queries [N, heads, rank], their rotated parts [N, heads, rope], cache, slots [N, topk], scale) -> mixed latents
[N, heads, rank]."""


KERNEL_ROWS = 256
"""Queries of a launch, at most: partial results of 2,048 with 128 heads would take 1 GiB, which the workspace keeps."""


class _Part(NamedTuple):
    """Some of a batch's queries, as a batch. tokens [T']: which of its tokens they are."""

    tokens: Tensor
    batch: Batch


def divided(batch: Batch, topk: int) -> tuple[_Part | None, _Part | None]:
    """The queries of a batch that see no more than topk tokens, and those that see more; None for none."""
    starts = np.asarray(batch.query_starts_cpu, dtype=np.int64)
    lengths = np.asarray(batch.kv_lengths_cpu, dtype=np.int64)
    counts = np.diff(starts)
    dense = np.clip(topk - (lengths - counts), 0, counts)  # of each row, whose first queries these are
    return (
        _part(batch, starts[:-1], dense, lengths - counts + dense),
        _part(batch, starts[:-1] + dense, counts - dense, lengths),
    )


_Words = np.ndarray[tuple[int], np.dtype[np.int64]]


def _part(batch: Batch, first: _Words, counts: _Words, lengths: _Words) -> _Part | None:
    """Of each row `counts` tokens from token `first` on, the last of which sees `lengths` tokens."""
    (rows,) = counts.nonzero()
    if not len(rows):
        return None
    first, counts, lengths = first[rows], counts[rows], lengths[rows]
    starts = np.append(0, counts.cumsum())
    tokens = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
    device = batch.block_tables.device
    host = torch.from_numpy(np.concatenate((tokens, rows, starts, lengths)))
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    token, row, start, length = torch.split(sent, [len(tokens), len(rows), len(starts), len(lengths)])
    tables = batch.block_tables_cpu
    table_rows = row if batch.table_rows is None else batch.table_rows[row]
    return _Part(token, replace(
        batch, token_ids=batch.token_ids[token], positions=batch.positions[token], kv_slots=batch.kv_slots[token],
        query_starts=start.int(), kv_lengths=length.int(), table_rows=table_rows, query_starts_cpu=starts.tolist(),
        kv_lengths_cpu=lengths.tolist(), block_tables_cpu=None if tables is None else tables[rows], more_groups=(), attention=None,
    ))  # fmt: skip


class SparseLatentBackend:
    """dense: of the queries that see no more than topk tokens."""

    graphs = None  # which queries see more than topk tokens, the host knows

    def __init__(self, dense: SdpaLatentBackend | TritonLatentBackend, topk: int) -> None:
        self.name, self.dense, self.topk = f"sparse {dense.name}", dense, topk
        self.has_kernels = isinstance(dense, TritonLatentBackend)
        self.attend = _by_kernel(dense.workspace) if isinstance(dense, TritonLatentBackend) else _gathered

    def plan(self, batch: Batch) -> SparseLatentPlan:
        return SparseLatentPlan(self, batch)


class SparseLatentPlan:
    """As LatentAttentionPlan."""

    def __init__(self, backend: SparseLatentBackend, batch: Batch) -> None:
        self.kv_slots, self._backend = batch.kv_slots, backend
        short, self._long = divided(batch, backend.topk)
        if self._long is None:
            self._dense: LatentAttentionPlan = backend.dense.plan(batch)
            return
        self._short = short
        if short is not None:
            self._dense = backend.dense.plan(short.batch)
        self._bundles = BundledPlan(self._long.batch, Scratch())
        self._rows: Tensor | None = None  # the table row of each query of `_long`
        self._chosen: Tensor | None = None  # slots [N, topk] of the queries of `_long`, for this layer and those that share them

    def forward(
        self, query: Tensor, cache: LayerCache, *, up: Tensor, scale: float, index: IndexQuery | None = None
    ) -> Tensor:  # fmt: skip
        """As LatentAttentionPlan."""
        if self._long is None:
            return self._dense.forward(query, cache, up=up, scale=scale)
        tokens = self._long.tokens
        if index is not None:
            own_index = IndexQuery(index.query[tokens], index.weights[tokens])
            self._chosen = (self.choose_by_kernel if self._backend.has_kernels else self.choose)(own_index, cache)
        assert self._chosen is not None, "a stage begins with a layer that has an indexer"
        nope = query.shape[2] - (cache["latent"].shape[3] - up.shape[2])
        out = query.new_empty(query.shape[0], query.shape[1], up.shape[1] - nope)
        if self._short is not None:
            out[self._short.tokens] = self._dense.forward(query[self._short.tokens], cache, up=up, scale=scale)
        own = query[tokens]
        mixed = self._backend.attend(absorbed_query(own, up, nope), own[..., nope:], cache["latent"], self._chosen, scale)
        out[tokens] = absorbed_output(mixed, up, nope)
        return out

    def choose_by_kernel(self, index: IndexQuery, cache: LayerCache) -> Tensor:
        """As `choose`, with each query as a row, for as many at a time as there is room for scores."""
        from phalanx.kernels.attention.index_choice import best_slots

        assert self._long is not None
        batch, keys = self._long.batch, cache["index_key"]
        if self._rows is None:
            counts = torch.tensor(np.diff(batch.query_starts_cpu), device=index.query.device)
            assert batch.table_rows is not None
            self._rows = batch.table_rows.repeat_interleave(counts, output_size=len(index.query))
        width = -(-max(batch.kv_lengths_cpu) // keys.shape[1])
        tables, lengths = batch.block_tables[:, :width], (batch.positions + 1).int()
        step = max(1, SCORES_BYTES // (4 * width * keys.shape[1]))
        chosen = []
        for first in range(0, len(lengths), step):
            some = slice(first, first + step)
            slots, _ = best_slots(
                index.query[some], index.weights[some], keys, cache.tensors.get("index_scale"), tables, self._rows[some],
                lengths[some], self._backend.topk,
            )  # fmt: skip
            chosen.append(slots)
        return torch.cat(chosen).long()

    def choose(self, index: IndexQuery, cache: LayerCache) -> Tensor:
        """The slots of the keys that the queries of `_long` attend to, [N, topk] int64."""

        def choose(bundle: Bundle) -> Tensor:
            shape = bundle.rows, bundle.queries
            keys = read_index_keys(cache["index_key"], cache.tensors.get("index_scale"), bundle.slots).view(bundle.rows, -1, width)
            query, weights = (each[bundle.tokens].view(*shape, *each.shape[1:]) for each in index)
            scores = index_scores(query, weights, keys).masked_fill_(~bundle.mask[:, 0], -torch.inf)
            best = best_keys(scores, self._backend.topk)
            slots = bundle.slots.view(bundle.rows, 1, -1).expand(-1, bundle.queries, -1)
            return slots.gather(2, best).flatten(0, 1)

        block_size, width = cache["index_key"].shape[1], cache["index_key"].shape[3]
        return self._bundles.attended(cache.group, None, block_size, choose)


def _gathered(absorbed: Tensor, rotated: Tensor, cache: Tensor, slots: Tensor, scale: float) -> Tensor:
    """As `Attend`, with torch's scaled_dot_product_attention, for as many queries at a time as memory allows."""
    stored, rank, topk = slots_of(cache), absorbed.shape[2], slots.shape[1]
    step = max(1, EXPANDED_BYTES // (topk * stored.shape[1] * absorbed.element_size()))
    outs = []
    for first in range(0, len(slots), step):
        some = slice(first, first + step)
        latents = (
            stored.index_select(0, slots[some].reshape(-1)).view(cache.dtype).to(absorbed.dtype).view(-1, 1, topk, stored.shape[1])
        )
        queries = torch.cat((absorbed[some], rotated[some]), dim=-1).unsqueeze(1)  # heads are queries of one head
        outs.append(F.scaled_dot_product_attention(queries, latents, latents[..., :rank], scale=scale).squeeze(1))
    return torch.cat(outs)


def _by_kernel(workspace: SplitKvWorkspace) -> Attend:
    def attend(absorbed: Tensor, rotated: Tensor, cache: Tensor, slots: Tensor, scale: float) -> Tensor:
        """As `Attend`."""
        lengths = torch.full((len(slots),), slots.shape[1], dtype=torch.int32, device=slots.device)
        pages, tables, outs = cache.view(-1, 1, 1, cache.shape[3]), slots.int(), []
        for first in range(0, len(slots), KERNEL_ROWS):
            some = slice(first, first + KERNEL_ROWS)
            outs.append(kernels.latent_decode_attention(
                absorbed[some], rotated[some], pages, tables[some], None, lengths[some], scale=scale, workspace=workspace
            ))  # fmt: skip
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    return attend
