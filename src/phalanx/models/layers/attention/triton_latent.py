# SPDX-License-Identifier: Apache-2.0
"""Latent attention with our Triton kernels: absorbed for the decode rows, which come first in a batch; for the prefill rows,
latents are expanded into keys and values, as many heads at a time as memory allows, in pages that the prefill kernel reads as it
reads a cache.

The decode kernel reads lengths and block tables on the device, so that a captured forward is replayed with whatever values the
tensors of its batch then hold. Where such a batch has prefill rows, each of their tokens is a decode row, whose KV ends with
that token: how many pages the rows would expand, the host does not know.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import dispatch as kernels
from phalanx.kernels.attention.heuristics import SplitKvWorkspace, count_prefill_tiles
from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.layout.graphs import max_absorbed_pairs
from phalanx.models.batch import Batch, count_leading_decodes, without_rows
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.context_parallel import ContextParallel
from phalanx.models.layers.attention.sdpa_latent import (
    LatentPlan,
    SdpaLatentBackend,
    absorbed_output,
    absorbed_query,
)

HEADS_OF_GROUP = 8
"""Heads of a group, at most. Of a context longer than the largest step, one group after the other is expanded, so that memory does
not grow with a context times all heads."""
ROWS_OF_GROUPS = 256
"""Rows of a launch, at most, where more than one group is in it; and launches of fewer rows are made for so many. So those of one
number of rows all have one variant of the kernel, however many groups a step's contexts leave room for."""


