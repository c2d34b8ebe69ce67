# SPDX-License-Identifier: Apache-2.0
"""Decode rows by one kernel, prefill rows by another one or another back end; and fixed batches, which are planned once.

The kernels' references stand in for them; the kernels' own tests check that these agree.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.attention.heuristics import SHORT_KV, SplitKvWorkspace
from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, GpuCapabilities, simulated
from phalanx.models.batch import Batch, count_leading_decodes
from phalanx.models.layers.attention import select, triton
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.attention.triton import TritonBackend
from tests.support.models_attention import as_read, as_read_int8, in_fp8, in_int8, made_batch, naive

pytestmark = pytest.mark.usefixtures("forked_python")

CPU = torch.device("cpu")


class Watched(SdpaBackend):
    """Records the batches that it plans."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[Batch] = []

    def plan(self, batch: Batch) -> Any:
        self.planned.append(batch)
        return super().plan(batch)


@pytest.fixture
def shorts() -> list[bool]:
    """Of each launch, whether its rows are short."""
    return []


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, shorts: list[bool]) -> list[int]:
    """The number of rows of each launch, negative where lengths are read early."""
    rows: list[int] = []

    def stand_in(
        query: Tensor,
        *inputs: Any,
        workspace: Any,
        short: bool,
        splits: Tensor | None,
        early_lengths: bool,
        out: Tensor,
        **options: Any,
    ) -> Tensor:
        shorts.append(short)
        rows.append(-len(query) if early_lengths else len(query))
        assert query.is_contiguous()
        return out.copy_(reference.decode_attention(query, *inputs, **options))

    monkeypatch.setattr(triton.kernels, "decode_attention", stand_in)
    return rows


@pytest.fixture(autouse=True)
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Of each launch for prefill rows, their number, negative where lengths are read early, and their tiles. Their mean length is
    what the host knows of them."""
    calls: list[tuple[int, int | None]] = []

    def stand_in(
        query: Tensor, *inputs: Any, tiles: int | None, mean_length: int | None, early_lengths: bool, batch_invariant: bool,
        workspace: SplitKvWorkspace, **options: Any,
    ) -> Tensor:  # fmt: skip
        calls.append((-len(inputs[-1]) if early_lengths else len(inputs[-1]), tiles))
        assert mean_length == (None if early_lengths else int(inputs[-1].sum()) // len(inputs[-1]))
        return reference.prefill_attention(query, *inputs, **options)

    monkeypatch.setattr(triton.kernels, "prefill_attention", stand_in)
    return calls


def indirect(batch: Batch) -> None:
    """The batch's tables among those of other slots."""
    rows, width = batch.block_tables.shape
    tables = torch.full((rows + 3, width), 10**6, dtype=torch.int32)
    batch.table_rows = torch.arange(rows + 2, 2, -1)
    tables[batch.table_rows] = batch.block_tables
    batch.block_tables = tables


