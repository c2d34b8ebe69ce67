# SPDX-License-Identifier: Apache-2.0
"""The arguments that FlashInfer gets, checked by a stand-in that computes plainly by their documented meaning.

Tests on a GPU check that FlashInfer's own kernels agree.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.errors import ModelError
from tests.support.models_attention import as_read, in_fp8, in_int8, made_batch, naive


class _Wrapper:
    """The documented contract: page table as CSR, page_size, window_left (-1: all), causal from the end."""

    count: int = 0

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"
        type(self).count += 1
        self.planned: tuple[Any, ...] | None = None

    def plan(
        self, queries: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, page_size: int, *, causal: bool, max_token_per_sequence: int, **options: Any,
    ) -> None:  # fmt: skip
        assert causal
        assert max_token_per_sequence == int((queries[1:] - queries[:-1]).max())
        assert {indptr.dtype, indices.dtype, last.dtype, queries.dtype} == {torch.int32}
        assert len(indptr) == len(last) + 1 == len(queries)
        assert len(indices) == indptr[-1]
        assert options["kv_data_type"] in (options["q_data_type"], torch.float8_e4m3fn)
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.planned = (queries, indptr, indices, last, sizes, options)

    def run(
        self, query: Tensor, paged: tuple[Tensor, Tensor], *, out: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> Tensor:
        assert self.planned is not None
        *tensors, (q_heads, kv_heads, head_dim, page_size), options = self.planned
        queries, indptr, indices, last = (each.tolist() for each in tensors)
        assert query.is_contiguous()
        assert query.shape == (queries[-1], q_heads, head_dim)
        assert all(part.shape[1:] == (page_size, kv_heads, head_dim) for part in paged)
        window = None if options["window_left"] == -1 else options["window_left"] + 1
        for row in range(len(last)):
            pages = indices[indptr[row] : indptr[row + 1]]
            length = (len(pages) - 1) * page_size + last[row]
            assert all(part.dtype == options["kv_data_type"] for part in paged)
            key, value = (part[pages].flatten(0, 1)[:length].to(query.dtype) for part in paged)
            here = slice(queries[row], queries[row + 1])
            before = length - (queries[row + 1] - queries[row])
            out[here] = naive(query[here], key * k_scale, value * v_scale, before, window, options["sm_scale"])
        return out


@pytest.fixture
def backend_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    stand_in = types.ModuleType("flashinfer")
    _Wrapper.count = 0
    stand_in.BatchPrefillWithPagedKVCacheWrapper = _Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    name = "phalanx.models.layers.attention.flashinfer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("rows", [[(7, 1), (30, 1)], [(0, 9), (11, 6)], [(7, 1), (16, 1), (0, 9), (5, 1), (11, 6)]])
def test_pages_and_windows(rows: list[tuple[int, int]], window: int | None, backend_module: types.ModuleType) -> None:
    """Decode rows alone, prefill rows alone, both; table entries behind the window lead to NaN."""
    batch, cache, keys, values = made_batch(rows, window, padding=2)
    query = torch.randn(batch.token_ids.shape[0], 6, 8)
    out = (
        backend_module.FlashInferBackend(torch.device("cpu"), torch.float32)
        .plan(batch)
        .forward(query, cache, window=window, scale=0.3)
    )
    for row, (before, _) in enumerate(rows):
        here = slice(batch.query_starts_cpu[row], batch.query_starts_cpu[row + 1])
        torch.testing.assert_close(out[here], naive(query[here], keys[row], values[row], before, window, 0.3), rtol=1e-5, atol=1e-5)


def test_after_the_first_forward_plan_does_all_planning(backend_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's forward then only launches, and wrappers are made once per kind of layer."""
    backend = backend_module.FlashInferBackend(torch.device("cpu"), torch.float32)
    batch, cache, _, _ = made_batch([(7, 1), (0, 9)], None)
    query = torch.randn(10, 6, 8)
    first = [backend.plan(batch).forward(query, cache, window=window, scale=0.3) for window in (None, 5)]
    assert _Wrapper.count == 2
    plan = backend.plan(batch)
    monkeypatch.setattr(backend_module.FlashInferPlan, "prepare", lambda *_: pytest.fail("planned in a forward"))
    again = [plan.forward(query, cache, window=window, scale=0.3) for window in (None, 5)]
    for left, right in zip(first, again, strict=True):
        torch.testing.assert_close(left, right)
    assert _Wrapper.count == 2


def test_a_cache_in_fp8_is_planned_as_such_and_scaled(backend_module: types.ModuleType) -> None:
    rows, scales = [(7, 1), (0, 9)], (0.25, 0.03)
    batch, cache, keys, values = made_batch(rows, None)
    query = torch.randn(10, 6, 8)
    plan = backend_module.FlashInferBackend(torch.device("cpu"), torch.float32).plan(batch)
    out = plan.forward(query, in_fp8(cache, scales), window=None, scale=0.3, kv_scales=scales)
    for row, here in ((0, slice(0, 1)), (1, slice(1, 10))):
        key, value = as_read(keys[row], scales[0]), as_read(values[row], scales[1])
        torch.testing.assert_close(out[here], naive(query[here], key, value, rows[row][0], None, 0.3), rtol=1e-5, atol=1e-5)


def test_a_cache_in_int8_is_an_error_with_the_next_move(backend_module: types.ModuleType) -> None:
    batch, cache, _, _ = made_batch([(7, 1), (0, 9)], None)
    plan = backend_module.FlashInferBackend(torch.device("cpu"), torch.float32).plan(batch)
    with pytest.raises(ModelError, match="a KV cache in int8 cannot be read by FlashInfer's kernels") as caught:
        plan.forward(torch.randn(10, 6, 8), in_int8(cache), window=None, scale=0.3)
    assert "install triton" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [(torch.bfloat16, 128, True), (torch.float16, 64, True), (torch.float32, 128, False), (torch.bfloat16, 80, False)],
)
def test_what_flashinfer_supports(dtype: torch.dtype, head_dim: int, expected: bool, backend_module: types.ModuleType) -> None:
    assert backend_module.supports(dtype, head_dim) is expected
