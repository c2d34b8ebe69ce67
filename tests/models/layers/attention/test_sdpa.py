# SPDX-License-Identifier: Apache-2.0
"""Paged attention against the formula, row by row, for rows of every kind in one batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.models.layers.attention import sdpa
from phalanx.models.layers.attention.sdpa import bundles, query_chunks
from phalanx.models.layers.attention.select import select_backend
from tests.support.models_attention import BLOCK, CPU, as_read, as_read_int8, in_fp8, in_int8, made_batch, naive

ROWS = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(ROWS, st.one_of(st.none(), st.integers(1, 15)), st.sampled_from([64, 300, 1 << 24]), st.integers(0, 3))
def test_rows_of_every_kind(rows: list[tuple[int, int]], window: int | None, limit: int, padding: int) -> None:
    """Decode rows, prompts and chunks of prompts; any window; masks so small that rows are split."""
    batch, cache, keys, values = made_batch(rows, window, padding)
    query = torch.randn(batch.token_ids.shape[0], 6, 8, generator=torch.Generator().manual_seed(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sdpa.MASK_LIMITS, "cpu", limit)
        out = select_backend(CPU, torch.float32, 8).plan(batch).forward(query, cache, window=window, scale=0.4)
    assert out.shape == query.shape
    for row, (before, _) in enumerate(rows):
        here = slice(batch.query_starts_cpu[row], batch.query_starts_cpu[row + 1])
        expected = naive(query[here], keys[row], values[row], before, window, 0.4)
        torch.testing.assert_close(out[here], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "in_cache"), [(None, "fp32"), (5, "fp32"), (None, "fp8"), (5, "int8")])
def test_sinks_take_their_part_of_each_heads_softmax(window: int | None, in_cache: str) -> None:
    """As a key without a value does that all queries of a head see, whatever they are; one sink per query head."""
    rows = [(12, 1), (0, 9), (30, 6)]
    batch, cache, keys, values = made_batch(rows, window, 2)
    scales = None
    if in_cache == "fp8":
        scales = (0.5, 2.0)
        cache = in_fp8(cache, scales)
        keys, values = [as_read(key, 0.5) for key in keys], [as_read(value, 2.0) for value in values]
    elif in_cache == "int8":
        cache, keys, values = in_int8(cache), list(map(as_read_int8, keys)), list(map(as_read_int8, values))
    query = torch.randn(batch.token_ids.shape[0], 6, 8, generator=torch.Generator().manual_seed(4))
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0, -50.0, 60.0])
    plan = select_backend(CPU, torch.float32, 8).plan(batch)
    out = plan.forward(query, cache, window=window, scale=0.4, sinks=sinks, kv_scales=scales)
    for row, (before, count) in enumerate(rows):
        for at in range(count):
            token, begin = batch.query_starts_cpu[row] + at, 0 if window is None else max(0, before + at + 1 - window)
            for head in range(6):
                k, v = (each[row][begin : before + at + 1, head // 3] for each in (keys, values))
                weight = torch.cat((k @ query[token, head] * 0.4, sinks[head : head + 1])).softmax(0)[:-1]
                torch.testing.assert_close(out[token, head], weight @ v, rtol=1e-4, atol=1e-5)


def test_one_plan_serves_layers_with_different_windows() -> None:
    batch, cache, keys, values = made_batch([(9, 1), (0, 12)], None)
    query = torch.randn(13, 6, 8)
    plan = select_backend(CPU, torch.float32, 8).plan(batch)
    for window in (None, 5, None, 3):
        out = plan.forward(query, cache, window=window, scale=1.0)
        torch.testing.assert_close(out[:1], naive(query[:1], keys[0], values[0], 9, window, 1.0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[1:], naive(query[1:], keys[1], values[1], 0, window, 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", [None, (0.25, 0.03)])
def test_a_cache_in_fp8_is_converted_and_scaled(scales: tuple[float, float] | None) -> None:
    rows = [(9, 1), (0, 12)]
    batch, cache, keys, values = made_batch(rows, 5)
    query, used = torch.randn(13, 6, 8), scales or (1.0, 1.0)
    plan = select_backend(CPU, torch.float32, 8).plan(batch)
    out = plan.forward(query, in_fp8(cache, used), window=5, scale=0.7, kv_scales=scales)
    for row, here in ((0, slice(0, 1)), (1, slice(1, 13))):
        key, value = as_read(keys[row], used[0]), as_read(values[row], used[1])
        torch.testing.assert_close(out[here], naive(query[here], key, value, rows[row][0], 5, 0.7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_a_cache_in_int8_is_converted_and_scaled(window: int | None) -> None:
    rows = [(9, 1), (0, 12), (30, 3)]
    batch, cache, keys, values = made_batch(rows, window)
    query = torch.randn(16, 6, 8)
    out = select_backend(CPU, torch.float32, 8).plan(batch).forward(query, in_int8(cache), window=window, scale=0.7)
    for row, (before, count) in enumerate(rows):
        here = slice(batch.query_starts_cpu[row], batch.query_starts_cpu[row] + count)
        wanted = naive(query[here], as_read_int8(keys[row]), as_read_int8(values[row]), before, window, 0.7)
        torch.testing.assert_close(out[here], wanted, rtol=1e-5, atol=1e-5)


def test_many_decodes_are_one_call() -> None:
    """64 rows of similar length are one bundle; a long one among them does not pad the others."""
    starts = list(range(66))
    chunks = query_chunks(starts, [100 + row % 20 for row in range(64)] + [4000], None, 16, 1 << 24)
    assert sorted(len(members) for members in bundles(chunks, 16, 1 << 24)) == [1, 64]


@given(ROWS, st.one_of(st.none(), st.integers(1, 15)))
def test_chunks_cover_every_token_once(rows: list[tuple[int, int]], window: int | None) -> None:
    starts = [0, *itertools.accumulate(now for _, now in rows)]
    lengths = [before + now for before, now in rows]
    chunks = query_chunks(starts, lengths, window, BLOCK, 100)
    bundled = bundles(chunks, BLOCK, 100)
    assert [chunk.first_token + i for chunk in chunks for i in range(chunk.count)] == list(range(starts[-1]))
    assert sorted((c.row, c.first_token) for members in bundled for c in members) == [(c.row, c.first_token) for c in chunks]
    for chunk in chunks:
        last = chunk.first_position + chunk.count - 1
        assert chunk.first_block + chunk.blocks == last // BLOCK + 1
        assert chunk.first_block == (0 if window is None else max(0, chunk.first_position - window + 1) // BLOCK)
