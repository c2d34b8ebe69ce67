# SPDX-License-Identifier: Apache-2.0
"""Paged attention with FlashInfer: its decode kernel for the rows of one token, which come first in a batch, its prefill kernel
for the others.

FlashInfer plans on the host, once per batch for each kind of layer (`Kind`). A kind is met in the first forward; from then on
`FlashInferBackend.plan` does all planning and a layer's forward only launches, as a captured graph needs it.

A plan goes to the device through page-locked memory of the wrapper's, so the next one waits until it has been read (`Wrapper`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from torch import Tensor

from phalanx.models.batch import Batch, KvCache
from phalanx.models.layers.attention_decode import leading_decodes

WORKSPACE_BYTES = 256 << 20
"""For partial results of split rows; shared by all wrappers, which run one after the other on one stream."""

PLAN_BYTES = 512 << 10
"""For the plan of a fixed batch: a few words per row and per piece of a split row, of which a GPU runs some hundreds at once."""

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
    """FlashInfer's page table for some rows: row r has pages indices[indptr[r] .. indptr[r+1]], the last of them filled up to
    last_page_len[r]. indptr [rows + 1], last_page_len [rows]."""

    indptr: Words
    indices: Words
    last_page_len: Words


def pages(batch: Batch, rows: range, window: int | None, block_size: int) -> Pages:
    """The blocks inside the window only: entries behind it may be stale, and leaving them out shifts keys and queries alike."""
    tables = batch.block_tables_cpu
    if tables is None:
        raise ValueError("FlashInfer plans on the host, and the batch has no block_tables_cpu")
    lengths = np.asarray(batch.kv_lengths_cpu[rows.start : rows.stop], dtype=np.int64)
    ends = (lengths - 1) // block_size + 1
    begins = np.zeros_like(ends)
    if window is not None:
        counts = np.diff(np.asarray(batch.query_starts_cpu[rows.start : rows.stop + 1], dtype=np.int64))
        begins = np.maximum(lengths - counts - window + 1, 0) // block_size  # `first_block` of each
    held = ends - begins
    indptr = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(held, out=indptr[1:])
    columns = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - begins, held)
    indices = tables[np.repeat(np.arange(rows.start, rows.stop), held), columns]
    return Pages(indptr.astype(np.int32), indices, ((lengths - 1) % block_size + 1).astype(np.int32))


class Wrapper:
    """One of FlashInfer's, and when its last plan had been read from page-locked memory."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._read = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.run = wrapper.run

    def plan(self, *arguments: Any, quickly: bool = False, **options: Any) -> None:
        """quickly: its buffers hold the page table already, and all but the page table is as in the plan before."""
        if self._read is not None:
            self._read.synchronize()
        if quickly:
            flashinfer.fast_decode_plan(self._wrapper, *arguments, **options)
        else:
            self._wrapper.plan(*arguments, **options)
        if self._read is not None:
            self._read.record()


class FixedTable:
    """The page table of one kind's fixed batches, on the device where graphs find it: indptr, last_page_len, indices.

    Few rows are split, so that they keep the whole GPU busy, and are planned for each batch. Where rows times KV heads are more
    programs than the GPU runs at once, a split would gain nothing: each is one program, whatever its length, so that one plan does
    for good. It is made without FlashInfer's own support of graphs, which would launch programs that nobody needs.
    """

    def __init__(self, rows: int, room: int, device: torch.device) -> None:
        self._rows = rows
        self._words = torch.zeros(2 * rows + 1 + room, dtype=torch.int32, device=device)
        self._indices = self._words[2 * rows + 1 :]

    def splitting(self, rows: int, workspace: Tensor) -> Wrapper:
        """For fixed batches of so few rows, planned for each."""
        indptr, last = self._places(rows)
        made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr,
            paged_kv_last_page_len_buffer=last, paged_kv_indices_buffer=self._indices,
        )  # fmt: skip
        made.reset_workspace_buffer(workspace, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.device))
        return Wrapper(made, workspace.device)

    def whole(self, rows: int, workspace: Tensor, kind: Kind, options: dict[str, Any]) -> Wrapper:
        """For fixed batches of so many rows that none is split; planned. Waits for the device, as it is made once."""
        indptr, last = self._places(rows)
        made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        made.reset_workspace_buffer(workspace, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.device))
        wrapper = Wrapper(made, workspace.device)
        wrapper.plan(indptr, self._indices, last, *kind.sizes, disable_split_kv=True, **options)  # keeps these very tensors
        return wrapper

    def _places(self, rows: int) -> tuple[Tensor, Tensor]:
        return self._words[: rows + 1], self._words[self._rows + 1 :][:rows]

    def fill(self, table: Pages) -> None:
        """One copy."""
        words = np.zeros(2 * self._rows + 1 + len(table.indices), dtype=np.int32)
        words[: len(table.indptr)] = table.indptr
        words[self._rows + 1 :][: len(table.last_page_len)] = table.last_page_len
        words[2 * self._rows + 1 :] = table.indices
        self._words[: len(words)].copy_(on_its_way(words, self._words.device), non_blocking=True)


