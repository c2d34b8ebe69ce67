# SPDX-License-Identifier: Apache-2.0
"""Queries that attend to the tokens which an indexer chooses: `KernelRows` on GPUs, `GatheredRows` elsewhere.

Kernels take a chosen token as a page of one token: the chosen ones of a query are its block table, and the kernel of decode rows
over latents reads them, whether the query decodes or is a prompt's. They read lengths and block tables on the device, and so a
captured forward may be replayed with others; a query that sees fewer tokens than are chosen attends to all of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import dispatch as kernels
from phalanx.kernels.attention.heuristics import SplitKvWorkspace
from phalanx.kernels.attention.indexer import SCORES_BYTES, IndexQuery, best_keys, index_scores, read_index_keys
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.sdpa import Bundle, BundledPlan, Scratch
from phalanx.models.layers.attention.sdpa_latent import EXPANDED_BYTES, slots_of
from phalanx.models.layers.attention.triton_latent import DecodeRows

KERNEL_ROWS = 256
"""Queries of a launch, at most: partial results of 2,048 with 128 heads would take 1 GiB, which the workspace keeps."""


class SparseRows(Protocol):
    """N queries of a batch."""

    def choose(self, index: IndexQuery, cache: LayerCache) -> None:
        """Choose the tokens of each query, for this layer and for those behind it that have no indexer."""

    def attend(self, absorbed: Tensor, rotated: Tensor, cache: Tensor, scale: float) -> Tensor:
        """absorbed [N, heads, rank]: queries; rotated [N, heads, rope]: their rotated parts; cache: of latents. Returns the mixed
        latents [N, heads, rank]."""


class GatheredRows:
    """By torch's scaled_dot_product_attention. Of a batch whose queries all see `topk` tokens or more."""

    def __init__(self, batch: Batch, topk: int) -> None:
        self._bundles, self._topk = BundledPlan(batch, Scratch()), topk
        self._chosen = torch.empty(0)  # slots [N, topk]

    def choose(self, index: IndexQuery, cache: LayerCache) -> None:
        """As SparseRows."""

        def choose(bundle: Bundle) -> Tensor:
            shape = bundle.rows, bundle.queries
            keys = read_index_keys(cache["index_key"], cache.tensors.get("index_scale"), bundle.slots).view(bundle.rows, -1, width)
            query, weights = (each[bundle.tokens].view(*shape, *each.shape[1:]) for each in index)
            scores = index_scores(query, weights, keys).masked_fill_(~bundle.mask[:, 0], -torch.inf)
            best = best_keys(scores, self._topk)
            slots = bundle.slots.view(bundle.rows, 1, -1).expand(-1, bundle.queries, -1)
            return slots.gather(2, best).flatten(0, 1)

        block_size, width = cache["index_key"].shape[1], cache["index_key"].shape[3]
        self._chosen = self._bundles.attended(cache.group, None, block_size, choose)

    def attend(self, absorbed: Tensor, rotated: Tensor, cache: Tensor, scale: float) -> Tensor:
        """As SparseRows, for as many queries at a time as memory allows."""
        stored, rank, slots = slots_of(cache), absorbed.shape[2], self._chosen
        step = max(1, EXPANDED_BYTES // (self._topk * stored.shape[1] * absorbed.element_size()))
        outs = []
        for first in range(0, len(slots), step):
            some = slice(first, first + step)
            gathered = stored.index_select(0, slots[some].reshape(-1)).view(cache.dtype).to(absorbed.dtype)
            latents = gathered.view(-1, 1, self._topk, stored.shape[1])
            queries = torch.cat((absorbed[some], rotated[some]), dim=-1).unsqueeze(1)  # heads are queries of one head
            outs.append(F.scaled_dot_product_attention(queries, latents, latents[..., :rank], scale=scale).squeeze(1))
        return torch.cat(outs)


class KernelRows:
    """By our kernels, of any batch."""

    def __init__(self, batch: Batch, topk: int, workspace: SplitKvWorkspace) -> None:
        self._workspace, tokens = workspace, len(batch.token_ids)
        # A captured batch may have as many rows as tokens, and rows of several tokens among them.
        decodes = len(batch.kv_lengths_cpu) == (batch.decodes if batch.fixed else tokens)
        self._rows = DecodeRows.leading(batch, tokens) if decodes else DecodeRows.of_all_tokens(batch)
        self._longest = None if batch.fixed else max(batch.kv_lengths_cpu)  # at most; None: as long as a table allows
        self._lengths = self._rows.lengths.clamp(max=topk)
        self._chosen = torch.empty((tokens, topk), dtype=torch.int32, device=self._lengths.device)
        self._parts = [slice(first, first + KERNEL_ROWS) for first in range(0, tokens, KERNEL_ROWS)]
        self._splits: list[Tensor | None] = []  # of each part, the same for all layers

    def choose(self, index: IndexQuery, cache: LayerCache) -> None:
        """As SparseRows, for as many queries at a time as there is room for scores."""
        keys, (tables, table_rows, lengths) = cache["index_key"], self._rows
        assert table_rows is not None
        if self._longest is not None:
            tables = tables[:, : -(-self._longest // keys.shape[1])]
        step = max(1, SCORES_BYTES // (4 * tables.shape[1] * keys.shape[1]))
        for first in range(0, len(lengths), step):
            some = slice(first, first + step)
            kernels.best_slots(
                index.query[some], index.weights[some], keys, cache.tensors.get("index_scale"), tables, table_rows[some],
                lengths[some], self._chosen[some],
            )  # fmt: skip

    def attend(self, absorbed: Tensor, rotated: Tensor, cache: Tensor, scale: float) -> Tensor:
        """As SparseRows."""
        pages, outs = cache.view(-1, 1, 1, cache.shape[3]), []
        if not self._splits:
            spec = kernels.LatentSpec.of(absorbed.shape[1], pages)
            self._splits = [kernels.plan_latent_splits(self._lengths[part], None, spec, self._workspace) for part in self._parts]
        for part, splits in zip(self._parts, self._splits, strict=True):
            outs.append(kernels.latent_decode_attention(
                absorbed[part], rotated[part], pages, self._chosen[part], None, self._lengths[part], scale=scale,
                workspace=self._workspace, splits=splits,
            ))  # fmt: skip
        return outs[0] if len(outs) == 1 else torch.cat(outs)
