# SPDX-License-Identifier: Apache-2.0
"""Paged attention with FlashInfer's prefill kernel: for prefill rows, and for decode rows where our kernel does not run.

FlashInfer plans on the host, once per batch for each kind of layer (`PlanKey`). A key is known after the first forward; from then
on `FlashInferBackend.plan` does all planning, and a layer's forward only launches.

A plan goes to the device through page-locked memory of the wrapper, so the next plan waits until this one has been read
(`Wrapper`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache

WORKSPACE_BYTES = 256 << 20
"""For partial results of split rows; shared by all wrappers, which run one after the other on one stream."""

Words = np.ndarray[Any, np.dtype[np.int32]]


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashInfer has kernels for this."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim in (64, 128, 256)


class PlanKey(NamedTuple):
    """The facts of a layer on which a plan depends, besides the batch."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    scale: float
    kv_dtype: torch.dtype
    cap: float | None = None
    group: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.q_heads, self.kv_heads, self.head_dim, self.block_size

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        window = -1 if self.window is None else self.window - 1
        capped = {} if self.cap is None else {"logits_soft_cap": self.cap}
        return {"sm_scale": self.scale, "window_left": window, "q_data_type": dtype, "kv_data_type": self.kv_dtype, **capped}


class Pages(NamedTuple):
    """FlashInfer's page table: row r has pages indices[indptr[r] .. indptr[r+1]], the last of them filled up to
    last_page_len[r]. indptr [rows + 1], last_page_len [rows]."""

    indptr: Words
    indices: Words
    last_page_len: Words


def pages(batch: Batch, window: int | None, block_size: int, group: int = 0) -> Pages:
    """Those of a group of layers. Only the blocks inside the window: table entries behind it may be stale, and leaving them out
    shifts keys and queries alike."""
    tables = batch.of_group(group).block_tables_cpu
    if tables is None:
        raise ValueError("the batch has no block_tables_cpu, and FlashInfer plans on the host")
    lengths = np.asarray(batch.kv_lengths_cpu, dtype=np.int64)
    ends = (lengths - 1) // block_size + 1
    begins = np.zeros_like(ends)
    if window is not None:
        counts = np.diff(np.asarray(batch.query_starts_cpu, dtype=np.int64))
        begins = np.maximum(lengths - counts - window + 1, 0) // block_size  # `first_block` of each
    page_counts = ends - begins
    indptr = np.zeros(len(page_counts) + 1, dtype=np.int64)
    np.cumsum(page_counts, out=indptr[1:])
    columns = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - begins, page_counts)
    indices = tables[np.repeat(np.arange(len(page_counts)), page_counts), columns]
    return Pages(indptr.astype(np.int32), indices, ((lengths - 1) % block_size + 1).astype(np.int32))


class Wrapper:
    """A wrapper of FlashInfer, and the event after which its last plan has been read from page-locked memory."""

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


def to_pinned(words: Words, device: torch.device) -> Tensor:
    """The words in page-locked memory, from which a copy to a GPU is asynchronous; torch keeps it until the copy is done."""
    host = torch.from_numpy(words)
    return host.pin_memory() if device.type == "cuda" else host


class FlashInferBackend:
    """One wrapper per kind of layer, kept from batch to batch."""

    name = "flashinfer"
    graphs = None  # its launches depend on the lengths

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, device
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[PlanKey, Wrapper] = {}

    def plan(self, batch: Batch) -> FlashInferPlan:
        plan = FlashInferPlan(self, batch)
        for key in self.wrappers:
            plan.prepare(key)
        return plan

    def add_wrapper(self, key: PlanKey) -> None:
        """Make the wrapper of a key."""
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
        self.wrappers[key] = Wrapper(prefill, self.device)


class FlashInferPlan:
    """One batch, whose rows have any number of tokens."""

    def __init__(self, backend: FlashInferBackend, batch: Batch) -> None:
        self._backend, self._batch = backend, batch
        self._ready: set[PlanKey] = set()

    def forward(
        self, query: Tensor, cache: LayerCache, *, window: int | None, scale: float,
        kv_scales: tuple[float, float] | None = None, out: Tensor | None = None, sinks: Tensor | None = None,
        cap: float | None = None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """As AttentionPlan, without chunks: see `select_backend`."""
        assert chunk is None
        if sinks is not None:
            raise ModelError(
                "attention sinks cannot run with FlashInfer's kernels", held="they run with the Triton kernels and on CPU",
                next="install triton",
            )  # fmt: skip
        if cache.token_scales is not None:
            raise ModelError(
                "a KV cache in int8 cannot be read by FlashInfer's kernels", held="the Triton kernels and the CPU read it",
                next="install triton, or use kv_cache_dtype='fp8'",
            )  # fmt: skip
        heads, head_dim = query.shape[1:]
        block_size, kv_heads = cache.key.shape[1:3]
        key = PlanKey(heads, kv_heads, head_dim, block_size, window, scale, cache.key.dtype, cap, cache.group)
        if key not in self._ready:
            self.prepare(key)
        query, paged = query.contiguous(), (cache.key, cache.value)
        out = torch.empty_like(query) if out is None else out
        end = self._batch.query_starts_cpu[-1]
        scales = {} if kv_scales is None else {"k_scale": kv_scales[0], "v_scale": kv_scales[1]}
        self._backend.wrappers[key].run(query[:end], paged, out=out[:end], **scales)
        return out

    def prepare(self, key: PlanKey) -> None:
        """Plan the batch for one kind of layer."""
        if key not in self._backend.wrappers:
            self._backend.add_wrapper(key)
        self._ready.add(key)
        prefill, starts = self._backend.wrappers[key], self._batch.query_starts_cpu
        queries, table = torch.tensor(starts, dtype=torch.int32), self._page_table(key)
        longest, options = int(np.diff(starts).max()), key.options(self._backend.dtype)
        prefill.plan(queries, *table, *key.sizes, causal=True, max_token_per_sequence=longest, **options)

    def _page_table(self, key: PlanKey) -> tuple[Tensor, Tensor, Tensor]:
        table = pages(self._batch, key.window, key.block_size, key.group)
        device = self._backend.device
        indices = to_pinned(table.indices, device).to(device, non_blocking=True)
        return to_pinned(table.indptr, device), indices, to_pinned(table.last_page_len, device)
