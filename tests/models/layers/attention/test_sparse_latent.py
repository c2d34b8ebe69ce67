# SPDX-License-Identifier: Apache-2.0
"""The queries of sparse attention: which are dense, and the same choice by kernels, in Triton's interpreter, as by plain torch."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.attention.indexer import IndexQuery
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.sdpa_latent import SdpaLatentBackend
from phalanx.models.layers.attention.sparse_latent import SparseLatentBackend, divided
from tests.support.kernels_interpreted import interpreted, let_loops_begin_anywhere

TOPK = 6


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


def test_a_query_is_dense_up_to_topk_tokens() -> None:
    short, long = divided(batch_of([(1, 6), (1, 7), (5, 9), (2, 3), (3, 16)]), TOPK)
    assert short is not None
    assert long is not None
    assert short.tokens.tolist() == [0, 2, 3, 7, 8]
    assert (short.batch.query_starts_cpu, short.batch.kv_lengths_cpu) == ([0, 1, 3, 5], [6, 6, 3])
    assert long.tokens.tolist() == [1, 4, 5, 6, 9, 10, 11]
    assert (long.batch.query_starts_cpu, long.batch.kv_lengths_cpu) == ([0, 1, 4, 7], [7, 9, 16])
    assert long.batch.positions.tolist() == [6, 6, 7, 8, 13, 14, 15]
    assert divided(batch_of([(1, 6)]), TOPK)[1] is None


def check_kernels_choose_the_same() -> None:
    generator = torch.Generator().manual_seed(4)
    for rows in ([(1, 7), (5, 9), (3, 16)], [(1, 9), (1, 16)]):
        batch = batch_of(rows)
        cache = LayerCache({"index_key": torch.randn(4 * len(rows) + 1, 4, 1, 16, generator=generator)})
        plan = SparseLatentBackend(SdpaLatentBackend(), TOPK).plan(batch)
        _, long = divided(batch, TOPK)
        assert long is not None
        count = len(long.tokens)
        index = IndexQuery(torch.randn(count, 8, 16, generator=generator), torch.randn(count, 8, generator=generator))
        assert torch.equal(plan.choose_by_kernel(index, cache), plan.choose(index, cache))


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert interpreted("tests.models.layers.attention.test_sparse_latent").split() == ["check_kernels_choose_the_same"]


if __name__ == "__main__":
    let_loops_begin_anywhere()
    check_kernels_choose_the_same()
    print("check_kernels_choose_the_same")
