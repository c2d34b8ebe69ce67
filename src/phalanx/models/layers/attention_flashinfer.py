# SPDX-License-Identifier: Apache-2.0
"""Paged attention with FlashInfer: its decode kernel for the rows of one token, which come first in a batch, its prefill kernel
for the others.

FlashInfer plans on the host, once per batch for each kind of layer (`Kind`). A kind is met in the first forward; from then on
`FlashInferBackend.plan` does all planning and a layer's forward only launches, as a captured graph needs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flashinfer
import torch
from torch import Tensor

from phalanx.models.batch import Batch, KvCache, first_block

WORKSPACE_BYTES = 256 << 20
"""For partial results of split rows; shared by all wrappers, which run one after the other on one stream."""


def fits(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashInfer has kernels for this."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim in (64, 128, 256)


class Kind(NamedTuple):
    """What a plan depends on besides the batch."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    scale: float
    kv_dtype: torch.dtype


class Pages(NamedTuple):
    """FlashInfer's page table for some rows: row r has pages indices[indptr[r] .. indptr[r+1]], the last of them filled up to
    last_page_len[r]. indptr [rows + 1] and last_page_len [rows] int32 on the host; indices int32 on the device."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class FlashInferBackend:
    """One pair of wrappers per kind of layer, kept over batches."""

    name = "flashinfer"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[Kind, tuple[Any, Any]] = {}

    def plan(self, batch: Batch) -> FlashInferPlan:
        plan = FlashInferPlan(self, batch)
        for kind in self.wrappers:
            plan.prepare(kind)
        return plan

    def meet(self, kind: Kind) -> None:
        """Make the wrappers of a kind. Tensor cores serve every ratio of query to KV heads, also the odd ones."""
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
        self.wrappers[kind] = decode, flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")


class FlashInferPlan:
    """One batch: rows 0 .. decodes-1 have one token each, the others any number."""

    def __init__(self, backend: FlashInferBackend, batch: Batch) -> None:
        self._backend, self._batch = backend, batch
        self._ready: set[Kind] = set()
        starts = batch.query_starts_cpu
        rows = len(batch.kv_lengths_cpu)
        self._decodes = next((row for row in range(rows) if starts[row + 1] - starts[row] != 1), rows)

    def forward(
        self, query: Tensor, cache: KvCache, *, window: int | None, scale: float, kv_scales: tuple[float, float] | None = None
    ) -> Tensor:
        """As AttentionPlan."""
        kind = Kind(query.shape[1], cache.key.shape[2], query.shape[2], cache.key.shape[1], window, scale, cache.key.dtype)
        if kind not in self._ready:
            self.prepare(kind)
        decode, prefill = self._backend.wrappers[kind]
        query, paged = query.contiguous(), (cache.key, cache.value)
        out = torch.empty_like(query)
        split, end = self._decodes, self._batch.query_starts_cpu[-1]
        scales = {} if kv_scales is None else {"k_scale": kv_scales[0], "v_scale": kv_scales[1]}
        if split:
            decode.run(query[:split], paged, out=out[:split], **scales)
        if end > split:
            prefill.run(query[split:end], paged, out=out[split:end], **scales)
        return out

    def prepare(self, kind: Kind) -> None:
        """Plan the batch for one kind of layer."""
        if kind not in self._backend.wrappers:
            self._backend.meet(kind)
        decode, prefill = self._backend.wrappers[kind]
        starts, split, rows = self._batch.query_starts_cpu, self._decodes, len(self._batch.kv_lengths_cpu)
        shared = {
            "sm_scale": kind.scale, "window_left": -1 if kind.window is None else kind.window - 1,
            "q_data_type": self._backend.dtype, "kv_data_type": kind.kv_dtype,
        }  # fmt: skip
        sizes = (kind.q_heads, kind.kv_heads, kind.head_dim, kind.block_size)
        if split:
            decode.plan(*self._pages(range(split), kind), *sizes, **shared)
        if rows > split:
            queries = torch.tensor([start - split for start in starts[split:]], dtype=torch.int32)
            prefill.plan(queries, *self._pages(range(split, rows), kind), *sizes, causal=True, **shared)
        self._ready.add(kind)

    def _pages(self, rows: range, kind: Kind) -> Pages:
        """The blocks inside the window only: entries behind it may be stale, and leaving them out shifts keys and queries alike."""
        batch, size = self._batch, kind.block_size
        width = batch.block_tables.shape[1]
        indptr, last, entries = [0], [], []
        for row in rows:
            length = batch.kv_lengths_cpu[row]
            count = batch.query_starts_cpu[row + 1] - batch.query_starts_cpu[row]
            begin, end = first_block(length - count, kind.window, size), (length - 1) // size + 1
            entries.append(torch.arange(row * width + begin, row * width + end, dtype=torch.int64))
            indptr.append(indptr[-1] + end - begin)
            last.append((length - 1) % size + 1)
        where, device = torch.cat(entries), batch.block_tables.device
        if device.type == "cuda":
            where = where.pin_memory().to(device, non_blocking=True)
        indices = batch.block_tables.view(-1)[where]
        return Pages(torch.tensor(indptr, dtype=torch.int32), indices, torch.tensor(last, dtype=torch.int32))
