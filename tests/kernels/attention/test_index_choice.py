# SPDX-License-Identifier: Apache-2.0
"""The kernels that choose the keys of sparse attention: in Triton's interpreter against plain torch, compiled, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.attention import dispatch, indexer
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_interpreted import interpret
from tests.support.kernels_sparse import UNTOUCHED, best_slots

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check(
    lengths: list[int], count: int, *, heads: int = 4, dim: int = 24, block_size: int = 4, fp8: bool = False, device: str = "cpu"
) -> None:  # fmt: skip
    """Rows of these lengths over blocks in another order; what no row has is NaN."""
    generator = torch.Generator().manual_seed(sum(lengths))
    used = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(used), generator=generator) + 1).tolist()
    tables = torch.zeros(len(lengths) + 1, max(used) + 2, dtype=torch.int32)
    stored = torch.full((sum(used) + 1, block_size, 1, dim), float("nan"))
    cache = stored.to(torch.float8_e4m3fn) if fp8 else stored
    scales = torch.full((sum(used) + 1, block_size, 1, 1), float("nan")) if fp8 else None
    rows = torch.tensor([len(lengths) - row for row in range(len(lengths))])
    slots = []
    for row, length in enumerate(lengths):
        own = [order.pop() for _ in range(used[row])]
        tables[rows[row], : used[row]] = torch.tensor(own, dtype=torch.int32)
        slots.append(torch.tensor([own[at // block_size] * block_size + at % block_size for at in range(length)]))
        keys = torch.randint(-2, 3, (length, 1, dim), generator=generator).float()  # many scores are equal, and exact in any order
        indexer.store_index_keys(keys, cache, scales, slots[-1])
    query = torch.randint(-2, 3, (len(lengths), heads, dim), generator=generator).float()
    weights = torch.randint(-2, 3, (len(lengths), heads), generator=generator).float()
    if fp8:
        assert scales is not None
        scales.fill_(0.5)
    every = [query, weights, cache, scales, tables, rows, torch.tensor(lengths, dtype=torch.int32)]
    arguments = [each if each is None else each.to(device) for each in every]
    chosen, expected = torch.full((2, len(lengths), count), UNTOUCHED, dtype=torch.int32, device=device)
    dispatch.best_slots(*arguments, chosen)
    best_slots(*arguments, expected)
    assert torch.equal(chosen, expected)


def check_lengths() -> None:
    check([1, 7, 8, 9, 70, 300], 8)


def check_longer_than_a_scan() -> None:
    check([4095, 4096, 4097, 9000], 100, block_size=16)


def check_more_tiles_than_programs() -> None:
    """Each program scores several tiles of its row."""
    from phalanx.kernels.attention import index_choice

    index_choice.SCORE_PROGRAMS = 5
    check([1, 130, 700, 64], 12)


def check_fp8() -> None:
    check([5, 90], 20, fp8=True, heads=20)


CHECKS = (check_lengths, check_longer_than_a_scan, check_fp8, check_more_tiles_than_programs)


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    """For DeepSeek-V3.2, over a cache in bf16 and in FP8."""
    from phalanx.kernels.attention.index_choice import SCAN, SCAN_WARPS, _best_slots, _index_scores

    kinds = {
        "query": "*bf16", "weights": "*fp32", "keys": "*bf16", "scales": "*fp32", "tables": "*i32", "table_rows": "*i64",
        "lengths": "*i32", "out": "*fp32", "scores": "*fp32",
        **dict.fromkeys(("heads", "count", "query_stride", "weights_stride", "table_stride", "out_stride", "score_stride"), "i32"),
    }  # fmt: skip
    sizes = {"HEADS": 64, "DIM": 128, "WIDTH": 128, "BLOCK_SIZE": 64, "TILE": 64, "SM": arch}
    aligned = ["query", "keys", "query_stride"]
    for extra, cached in (({"scales": None}, "*bf16"), ({}, "*u8")):
        compiled = compiled_as(_index_scores, {**kinds, "keys": cached}, {**sizes, **extra}, arch, aligned=aligned, num_warps=4)
        assert spilled(compiled) == 0
    chosen = compiled_as(_best_slots, {**kinds, "out": "*i32"}, {"BLOCK_SIZE": 64, "SCAN": SCAN}, arch, num_warps=SCAN_WARPS)
    assert spilled(chosen) == 0


@pytest.mark.gpu1
@pytest.mark.parametrize("count", [8, 2048])
def test_on_a_gpu(count: int) -> None:
    check([1, 9, 2047, 2048, 2049, 30_000], count, heads=64, dim=128, block_size=16, device="cuda")
    check([3000, 20], count, heads=64, dim=128, fp8=True, device="cuda")
