# SPDX-License-Identifier: Apache-2.0
"""The queries of sparse attention: which are dense, and that kernels choose and mix the same as plain torch, of eager and of fixed
batches; once with the kernels in Triton's interpreter, else with their references in their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention import sparse_rows
from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend
from phalanx.models.layers.attention.sparse_latent import SparseLatentBackend, divided
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend
from tests.support import kernels_sparse
from tests.support.kernels_interpreted import interpret

TOPK = 6
CPU = torch.device("cpu")


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    """rows: (queries, KV length); each has four blocks of its own."""
    starts = [0, *torch.tensor([count for count, _ in rows]).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length - count, length) for count, length in rows])
    tables = (torch.randperm(4 * len(rows), generator=torch.Generator().manual_seed(2)) + 1).view(-1, 4).int()
    at = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([count for count, _ in rows]))
    slots = tables[at, positions // 4].long() * 4 + positions % 4
    lengths = [length for _, length in rows]
    return Batch(
        torch.zeros(len(positions), dtype=torch.int64), positions, slots, torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32), tables, torch.arange(1), starts, lengths, table_rows=torch.arange(len(rows)),
    )  # fmt: skip


def fixed(batch: Batch, decodes: int) -> Batch:
    """As a graph has it: the host knows no lengths."""
    rows = len(batch.kv_lengths_cpu)
    return replace(batch, fixed=True, decodes=decodes, kv_lengths_cpu=[1] * rows, query_starts_cpu=list(range(rows + 1)))


def inputs_of(batch: Batch, fp8: bool = False) -> tuple[Tensor, LayerCache, dict[str, Any], list[IndexQuery]]:
    """query [T, 3, 6 + 8]; the cache of latents of rank 12 and of keys; options of `forward`; what two layers ask with."""
    generator = torch.Generator().manual_seed(4)
    blocks, count = int(batch.block_tables.max()) + 1, len(batch.token_ids)
    tensors = {"latent": (blocks, 4, 1, 12 + 8), "index_key": (blocks, 4, 1, 16)}
    cache = LayerCache({name: torch.randn(shape, generator=generator) for name, shape in tensors.items()})
    if fp8:
        cache.tensors["index_key"] = cache["index_key"].to(torch.float8_e4m3fn)
        cache.tensors["index_scale"] = torch.rand(blocks, 4, 1, 1, generator=generator) + 0.5
    query, up = torch.randn(count, 3, 6 + 8, generator=generator), torch.randn(3, 6 + 5, 12, generator=generator)
    index = [
        IndexQuery(torch.randn(count, 8, 16, generator=generator), torch.randn(count, 8, generator=generator)) for _ in range(2)
    ]
    return query, cache, {"up": up, "scale": 0.2}, index


def kernels_backend() -> SparseLatentBackend:
    return SparseLatentBackend(TritonLatentBackend(CPU, own_prefill=True, most_tokens=8192), TOPK)


def check_plan(backend: SparseLatentBackend, batch: Batch, graph: Batch, tokens: int | None = None, *, fp8: bool = False) -> None:
    """Outputs of three layers, the last of which uses what the second one chose, are those of plain torch for the first `tokens`.
    graph: the batch as `backend` plans it."""
    query, cache, options, index = inputs_of(graph, fp8)
    plain, plan = SparseLatentBackend(SdpaLatentBackend(), TOPK).plan(batch), backend.plan(graph)
    own = len(batch.token_ids)
    for queries in (*index, None):
        first = None if queries is None else IndexQuery(queries.query[:own], queries.weights[:own])
        expected = plain.forward(query[:own], cache, index=first, **options)
        output = plan.forward(query, cache, index=queries, **options)
        torch.testing.assert_close(output[:tokens], expected[:tokens], rtol=1e-4, atol=1e-4)


def test_a_query_is_dense_up_to_topk_tokens() -> None:
    short, long = divided(batch_of([(1, 6), (1, 7), (5, 9), (2, 3), (3, 16)]), TOPK)
    assert short is not None
    assert long is not None
    assert short.tokens is not None
    assert long.tokens is not None
    assert short.tokens.tolist() == [0, 2, 3, 7, 8]
    assert (short.batch.query_starts_cpu, short.batch.kv_lengths_cpu) == ([0, 1, 3, 5], [6, 6, 3])
    assert short.batch.kv_lengths.tolist() == [6, 6, 3]
    assert long.tokens.tolist() == [1, 4, 5, 6, 9, 10, 11]
    assert (long.batch.query_starts_cpu, long.batch.kv_lengths_cpu) == ([0, 1, 4, 7], [7, 9, 16])
    assert long.batch.kv_lengths.tolist() == [7, 9, 16]
    assert long.batch.positions.tolist() == [6, 6, 7, 8, 13, 14, 15]
    batch = batch_of([(1, 6)])
    assert divided(batch, TOPK) == ((None, batch), None)
    batch = batch_of([(1, 7), (3, 16)])
    assert divided(batch, TOPK) == (None, (None, batch))


def test_lengths_of_a_part_are_those_on_the_device() -> None:
    """Of a row behind drafts the host knows at most how long it is."""
    batch = batch_of([(1, 5), (1, 9), (4, 9)])
    batch.kv_lengths_cpu = [9, 12, 9]
    batch.query_starts_cpu = [0, 1, 2, 6]
    short, long = divided(batch, TOPK)
    assert short is not None
    assert long is not None
    assert (short.batch.kv_lengths.tolist(), long.batch.kv_lengths.tolist()) == ([6], [5, 9, 9])


EAGER = ([(1, 7), (5, 9), (3, 16)], [(1, 9), (1, 16)], [(1, 3), (1, 9), (4, 4)], [(9, 14)])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", EAGER)
def test_kernels_mix_the_same_as_plain_torch(rows: list[tuple[int, int]], fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_sparse.put_references(monkeypatch)
    monkeypatch.setattr(sparse_rows, "KERNEL_ROWS", 2)
    monkeypatch.setattr(sparse_rows, "SCORES_BYTES", 3 * 16 * 4)
    batch = batch_of(rows)
    check_plan(kernels_backend(), batch, batch, fp8=fp8)


def check_fixed_decodes() -> None:
    """Some see more tokens than are chosen, some no more; a graph's padding is a row of length 1."""
    batch = batch_of([(1, 3), (1, 9), (1, 6), (1, 16), (1, 1)])
    batch.kv_slots[4] = -1
    check_plan(kernels_backend(), batch, fixed(batch, 5))