def compare(
    out: Tensor, query: Tensor, batch: Batch, rows: list[tuple[int, int]], keys: list[Tensor], values: list[Tensor],
    window: int | None,
) -> None:  # fmt: skip
    for row, (before, _) in enumerate(rows):
        here = slice(batch.query_starts_cpu[row], batch.query_starts_cpu[row + 1])
        torch.testing.assert_close(out[here], naive(query[here], keys[row], values[row], before, window, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("through_rows", [False, True])
@pytest.mark.parametrize("rows", [[(7, 1), (30, 1)], [(0, 9), (11, 6)], [(7, 1), (16, 1), (0, 9), (5, 1), (11, 6)], [(0, 1)]])
def test_each_row_by_its_kind(
    rows: list[tuple[int, int]], through_rows: bool, window: int | None, launched: list[int]
) -> None:  # fmt: skip
    batch, cache, keys, values = made_batch(rows, window, padding=2)
    if through_rows:
        indirect(batch)
    query, others = torch.randn(batch.token_ids.shape[0], 6, 8), Watched()
    plan = TritonBackend(others, CPU).plan(batch)
    for _ in range(2):
        out = plan.forward(query, cache, window=window, scale=0.3)
        assert out.shape == query.shape
        compare(out, query, batch, rows, keys, values, window)
    first = next((at for at, (_, now) in enumerate(rows) if now > 1), len(rows))
    assert launched == [first] * 2 * bool(first)
    assert [len(each.kv_lengths_cpu) for each in others.planned] == [len(rows) - first] * (first < len(rows))


@pytest.mark.parametrize("window", [None, 5])
def test_where_batches_must_not_matter_one_kernel_takes_all_rows(
    window: int | None, launched: list[int], prefilled: list[tuple[int, int | None]]
) -> None:  # fmt: skip
    rows = [(7, 1), (16, 1), (0, 9)]
    batch, cache, keys, values = made_batch(rows, window)
    query = torch.randn(11, 6, 8)
    out = TritonBackend(Watched(), CPU, "all", batch_invariant=True).plan(batch).forward(query, cache, window=window, scale=0.3)
    compare(out, query, batch, rows, keys, values, window)
    assert launched == []
    assert [count for count, _ in prefilled] == [3]


def test_a_batch_of_both_kinds_is_free_when_its_plan_is_taken_away() -> None:
    """Without waiting for Python's cycle collector."""
    batch, cache, _, _ = made_batch([(7, 1), (0, 9)], None)
    batch.attention = TritonBackend(SdpaBackend(), CPU).plan(batch)
    batch.attention.forward(torch.randn(10, 6, 8), cache, window=None, scale=0.3)
    plan = weakref.ref(batch.attention)
    gc.disable()
    try:
        batch.attention = None
        assert plan() is None
    finally:
        gc.enable()


def test_a_cache_in_fp8() -> None:
    rows, scales = [(7, 1), (0, 9)], (0.25, 0.03)
    batch, cache, keys, values = made_batch(rows, None)
    query = torch.randn(10, 6, 8)
    out = (
        TritonBackend(SdpaBackend(), CPU)
        .plan(batch)
        .forward(query, in_fp8(cache, scales), window=None, scale=0.3, kv_scales=scales)
    )
    read = [[as_read(each, scale) for each in kept] for kept, scale in zip((keys, values), scales, strict=True)]
    compare(out, query, batch, rows, *read, None)


def test_a_cache_in_int8(prefilled: list[tuple[int, int | None]]) -> None:
    """Of which our kernel takes the prefill rows, too, where others would take those in 16 bit."""
    rows = [(7, 1), (0, 9)]
    batch, cache, keys, values = made_batch(rows, None)
    query, others = torch.randn(10, 6, 8), Watched()
    out = TritonBackend(others, CPU, "quantized").plan(batch).forward(query, in_int8(cache), window=None, scale=0.3)
    compare(out, query, batch, rows, list(map(as_read_int8, keys)), list(map(as_read_int8, values)), None)
    assert not others.planned
    assert len(prefilled) == 1


def test_a_fixed_batch_is_planned_once_for_all_replays(launched: list[int]) -> None:
    """Its tensors change, and the values on the host at its plan do not count."""
    later, cache, keys, values = made_batch([(9, 1), (30, 1)], None)
    indirect(later)
    batch, _, _, _ = made_batch([(0, 1), (0, 1)], None)
    batch.fixed, batch.decodes, batch.block_tables_cpu = True, 2, None
    batch.block_tables, batch.table_rows = torch.zeros_like(later.block_tables), torch.zeros(2, dtype=torch.int64)
    others = Watched()
    triton_backend = TritonBackend(others, CPU)
    plan = triton_backend.plan(batch)
    query = torch.randn(2, 6, 8)
    plan.forward(query, cache, window=None, scale=0.3)
    for name in ("block_tables", "table_rows", "kv_lengths"):
        getattr(batch, name).copy_(getattr(later, name))
    compare(plan.forward(query, cache, window=None, scale=0.3), query, batch, [(9, 1), (30, 1)], keys, values, None)
    assert others.planned == []
    assert launched == [-2, -2]


OTHERS = [(7, 1), (16, 1), (0, 9), (5, 1), (11, 50)]
"""Rows by (tokens before, tokens): three of them, of 9, 1 and 50 tokens, for 3 query heads per KV head, have 1, 1 and 2 tiles."""


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("through_rows", [False, True])
@pytest.mark.parametrize(("own", "fp8", "taken"), [
    ("none", False, False), ("none", True, False), ("quantized", False, False), ("quantized", True, True), ("all", False, True),
    ("all", True, True),
])  # fmt: skip
def test_who_attends_to_prefill_rows(
    own: Any, fp8: bool, taken: bool, through_rows: bool, window: int | None, launched: list[int],
    prefilled: list[tuple[int, int | None]],
) -> None:  # fmt: skip
    batch, cache, keys, values = made_batch(OTHERS, window, padding=2)
    scales = (0.25, 0.03) if fp8 else None
    if scales is not None:
        cache = in_fp8(cache, scales)
        keys, values = ([as_read(each, scale) for each in kept] for kept, scale in zip((keys, values), scales, strict=True))
    if through_rows:
        indirect(batch)
    query, others = torch.randn(batch.token_ids.shape[0], 6, 8), Watched()
    plan = TritonBackend(others, CPU, own).plan(batch)
    for _ in range(2):
        out = plan.forward(query, cache, window=window, scale=0.3, kv_scales=scales)
        compare(out, query, batch, OTHERS, keys, values, window)
    assert launched == [2, 2]
    assert prefilled == ([(3, 4)] * 2 if taken else [])
    assert len(others.planned) == (not taken)


@pytest.mark.parametrize("window", [None, 5])
def test_a_fixed_batch_of_any_rows_is_planned_once(
    window: int | None, launched: list[int], prefilled: list[tuple[int, int | None]]
) -> None:  # fmt: skip
    """At most 20 decode rows and 5 prefill rows; each replay has other rows."""
    tokens, decodes, prompts, others = 200, 20, 5, Watched()
    rows = decodes + prompts
    triton_backend = TritonBackend(others, CPU, "quantized")
    assert triton_backend.captures_prefill
    assert not TritonBackend(others, CPU).captures_prefill
    batch, _, _, _ = made_batch([(0, 1)], None)
    batch.fixed, batch.decodes, batch.block_tables_cpu, batch.kv_lengths_cpu = True, decodes, None, [1] * rows
    batch.block_tables, batch.table_rows = torch.zeros(8, 60, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    batch.query_starts, batch.kv_lengths = (torch.zeros(count, dtype=torch.int32) for count in (rows + 1, rows))
    plan, query = triton_backend.plan(batch), torch.randn(tokens, 6, 8)
    for kinds in (OTHERS, OTHERS[2:], OTHERS[:2], [(3, 4), (0, 1)]):
        now, cache, keys, values = made_batch(kinds, window)
        leading, count = count_leading_decodes(now.query_starts_cpu), len(kinds)
        at = [*range(leading), *range(decodes, decodes + count - leading)]
        batch.block_tables[:count, : now.block_tables.shape[1]] = now.block_tables
        batch.table_rows.zero_()
        batch.table_rows[at] = torch.arange(count)
        batch.kv_lengths.zero_()
        batch.kv_lengths[at] = now.kv_lengths
        starts = [min(row, leading) for row in range(decodes)] + now.query_starts_cpu[leading:]
        batch.query_starts[:] = torch.tensor(starts + starts[-1:] * (rows + 1 - len(starts)))
        out = plan.forward(query, cache, window=window, scale=0.3)
        compare(out, query, now, kinds, keys, values, window)
    assert others.planned == []
    assert launched == [-20] * 4
    assert prefilled == [(-5, None)] * 4


def test_splits_are_planned_before_a_fixed_forward_and_read_early(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all layers of one kind that has run before. For other kinds they are planned late, and the kernel waits."""
    planned: list[tuple[int | None, int]] = []

    def plan_splits(kv_lengths: Tensor, table_rows: Tensor | None, spec: Any, workspace: Any, *, short: bool) -> Tensor:
        assert not short
        assert table_rows is not None
        planned.append((spec.window, len(kv_lengths)))
        return kv_lengths

    monkeypatch.setattr(triton.kernels, "plan_splits", plan_splits)
    batch, cache, _, _ = made_batch([(9, 1), (300, 1), (4, 3)], None)
    indirect(batch)
    batch.fixed, batch.decodes = True, 2
    triton_backend, query = TritonBackend(Watched(), CPU, "all"), torch.randn(5, 6, 8)
    plan = triton_backend.plan(batch)
    assert planned == []
    for window in (None, None, 5):
        plan.forward(query, cache, window=window, scale=0.3)
    assert sorted(planned, key=str) == [(5, 2), (None, 2)]
    assert launched == [2, -2, 2]
    planned.clear()
    launched.clear()
    plan = triton_backend.plan(batch)
    assert sorted(planned, key=str) == [(5, 2), (None, 2)]
    for window in (None, 5, None):
        plan.forward(query, cache, window=window, scale=0.3)
    assert len(planned) == 2
    assert launched == [-2, -2, -2]


@pytest.mark.parametrize(("length", "short"), [(SHORT_KV, True), (SHORT_KV + 1, False)])
def test_rows_are_short_by_their_lengths_on_the_host(length: int, short: bool, shorts: list[bool]) -> None:
    """Of decode rows, not of the prefill rows of other back ends; of fixed batches as `Batch.short` says."""
    rows = [(3, 1), (length - 1, 1), (SHORT_KV + 20, 2)]
    batch, cache, _, _ = made_batch(rows, None)
    TritonBackend(SdpaBackend(), CPU).plan(batch).forward(torch.randn(4, 6, 8), cache, window=None, scale=0.3)
    batch, cache, _, _ = made_batch(rows[:2], None)
    for batch.short in (False, True):
        batch.fixed, batch.decodes = True, 2
        TritonBackend(SdpaBackend(), CPU).plan(batch).forward(torch.randn(2, 6, 8), cache, window=None, scale=0.3)
    assert shorts == [short, False, True]


def test_few_rows_are_better_planned_as_short() -> None:
    """Once a layer has run; as many rows as half of the multiprocessors, of two KV heads each."""
    batch, cache, _, _ = made_batch([(7, 1)], None)
    triton_backend = TritonBackend(SdpaBackend(), CPU)
    triton_backend.workspace.num_sms = 40
    assert triton_backend.short_kv_limit(1) == 0
    triton_backend.plan(batch).forward(torch.randn(1, 6, 8), cache, window=None, scale=0.3)
    most = 40 // 2 // cache.key.shape[2]
    assert [triton_backend.short_kv_limit(rows) for rows in (1, most, most + 1, 500)] == [SHORT_KV, SHORT_KV, 0, 0]
    assert SdpaBackend().graphs is None


def test_which_back_end_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select.select_backend(CPU, torch.float32, 64).name == "sdpa"  # no kernel on CPU
    monkeypatch.setattr(select.kernels, "supports", lambda device, dtype, head_dim: head_dim == 64)
    monkeypatch.setattr(select.kernels, "supports_prefill", lambda device, dtype, head_dim: False)
    selected = select.select_backend(CPU, torch.float32, 64)
    assert isinstance(selected, TritonBackend)
    assert (selected.name, selected.own_prefill) == ("triton+sdpa", "none")
    assert select.select_backend(CPU, torch.float32, 72).name == "sdpa"
    monkeypatch.setattr(select.kernels, "supports_prefill", lambda device, dtype, head_dim: True)
    for name, own in (("sdpa", "all"), ("flashinfer", "quantized")):
        monkeypatch.setattr(Watched, "name", name)
        monkeypatch.setattr(select, "_fallback", lambda *arguments: Watched())
        selected = select.select_backend(CPU, torch.float32, 64)
        assert isinstance(selected, TritonBackend)
        assert selected.own_prefill == own
        assert selected.name == ("triton" if own == "all" else "triton+flashinfer")

    def imported(*arguments: Any) -> Watched:
        raise AssertionError("FlashInfer would take no row")

    monkeypatch.setattr(select, "_fallback", imported)
    for only in ({"cache_dtype": torch.float8_e4m3fn}, {"cache_dtype": torch.int8}, {"cache_dtype": torch.float32, "sinks": True}):
        selected = select.select_backend(CPU, torch.float32, 64, **only)
        assert (selected.name, selected.graphs is not None) == ("triton", True)
    with pytest.raises(AssertionError, match="no row"):
        select.select_backend(CPU, torch.float32, 64, cache_dtype=torch.bfloat16, windows=False)
    with simulated(GpuCapabilities(90, 132, HOPPER_SHARED_MEMORY)):
        selected = select.select_backend(CPU, torch.bfloat16, 64, cache_dtype=torch.bfloat16, windows=False)
        assert (selected.name, selected.graphs is not None) == ("triton", True)
        for others in ({"windows": True}, {"dtype": torch.float32}, {"block_size": 8}, {"block_size": 48}):
            with pytest.raises(AssertionError, match="no row"):
                select.select_backend(CPU, head_dim=64, **({"dtype": torch.bfloat16, "windows": False} | others))


def test_what_the_kernel_supports() -> None:
    from phalanx.kernels.attention.dispatch import supports

    cuda = torch.device("cuda")
    assert [supports(cuda, torch.bfloat16, dim) for dim in (64, 80, 256, 100, 512)] == [True, True, True, False, False]
    assert not supports(cuda, torch.float64, 64)
    assert not supports(CPU, torch.bfloat16, 64)


ABSENT = """
from tests.kernels.attention.test_decode import Case, check
from tests.support.kernels_interpreted import let_loops_begin_anywhere
let_loops_begin_anywhere()
for more in ({}, {"window": 7}, {"fp8": True}, {"tile": 64, "warps": 4, "cooperative": True}, {"extra_splits": 0}):
    check(Case([0, 33, 0, 90], 2, 4, 16, **more))
check(Case([0, 0], 1, 2, 16))
"""


def test_the_kernel_leaves_zeros_for_rows_that_are_not_there() -> None:
    """As its reference does, and without reading a key for them: keys that no row sees are NaN. In the interpreter, in its own
    process."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", ABSENT], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=1000,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