def on_its_way(words: Words, device: torch.device) -> Tensor:
    """In page-locked memory, from which a copy to a GPU does not wait; torch keeps it until that copy is done."""
    host = torch.from_numpy(words)
    return host.pin_memory() if device.type == "cuda" else host


class FlashInferBackend:
    """One pair of wrappers per kind of layer, kept over batches; and one per kind and size of fixed batches."""

    name = "flashinfer"
    captures = plans_fixed = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, device
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[Kind, tuple[Wrapper, Wrapper]] = {}
        self.fixed: dict[tuple[Kind, int], Wrapper] = {}
        self.tables: dict[Kind, FixedTable] = {}
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._most = (0, 0)

    def plan(self, batch: Batch) -> FlashInferPlan:
        plan = FlashInferPlan(self, batch)
        for kind in self.wrappers:
            plan.prepare(kind)
        return plan

    def hold(self, rows: int, pages: int) -> None:
        self._most = (rows, pages)

    def short_up_to(self, rows: int) -> int:
        return 0

    def meet(self, kind: Kind) -> None:
        """Make the wrappers of a kind. Tensor cores serve every ratio of query to KV heads, also the odd ones."""
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=True)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
        self.wrappers[kind] = Wrapper(decode, self.device), Wrapper(prefill, self.device)

    def plan_fixed(self, kind: Kind, batch: Batch) -> None:
        """Plan a fixed batch into the buffers of its size."""
        rows = len(batch.kv_lengths_cpu)
        table = pages(batch, range(rows), kind.window, kind.block_size)
        if kind not in self.tables:
            self.tables[kind] = FixedTable(*self._most, self.device)
        self.tables[kind].fill(table)
        known, options = (kind, rows) in self.fixed, kind.options(self.dtype)
        if rows * kind.kv_heads >= 2 * self.processors:
            if not known:
                self.fixed[kind, rows] = self.tables[kind].whole(rows, self.workspace, kind, options)
            return
        if not known:
            self.fixed[kind, rows] = self.tables[kind].splitting(rows, self.workspace)
        host = [torch.from_numpy(words) for words in table]
        if known:
            options["global_override_indptr_cpu"] = host[0]
        self.fixed[kind, rows].plan(*host, *kind.sizes, quickly=known, **options)


class FlashInferPlan:
    """One batch: rows 0 .. decodes-1 have one token each, the others any number."""

    def __init__(self, backend: FlashInferBackend, batch: Batch) -> None:
        self._backend, self._batch = backend, batch
        self._ready: set[Kind] = set()
        self._decodes = leading_decodes(batch)

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
        split, end = self._decodes, self._batch.query_starts_cpu[-1]
        scales = {} if kv_scales is None else {"k_scale": kv_scales[0], "v_scale": kv_scales[1]}
        decode, prefill = self._backend.wrappers[kind]
        if self._batch.fixed:
            decode = self._backend.fixed[kind, split]
        if split:
            decode.run(query[:split], paged, out=out[:split], **scales)
        if end > split:
            prefill.run(query[split:end], paged, out=out[split:end], **scales)
        return out

    def prepare(self, kind: Kind) -> None:
        """Plan the batch for one kind of layer."""
        if kind not in self._backend.wrappers:
            self._backend.meet(kind)
        self._ready.add(kind)
        if self._batch.fixed:
            self._backend.plan_fixed(kind, self._batch)
            return
        decode, prefill = self._backend.wrappers[kind]
        starts, split, rows = self._batch.query_starts_cpu, self._decodes, len(self._batch.kv_lengths_cpu)
        options = kind.options(self._backend.dtype)
        if split:
            decode.plan(*self._table(range(split), kind), *kind.sizes, **options)
        if rows > split:
            queries = torch.tensor([start - split for start in starts[split:]], dtype=torch.int32)
            longest = int(np.diff(starts[split:]).max())
            table = self._table(range(split, rows), kind)
            prefill.plan(queries, *table, *kind.sizes, causal=True, max_token_per_sequence=longest, **options)

    def _table(self, rows: range, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
        found = pages(self._batch, rows, kind.window, kind.block_size)
        device = self._backend.device
        indices = on_its_way(found.indices, device).to(device, non_blocking=True)
        return on_its_way(found.indptr, device), indices, on_its_way(found.last_page_len, device)