def check_fixed_rows_of_any_kind() -> None:
    """Two decode rows, one of them absent; two prompts; two tokens of padding."""
    batch = batch_of([(1, 9), (3, 5), (4, 9)])
    graph = batch_of([(1, 9), (3, 5), (4, 9), (2, 2)])
    graph = replace(
        graph, fixed=True, decodes=2, query_starts=torch.tensor([0, 1, 1, 4, 8], dtype=torch.int32),
        query_starts_cpu=[0, 1, 2, 10, 10], kv_lengths=torch.tensor([9, 0, 5, 9], dtype=torch.int32), kv_lengths_cpu=[1] * 4,
        table_rows=torch.tensor([0, 0, 1, 2]),
    )  # fmt: skip
    batch = replace(batch, block_tables=graph.block_tables, kv_slots=graph.kv_slots[:8])
    graph.kv_slots[8:] = -1
    check_plan(kernels_backend(), batch, graph, 8)


def check_eager_rows() -> None:
    batch = batch_of(EAGER[0])
    check_plan(kernels_backend(), batch, batch)


CHECKS = (check_eager_rows, check_fixed_decodes, check_fixed_rows_of_any_kind)


@pytest.mark.parametrize("check", CHECKS)
def test_batches_with_references(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_sparse.put_references(monkeypatch)
    check()


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


def test_a_graph_of_short_rows_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = kernels_sparse.put_references(monkeypatch)
    backend, batch = kernels_backend(), batch_of([(1, 3), (1, 6)])
    assert backend.graphs is backend
    assert backend.short_kv_limit(2) == TOPK
    check_plan(backend, batch, replace(fixed(batch, 2), short=True))
    assert calls == [("dense", 2)] * 3
    assert SparseLatentBackend(SdpaLatentBackend(), TOPK).graphs is None
