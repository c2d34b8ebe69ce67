# SPDX-License-Identifier: Apache-2.0
"""Paged attention with our Triton kernels: one for the decode rows, which come first in a batch, and one for the prefill rows,
unless another back end is faster at those.

The kernels read lengths, block tables and row starts on the device. Their work is planned there too, once per forward. So a
captured forward is replayed with whatever values the tensors of its batch then hold.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor

from phalanx.kernels.attention import dispatch as kernels
from phalanx.kernels.attention.heuristics import SHORT_KV, SplitKvWorkspace, count_prefill_tiles
from phalanx.models.batch import Batch, count_leading_decodes, without_rows
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.backend import AttentionBackend, AttentionPlan

QUANTIZED = (torch.float8_e4m3fn, torch.int8)
"""Dtypes of a cache whose prefill rows our kernel takes."""


class TritonBackend:
    """prefill: the back end for prefill rows. own_prefill: the prefill rows that our kernel takes instead: those over a quantized
    cache (e4m3, int8) and those with sinks, all, or none, where there is no kernel for them. Where there is one, it takes all
    prefill rows of a fixed batch. batch_invariant: it takes all rows, with own_prefill all: a token's output is the same in a
    prefill row and in a decode row, whatever is beside it."""

    def __init__(
        self, prefill: AttentionBackend, device: torch.device, own_prefill: Literal["none", "quantized", "all"] = "none", *,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.prefill, self.own_prefill, self.batch_invariant = prefill, own_prefill, batch_invariant
        self.name = "triton" if own_prefill == "all" else f"triton+{prefill.name}"
        if batch_invariant:
            self.name = "triton, batch-invariant"
        self.captures_prefill = own_prefill != "none"
        self.workspace = SplitKvWorkspace(device)
        self.layer_specs: set[kernels.LayerSpec] = set()  # of the layers that have run

    @property
    def graphs(self) -> TritonBackend:
        """As AttentionBackend."""
        return self

    def plan(self, batch: Batch) -> TritonPlan:
        """For one forward; of a fixed batch, before the first kernel of that forward."""
        return TritonPlan(self, batch)

    def max_prefill_pairs(self) -> float:
        """As GraphSupport: one kernel takes them, captured or not."""
        return math.inf

    def prompt_wave(self) -> tuple[int, int]:
        """As GraphSupport: of the layers without a window, which are those that long prompts wait for."""
        waves = (spec.heads.prompt_wave(self.workspace.num_sms) for spec in self.layer_specs if spec.window is None)
        return max(waves, default=(0, 0))

    def short_kv_limit(self, rows: int) -> int:
        """As GraphSupport."""
        num_sms, shared_memory = self.workspace.num_sms, self.workspace.shared_memory
        limits = (kernels.short_kv_limit(rows, spec.heads, num_sms, shared_memory) for spec in self.layer_specs)
        return max(limits, default=0)


class TritonPlan:
    """One batch: rows 0 .. decodes-1 are decode rows, the others prefill rows. In a fixed batch some rows may be absent; the output
    of an absent decode row goes where a token of another row, or no token, is, and the prefill rows are written after it."""

    def __init__(self, backend: TritonBackend, batch: Batch) -> None:
        self._batch, self._backend = batch, backend
        rows = len(batch.kv_lengths_cpu)
        self._decodes = batch.decodes if batch.fixed else count_leading_decodes(batch.query_starts_cpu)
        if backend.batch_invariant:
            self._decodes = 0
        self._prefills = rows - self._decodes
        lengths = batch.kv_lengths_cpu[: self._decodes]
        self._short = batch.short if batch.fixed else max(lengths, default=0) <= SHORT_KV
        # Of a fixed batch, lengths and table rows are copied to the device before its graph runs, and no kernel of the graph writes
        # them. So the splits for all layers that have run are planned first, and may be read early.
        self._splits = {spec: self._plan_splits(spec) for spec in backend.layer_specs} if batch.fixed and self._decodes else {}
        lengths = batch.kv_lengths_cpu[self._decodes :]
        self._mean_length = None if batch.fixed or not lengths else sum(lengths) // len(lengths)
        # Known at the first layer, whose cache says which kernel is faster.
        self._tiles: int | None = None
        self._prefill: AttentionPlan | None = None

    def forward(
        self, query: Tensor, cache: LayerCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None, sinks: Tensor | None = None,
        cap: float | None = None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan, without a cap and chunks: see `select_backend`."""
        assert cap is None
        assert chunk is None
        batch, backend = self._batch, self._backend
        query = query.contiguous()
        out = torch.empty_like(query) if out is None else out
        if self._decodes:
            spec, rows = kernels.LayerSpec.of(query, cache.key, window), slice(self._decodes)
            early = batch.fixed
            if spec not in self._splits:
                self._splits[spec] = self._plan_splits(spec)
                early &= self._splits[spec] is None  # else a kernel that still runs plans them
            # Tables are not read early: the graph's first kernel writes the new blocks into them.
            tables, table_rows = batch.of_group(cache.group).block_tables, batch.table_rows
            kernels.decode_attention(
                query[rows], cache.key, cache.value, tables if table_rows is not None else tables[rows],
                None if table_rows is None else table_rows[rows], batch.kv_lengths[rows], scale=scale, window=window,
                kv_scales=kv_scales, workspace=backend.workspace, short=self._short, splits=self._splits[spec],
                early_lengths=early, out=out[rows], sinks=sinks, token_scales=cache.token_scales,
            )  # fmt: skip
        backend.layer_specs.add(kernels.LayerSpec.of(query, cache.key, window))
        if self._prefills:
            own = backend.own_prefill
            must = own == "quantized" and (cache.key.dtype in QUANTIZED or sinks is not None)
            if batch.fixed or own == "all" or must:
                self._attend_prefill(query, cache, window, scale, kv_scales, out, sinks)
            else:
                if self._prefill is None:
                    prefill_rows = without_rows(batch, self._decodes) if self._decodes else batch
                    self._prefill = cast(AttentionPlan, backend.prefill.plan(prefill_rows))
                at = self._decodes
                self._prefill.forward(query[at:], cache, window=window, scale=scale, kv_scales=kv_scales, out=out[at:], sinks=sinks)
        return out

    def _plan_splits(self, spec: kernels.LayerSpec) -> Tensor | None:
        rows, table_rows = slice(self._decodes), self._batch.table_rows
        lengths, table_rows = self._batch.kv_lengths[rows], None if table_rows is None else table_rows[rows]
        return kernels.plan_splits(lengths, table_rows, spec, self._backend.workspace, short=self._short)

    def _attend_prefill(
        self, query: Tensor, cache: LayerCache, window: int | None, scale: float, kv_scales: tuple[float, float] | None,
        out: Tensor, sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """The prefill rows, by our kernel. Its grid is as large as these rows need, or, of a fixed batch, as any rows may need."""
        batch, at, backend = self._batch, self._decodes, self._backend
        if not batch.fixed and self._tiles is None:
            self._tiles = count_prefill_tiles(batch.query_starts_cpu[at:], query.shape[1] // cache.key.shape[2])
        rows, tables = batch.table_rows, batch.of_group(cache.group).block_tables
        kernels.prefill_attention(
            query, cache.key, cache.value, tables if rows is not None else tables[at:],
            None if rows is None else rows[at:], batch.query_starts[at:], batch.kv_lengths[at:], scale=scale, window=window,
            kv_scales=kv_scales, tiles=self._tiles, mean_length=self._mean_length, early_lengths=batch.fixed, out=out, sinks=sinks,
            token_scales=cache.token_scales, batch_invariant=backend.batch_invariant, workspace=backend.workspace,
        )  # fmt: skip
