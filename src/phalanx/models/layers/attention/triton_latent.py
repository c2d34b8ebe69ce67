# SPDX-License-Identifier: Apache-2.0
"""Latent attention with our Triton kernels: absorbed for the decode rows, which come first in a batch; for the prefill rows,
latents are expanded into keys and values, a few heads at a time, in pages that the prefill kernel reads as it reads a cache.

The decode kernel reads lengths and block tables on the device, so that a captured forward is replayed with whatever values the
tensors of its batch then hold.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import dispatch as kernels
from phalanx.kernels.attention.heuristics import SplitKvWorkspace, count_prefill_tiles
from phalanx.models.batch import Batch, KvCache, count_leading_decodes
from phalanx.models.layers.attention.sdpa_latent import (
    LatentPlan,
    SdpaLatentBackend,
    absorbed_output,
    absorbed_query,
)
from phalanx.models.layers.attention.triton import without_rows

HEADS_AT_ONCE = 8
"""Heads whose keys and values are expanded together, at most, so that memory does not grow with a context times all heads."""


class ExpandedPages:
    """The blocks of a batch's rows from row `first` on, and block tables over them alone: row r's pages are neighbours."""

    def __init__(self, batch: Batch, first: int, block_size: int) -> None:
        self._batch, self._first = batch, first
        counts = -(-np.asarray(batch.kv_lengths_cpu[first:], dtype=np.int64) // block_size)
        ends = np.cumsum(counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        tables = np.minimum((ends - counts)[:, None] + np.arange(counts.max()), ends[-1] - 1)
        host = torch.from_numpy(np.concatenate((rows, columns, tables.reshape(-1))))
        device = batch.block_tables.device
        sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
        row, column, table = torch.split(sent, [len(rows), len(rows), tables.size])
        at = row + first if batch.table_rows is None else batch.table_rows[first:][row]
        self._blocks = batch.block_tables[at, column].long()
        self._tables = table.view(tables.shape).int()
        self._tiles = count_prefill_tiles(batch.query_starts_cpu[first:], 1)

    def attend(self, query: Tensor, cache: KvCache, up: Tensor, scale: float, out: Tensor) -> None:
        """query [T, heads, nope + rope] of the rows, as LatentAttentionPlan -> out [T, heads, v]."""
        batch, first = self._batch, self._first
        heads, rows, rank = up.shape
        head_dim, rotated = query.shape[2], cache.key.shape[3] - rank
        nope, begin = head_dim - rotated, batch.query_starts_cpu[first]
        latents, pages = self._gathered(cache.key).to(query.dtype), torch.Size((len(self._blocks), cache.key.shape[1]))
        rotated_key = latents[:, rank:].view(*pages, 1, rotated)
        # As many heads each time: their number is a constant of the kernel.
        count = next(size for size in range(min(heads, HEADS_AT_ONCE), 0, -1) if heads % size == 0)
        for head in range(0, heads, count):
            some = slice(head, head + count)
            expanded = F.linear(latents[:, :rank], up[some].flatten(0, 1)).view(*pages, count, rows)
            key = query.new_empty(*pages, count, head_dim)
            key[..., :nope], key[..., nope:] = expanded[..., :nope], rotated_key
            value = query.new_zeros(*pages, count, head_dim)  # the kernel's keys and values have one width
            value[..., : rows - nope] = expanded[..., nope:]
            mixed = kernels.prefill_attention(
                query[:, some].contiguous(), key, value, self._tables, None, batch.query_starts[first:], batch.kv_lengths[first:],
                scale=scale, tiles=self._tiles,
            )  # fmt: skip
            out[begin:, some] = mixed[begin:, :, : rows - nope]

    def _gathered(self, cache: Tensor) -> Tensor:
        """cache [blocks, block_size, 1, width] -> [pages * block_size, width]."""
        stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # which torch gathers on every device
        return stored.index_select(0, self._blocks).view(cache.dtype).flatten(0, 2)


class TritonLatentBackend:
    """own_prefill: expanded rows run in our prefill kernel, else in torch's scaled_dot_product_attention."""

    captures_prefill = False

    def __init__(self, device: torch.device, *, own_prefill: bool) -> None:
        self.name = "triton latent" if own_prefill else "triton latent+sdpa"
        self.own_prefill, self.prefill = own_prefill, SdpaLatentBackend()
        self.workspace = SplitKvWorkspace(device)
        self.layer_specs: set[kernels.LatentSpec] = set()  # of the layers that have run

    @property
    def graphs(self) -> TritonLatentBackend:
        """As AttentionBackend."""
        return self

    def plan(self, batch: Batch) -> TritonLatentPlan:
        """For one forward; of a fixed batch, before the first kernel of that forward."""
        return TritonLatentPlan(self, batch)

    def short_kv_limit(self, rows: int) -> int:
        """As GraphSupport: there is no other way for short rows."""
        return 0


class TritonLatentPlan:
    """One batch: rows 0 .. decodes-1 are decode rows, row r with token r; the others prefill rows."""

    def __init__(self, backend: TritonLatentBackend, batch: Batch) -> None:
        self._batch, self._backend = batch, backend
        self._decodes = batch.decodes if batch.fixed else count_leading_decodes(batch.query_starts_cpu)
        self._prefills = len(batch.kv_lengths_cpu) - self._decodes
        # As in `TritonPlan`: of a fixed batch, planned before the first kernel, and read early.
        planned = backend.layer_specs if batch.fixed and self._decodes else ()
        self._splits = {spec: self._plan_splits(spec) for spec in planned}
        self._prefill: LatentPlan | None = None
        self._pages: ExpandedPages | None = None

    def forward(self, query: Tensor, cache: KvCache, *, up: Tensor, scale: float) -> Tensor:
        """As LatentAttentionPlan."""
        batch, count, backend = self._batch, self._decodes, self._backend
        nope = query.shape[2] - (cache.key.shape[3] - up.shape[2])
        out = query.new_empty(query.shape[0], query.shape[1], up.shape[1] - nope)
        if count:
            spec, early = kernels.LatentSpec.of(query.shape[1], cache.key), batch.fixed
            if spec not in self._splits:
                self._splits[spec] = self._plan_splits(spec)
                early &= self._splits[spec] is None  # else a kernel that still runs plans them
            backend.layer_specs.add(spec)
            tables, rows = batch.block_tables, batch.table_rows
            mixed = kernels.latent_decode_attention(
                absorbed_query(query[:count], up, nope), query[:count, :, nope:], cache.key,
                tables if rows is not None else tables[:count], None if rows is None else rows[:count], batch.kv_lengths[:count],
                scale=scale, workspace=backend.workspace, splits=self._splits[spec], early_lengths=early,
            )  # fmt: skip
            absorbed_output(mixed, up, nope, out[:count])
        if self._prefills and backend.own_prefill:
            if self._pages is None:
                self._pages = ExpandedPages(batch, count, cache.key.shape[1])
            self._pages.attend(query, cache, up, scale, out)
        elif self._prefills:
            if self._prefill is None:
                self._prefill = backend.prefill.plan(without_rows(batch, count) if count else batch)
            out[count:] = self._prefill.forward(query[count:], cache, up=up, scale=scale)
        return out

    def _plan_splits(self, spec: kernels.LatentSpec) -> Tensor | None:
        rows = self._batch.table_rows
        lengths = self._batch.kv_lengths[: self._decodes]
        return kernels.plan_latent_splits(lengths, None if rows is None else rows[: self._decodes], spec, self._backend.workspace)
