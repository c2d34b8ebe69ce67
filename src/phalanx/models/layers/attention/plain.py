# SPDX-License-Identifier: Apache-2.0
"""Paged attention as it is written in the papers: one row after the other, in fp32, with all scores in memory. It is slow, and what
the start's self check compares the other back ends with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.context_parallel import ContextParallel


class _Row(NamedTuple):
    """A row's tokens in the batch, the blocks and offsets of its N keys, and which of these each token does not see, [Q, N]."""

    tokens: slice
    blocks: Tensor
    offsets: Tensor
    hidden: Tensor

    def gather(self, cache: Tensor) -> Tensor:
        """cache [blocks, block_size, heads, dim] -> [N, heads, dim] fp32."""
        if cache.dtype == torch.float8_e4m3fn:  # which has no indexing
            return cache.view(torch.uint8)[self.blocks, self.offsets].view(cache.dtype).float()
        return cache[self.blocks, self.offsets].float()


class _Rows:
    """The rows of a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def rows(self, block_size: int, window: int | None, group: int, chunk: int | None = None) -> Iterator[_Row]:
        """As the layers of a group see them."""
        batch, device = self._batch, self._batch.positions.device
        tables = batch.of_group(group).block_tables
        for row, length in enumerate(batch.kv_lengths_cpu):
            begin, end = batch.query_starts_cpu[row : row + 2]
            table = tables[row if batch.table_rows is None else batch.table_rows[row]]
            first = 0 if window is None else max(0, length - (end - begin) - window + 1)  # blocks before it may be another's
            keys = torch.arange(first, length, device=device)
            queries = torch.arange(length - (end - begin), length, device=device).unsqueeze(1)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            if chunk is not None:
                hidden |= keys // chunk != queries // chunk
            yield _Row(slice(begin, end), table[keys // block_size].long(), keys % block_size, hidden)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float, sinks: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """query [Q, heads, d], key [N, heads, d], value [N, heads, v] fp32 -> [Q, heads, v]."""
    scores = torch.einsum("qhd,nhd->hqn", query, key) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=-1)
    return torch.einsum("hqn,nhv->qhv", scores.softmax(-1)[..., : len(key)], value)


class PlainPlan(_Rows):
    """As AttentionPlan."""

    def forward(
        self, query: Tensor, cache: LayerCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None, sinks: Tensor | None = None,
        cap: float | None = None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan."""
        out = torch.zeros_like(query) if out is None else out
        key_scale, value_scale = kv_scales or (1.0, 1.0)
        groups = query.shape[1] // cache.key.shape[2]
        for row in self.rows(cache.key.shape[1], window, cache.group, chunk):
            key, value = row.gather(cache.key) * key_scale, row.gather(cache.value) * value_scale
            if cache.token_scales is not None:
                by_token = cache.token_scales[row.blocks, :, row.offsets].float()
                key, value = key * by_token[..., :1], value * by_token[..., 1:]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out[row.tokens] = _attend(query[row.tokens].float(), key, value, row.hidden, scale, sinks, cap).to(out.dtype)
        return out


class PlainLatentPlan(_Rows):
    """As LatentAttentionPlan: keys and values of all heads are computed, and of sparse attention scores of all keys. context: where
    tokens are divided over ranks. topk: see `Indexer`."""

    def __init__(self, batch: Batch, context: ContextParallel | None = None, topk: int = 0) -> None:
        super().__init__(batch)
        self._context, self._topk = context, topk
        self._unchosen: list[Tensor] | None = None  # of each row the keys that each token does not attend to, [Q, N]
        self.kv_slots = batch.kv_slots if context is None else context.kv_slots(batch.kv_slots)

    def forward(
        self, query: Tensor, cache: LayerCache, *, up: Tensor, scale: float, index: IndexQuery | None = None
    ) -> Tensor:  # fmt: skip
        """As LatentAttentionPlan."""
        if index is not None:
            self._unchosen = [self._not_chosen(row, index, cache) for row in self.rows(cache["latent"].shape[1], None, cache.group)]
        latent, rank, context = cache["latent"], up.shape[2], self._context
        block_size = latent.shape[1] if context is None else latent.shape[1] * context.size
        nope = query.shape[2] - (latent.shape[3] - rank)
        out = query.new_zeros(len(query), up.shape[0], up.shape[1] - nope)
        for number, row in enumerate(self.rows(block_size, None, cache.group)):
            hidden = row.hidden if self._unchosen is None else row.hidden | self._unchosen[number]
            if context is None:
                latents = row.gather(latent)[:, 0]
            else:
                stored = latent.view(torch.uint8) if latent.dtype == torch.float8_e4m3fn else latent
                slots = (row.blocks * block_size + row.offsets).unsqueeze(0)
                latents = context.gather(stored.view(-1, latent.shape[3]), slots)[0].view(latent.dtype).float()
            expanded = torch.einsum("nr,hdr->nhd", latents[:, :rank], up.float())
            rotated = latents[:, None, rank:].expand(-1, up.shape[0], -1)
            key = torch.cat((expanded[..., :nope], rotated), dim=-1)
            output = _attend(query[row.tokens].float(), key, expanded[..., nope:], hidden, scale)
            out[row.tokens] = output.to(out.dtype)
        return out

    def _not_chosen(self, row: _Row, index: IndexQuery, cache: LayerCache) -> Tensor:
        keys = row.gather(cache["index_key"])[:, 0]
        if "index_scale" in cache.tensors:
            keys = keys * row.gather(cache["index_scale"])[:, 0]
        scores = torch.einsum("qhd,nd->qhn", index.query[row.tokens].float(), keys).relu()
        total = torch.einsum("qhn,qh->qn", scores, index.weights[row.tokens]).masked_fill(row.hidden, -torch.inf)
        best = total.sort(dim=-1, descending=True, stable=True).indices[:, : self._topk]
        return torch.ones_like(row.hidden).scatter(1, best, False)


class PlainBackend:
    """As AttentionBackend, for attention over keys and values, or over latents."""

    name = "plain"
    graphs = None  # it reads lengths on the host

    def __init__(self, *, latent: bool, context: ContextParallel | None = None, topk: int = 0) -> None:
        """context, topk: as of `PlainLatentPlan`."""
        self._latent, self._context, self._topk = latent, context, topk

    def plan(self, batch: Batch) -> PlainPlan | PlainLatentPlan:
        return PlainLatentPlan(batch, self._context, self._topk) if self._latent else PlainPlan(batch)
