# SPDX-License-Identifier: Apache-2.0
"""Paged attention with FlashInfer's prefill kernel: for rows of several tokens, and of one where nothing better is here.

FlashInfer plans on the host, once per batch for each kind of layer (`Kind`). A kind is met in the first forward; from then on
`FlashInferBackend.plan` does all planning and a layer's forward only launches.

A plan goes to the device through page-locked memory of the wrapper's, so the next one waits until it has been read (`Wrapper`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from torch import Tensor

from phalanx.models.batch import Batch, KvCache

WORKSPACE_BYTES = 256 << 20
"""For partial results of split rows; shared by all wrappers, which run one after the other on one stream."""

Words = np.ndarray[Any, np.dtype[np.int32]]


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

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.q_heads, self.kv_heads, self.head_dim, self.block_size

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        window = -1 if self.window is None else self.window - 1
        return {"sm_scale": self.scale, "window_left": window, "q_data_type": dtype, "kv_data_type": self.kv_dtype}


class Pages(NamedTuple):
    """FlashInfer's page table: row r has pages indices[indptr[r] .. indptr[r+1]], the last of them filled up to
    last_page_len[r]. indptr [rows + 1], last_page_len [rows]."""

    indptr: Words
    indices: Words
    last_page_len: Words


def pages(batch: Batch, window: int | None, block_size: int) -> Pages:
    """The blocks inside the window only: entries behind it may be stale, and leaving them out shifts keys and queries alike."""
    tables = batch.block_tables_cpu
    if tables is None:
        raise ValueError("FlashInfer plans on the host, and the batch has no block_tables_cpu")
    lengths = np.asarray(batch.kv_lengths_cpu, dtype=np.int64)
    ends = (lengths - 1) // block_size + 1
    begins = np.zeros_like(ends)
    if window is not None:
        counts = np.diff(np.asarray(batch.query_starts_cpu, dtype=np.int64))
        begins = np.maximum(lengths - counts - window + 1, 0) // block_size  # `first_block` of each
    held = ends - begins
    indptr = np.zeros(len(held) + 1, dtype=np.int64)
    np.cumsum(held, out=indptr[1:])
    columns = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - begins, held)
    indices = tables[np.repeat(np.arange(len(held)), held), columns]
    return Pages(indptr.astype(np.int32), indices, ((lengths - 1) % block_size + 1).astype(np.int32))


class Wrapper:
    """One of FlashInfer's, and when its last plan had been read from page-locked memory."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._read = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.run = wrapper.run

    def plan(self, *arguments: Any, **options: Any) -> None:
        if self._read is not None:
            self._read.synchronize()
        self._wrapper.plan(*arguments, **options)
        if self._read is not None:
            self._read.record()


def on_its_way(words: Words, device: torch.device) -> Tensor:
    """In page-locked memory, from which a copy to a GPU does not wait; torch keeps it until that copy is done."""
    host = torch.from_numpy(words)
    return host.pin_memory() if device.type == "cuda" else host


class FlashInferBackend:
    """One wrapper per kind of layer, kept over batches."""

    name = "flashinfer"
    captures = captures_prompts = False  # its launches follow the lengths

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, device
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[Kind, Wrapper] = {}

    def plan(self, batch: Batch) -> FlashInferPlan:
        plan = FlashInferPlan(self, batch)
        for kind in self.wrappers:
            plan.prepare(kind)
        return plan

    def short_up_to(self, rows: int) -> int:
        return 0

    def meet(self, kind: Kind) -> None:
        """Make the wrapper of a kind."""
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
        self.wrappers[kind] = Wrapper(prefill, self.device)


class FlashInferPlan:
    """One batch, whose rows have any number of tokens."""

    def __init__(self, backend: FlashInferBackend, batch: Batch) -> None:
        self._backend, self._batch = backend, batch
        self._ready: set[Kind] = set()

    def forward(
        self, query: Tensor, cache: KvCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan."""
        kind = Kind(query.shape[1], cache.key.shape[2], query.shape[2], cache.key.shape[1], window, scale, cache.key.dtype)
        if kind not in self._ready:
            self.prepare(kind)
        query, paged = query.contiguous(), (cache.key, cache.value)
        out = torch.empty_like(query) if out is None else out
        end = self._batch.query_starts_cpu[-1]
        scales = {} if kv_scales is None else {"k_scale": kv_scales[0], "v_scale": kv_scales[1]}
        self._backend.wrappers[kind].run(query[:end], paged, out=out[:end], **scales)
        return out

    def prepare(self, kind: Kind) -> None:
        """Plan the batch for one kind of layer."""
        if kind not in self._backend.wrappers:
            self._backend.meet(kind)
        self._ready.add(kind)
        prefill, starts = self._backend.wrappers[kind], self._batch.query_starts_cpu
        queries, table = torch.tensor(starts, dtype=torch.int32), self._table(kind)
        longest, options = int(np.diff(starts).max()), kind.options(self._backend.dtype)
        prefill.plan(queries, *table, *kind.sizes, causal=True, max_token_per_sequence=longest, **options)

    def _table(self, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
        found = pages(self._batch, kind.window, kind.block_size)
        device = self._backend.device
        indices = on_its_way(found.indices, device).to(device, non_blocking=True)
        return on_its_way(found.indptr, device), indices, on_its_way(found.last_page_len, device)