class ExpandedPages:
    """The blocks of a batch's rows from row `first` on, and block tables over them alone: row r's pages are neighbours.

    Groups of heads are expanded together as far as `most_tokens` allow, which count once for each group: so small steps, whose
    time is that of their launches, have few. A group's rows stand behind those of the group before, with pages of their own: heads
    of a launch are a constant of the kernel, and no step needs a variant of it that a start did not compile."""

    def __init__(
        self, batch: Batch, first: int, block_size: int, query: Tensor, most_tokens: int, context: ContextParallel | None = None
    ) -> None:  # fmt: skip
        """query: of one of the layers, which all have as many heads. context: where ranks divide the tokens of blocks."""
        self._block_size, self._context = block_size, context
        heads, self._zero = query.shape[1], query.new_zeros(1)
        lengths = np.asarray(batch.kv_lengths_cpu[first:], dtype=np.int64)
        starts = np.asarray(batch.query_starts_cpu[first:], dtype=np.int64)
        counts = -(-lengths // block_size)
        ends = np.cumsum(counts)
        self.group = next(size for size in range(min(heads, HEADS_OF_GROUP), 0, -1) if heads % size == 0)
        self.at_once = max(min(heads // self.group, most_tokens // int(ends[-1] * block_size), ROWS_OF_GROUPS // len(counts)), 1)
        self._rows, self._tokens, self._own = len(counts), int(starts[-1] - starts[0]), slice(int(starts[0]), int(starts[-1]))
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        tables = np.minimum((ends - counts)[:, None] + np.arange(counts.max()), ends[-1] - 1)
        groups = np.arange(self.at_once)[:, None]
        tables = np.concatenate([tables + group * ends[-1] for group in range(self.at_once)])
        group_starts = np.append((starts[:-1] - starts[0] + groups * self._tokens).reshape(-1), self.at_once * self._tokens)
        group_lengths = np.tile(lengths, self.at_once)
        host = torch.from_numpy(np.concatenate((rows, columns, tables.reshape(-1), group_starts, group_lengths)))
        device = batch.block_tables.device
        sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
        row, column = sent[: 2 * len(rows)].view(2, -1)
        at = row + first if batch.table_rows is None else batch.table_rows[first:][row]
        self._blocks = batch.block_tables[at, column].long()
        table, self._starts, self._lengths = torch.split(
            sent[2 * len(rows) :].int(), [tables.size, len(group_starts), len(group_lengths)]
        )
        self._tables = table.view(tables.shape)
        self._tiles = count_prefill_tiles(batch.query_starts_cpu[first:], 1)

    def attend(self, query: Tensor, cache: LayerCache, up: Tensor, scale: float, out: Tensor) -> None:
        """query [T, heads, nope + rope] of the rows, as LatentAttentionPlan -> out [T, heads, v]."""
        heads, rows, rank = up.shape
        head_dim, rotated = query.shape[2], cache["latent"].shape[3] - rank
        nope, group, block_size = head_dim - rotated, self.group, self._block_size
        width = rows - nope  # of values, which the kernel has as wide as keys
        latents = self._gathered(cache["latent"]).to(query.dtype)
        rotated_key = latents[:, None, rank:]
        for head in range(0, heads, self.at_once * group):
            count = min(heads - head, self.at_once * group)
            some, groups = slice(head, head + count), count // group
            shape = torch.Size((groups, len(latents), group))
            expanded = F.linear(latents[:, :rank], up[some].flatten(0, 1)).view(-1, groups, group, rows).transpose(0, 1)
            key = torch.cat((expanded[..., :nope], rotated_key.expand(*shape, rotated)), dim=-1)
            value = torch.cat((expanded[..., nope:], self._zero.expand(*shape, head_dim - width)), dim=-1)
            queries = query[self._own, some].view(-1, groups, group, head_dim).transpose(0, 1).contiguous()
            pages, launch_rows = (-1, block_size, group, head_dim), groups * self._rows
            mixed = kernels.prefill_attention(
                queries.view(-1, group, head_dim), key.view(pages), value.view(pages), self._tables[:launch_rows], None,
                self._starts[: launch_rows + 1], self._lengths[:launch_rows], scale=scale, tiles=groups * self._tiles,
                least_rows=ROWS_OF_GROUPS,
            )  # fmt: skip
            of_groups = mixed.view(groups, self._tokens, group, head_dim)[..., :width]
            out[self._own, some].view(-1, groups, group, width).copy_(of_groups.transpose(0, 1))

    def _gathered(self, cache: Tensor) -> Tensor:
        """cache [blocks, a rank's tokens of a block, 1, width] -> [pages * block_size, width]."""
        stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # which torch gathers on every device
        pages = stored.index_select(0, self._blocks).squeeze(2)
        pages = pages if self._context is None else self._context.joined(pages)
        return pages.view(cache.dtype).flatten(0, 1)


class TritonLatentBackend:
    """own_prefill: expanded rows run in our prefill kernel, else in torch's scaled_dot_product_attention. most_tokens: of a step;
    as many tokens of all groups of heads as the largest step has of one are expanded together. context: where ranks divide the
    tokens of the cache."""

    captures_prefill = True

    def __init__(
        self, device: torch.device, *, own_prefill: bool, most_tokens: int, context: ContextParallel | None = None
    ) -> None:  # fmt: skip
        self.name = "triton latent" if own_prefill else "triton latent+sdpa"
        self.most_tokens, self.context = most_tokens, context
        self.own_prefill, self.prefill = own_prefill, SdpaLatentBackend(context)
        self.workspace = SplitKvWorkspace(device)
        self.layer_specs: set[kernels.LatentSpec] = set()  # of the layers that have run

    @property
    def graphs(self) -> TritonLatentBackend:
        """As AttentionBackend."""
        return self

    def plan(self, batch: Batch) -> TritonLatentPlan:
        """For one forward; of a fixed batch, before the first kernel of that forward."""
        return TritonLatentPlan(self, batch)

    def prompt_wave(self) -> tuple[int, int]:
        """As GraphSupport: heads are expanded as many at a time as there is room for."""
        return 0, 0

    def max_prefill_pairs(self) -> float:
        """As GraphSupport."""
        ranks = 1 if self.context is None else self.context.size  # each has as many times more heads, and fewer tokens
        return min((max_absorbed_pairs(spec.heads // ranks, spec.width) for spec in self.layer_specs), default=math.inf)

    def short_kv_limit(self, rows: int) -> int:
        """As GraphSupport: there is no other way for short rows."""
        return 0


class DecodeRows(NamedTuple):
    """Decode rows, row r with token r, as the decode kernel takes them. tables [rows or more, W], or of all slots with
    table_rows [rows]; lengths [rows]."""

    tables: Tensor
    table_rows: Tensor | None
    lengths: Tensor

    @classmethod
    def leading(cls, batch: Batch, count: int) -> DecodeRows:
        """The first rows of a batch, which are decode rows."""
        tables, rows = batch.block_tables, batch.table_rows
        if rows is None:
            return cls(tables[:count], None, batch.kv_lengths[:count])
        return cls(tables, rows[:count], batch.kv_lengths[:count])

    @classmethod
    def of_all_tokens(cls, batch: Batch) -> DecodeRows:
        """Each token of a fixed batch as a row, whose length ends with it; 0 where a token is absent."""
        assert batch.table_rows is not None
        starts = batch.query_starts
        tokens = torch.arange(len(batch.token_ids), dtype=starts.dtype, device=starts.device)
        rows = torch.searchsorted(starts[1:-1], tokens, right=True)  # an absent one is behind all: of the last row
        lengths = torch.where(batch.kv_slots < 0, 0, batch.positions + 1).to(batch.kv_lengths.dtype)
        return cls(batch.block_tables, batch.table_rows[rows], lengths)


class TritonLatentPlan:
    """One batch: rows 0 .. decodes-1 are decode rows, row r with token r; the others prefill rows. Of a fixed batch with prefill
    rows all tokens are decode rows."""

    def __init__(self, backend: TritonLatentBackend, batch: Batch) -> None:
        self._batch, self._backend, context = batch, backend, backend.context
        self.kv_slots = batch.kv_slots if context is None else context.kv_slots(batch.kv_slots)
        self._decodes = batch.decodes if batch.fixed else count_leading_decodes(batch.query_starts_cpu)
        self._prefills = len(batch.kv_lengths_cpu) - self._decodes
        # Lengths of a decode graph are copied to the device before it runs; those of tokens a kernel of the graph computes.
        self._early = batch.fixed and not self._prefills
        if batch.fixed and self._prefills:
            self._decodes, self._prefills, self._rows = len(batch.token_ids), 0, DecodeRows.of_all_tokens(batch)
        else:
            self._rows = DecodeRows.leading(batch, self._decodes)
        if context is not None:
            self._rows, self._early = self._rows._replace(lengths=context.kv_lengths(self._rows.lengths)), False
        # As in `TritonPlan`: of a fixed batch, planned before the first kernel, and read early.
        planned = backend.layer_specs if batch.fixed and self._decodes else ()
        self._splits = {spec: self._plan_splits(spec) for spec in planned}
        self._prefill: LatentPlan | None = None
        self._pages: ExpandedPages | None = None

    def forward(
        self, query: Tensor, cache: LayerCache, *, up: Tensor, scale: float, index: IndexQuery | None = None
    ) -> Tensor:  # fmt: skip
        """As LatentAttentionPlan, of all keys."""
        assert index is None, "see `sparse_latent`"
        batch, count, backend = self._batch, self._decodes, self._backend
        nope = query.shape[2] - (cache["latent"].shape[3] - up.shape[2])
        out = query.new_empty(query.shape[0], query.shape[1], up.shape[1] - nope)
        if count:
            absorbed, rotated = absorbed_query(query[:count], up, nope), query[:count, :, nope:]
            absorbed_output(self._decode(absorbed, rotated, cache["latent"], scale), up, nope, out[:count])
        if self._prefills and backend.own_prefill:
            if self._pages is None:
                block_size = cache["latent"].shape[1] * (1 if backend.context is None else backend.context.size)
                self._pages = ExpandedPages(batch, count, block_size, query, backend.most_tokens, backend.context)
            self._pages.attend(query, cache, up, scale, out)
        elif self._prefills:
            if self._prefill is None:
                self._prefill = backend.prefill.plan(without_rows(batch, count) if count else batch)
            out[count:] = self._prefill.forward(query[count:], cache, up=up, scale=scale)
        return out

    def _decode(self, absorbed: Tensor, rotated: Tensor, cache: Tensor, scale: float) -> Tensor:
        """The decode rows of a layer: absorbed [R, heads, rank], rotated [R, heads, rope] -> [R, heads, rank]."""
        context, lse, rank = self._backend.context, None, absorbed.shape[2]
        if context is not None:
            both = context.all_heads(torch.cat((absorbed, rotated), dim=-1))
            absorbed, rotated = both[..., :rank], both[..., rank:]
            lse = both.new_empty(both.shape[:2], dtype=torch.float32)
        spec = kernels.LatentSpec.of(absorbed.shape[1], cache)
        planned = spec in self._splits
        if not planned:
            self._splits[spec] = self._plan_splits(spec)
        splits = self._splits[spec]
        self._backend.layer_specs.add(spec)
        # Not early where a kernel that still runs has planned the splits, or computed the lengths.
        mixed = kernels.latent_decode_attention(
            absorbed, rotated, cache, *self._rows, scale=scale, workspace=self._backend.workspace, splits=splits,
            early_lengths=self._early if splits is None else self._batch.fixed and planned, lse=lse,
        )  # fmt: skip
        return mixed if context is None or lse is None else context.merge(mixed, lse)

    def _plan_splits(self, spec: kernels.LatentSpec) -> Tensor | None:
        return kernels.plan_latent_splits(self._rows.lengths, self._rows.table_rows, spec, self._backend.workspace)
