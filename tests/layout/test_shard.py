# SPDX-License-Identifier: Apache-2.0
"""Slices cover their dim once; every query head meets its own KV head; what does not divide names what does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.errors import LayoutError
from phalanx.layout import shard


@given(st.integers(1, 12), st.integers(1, 8))
def test_even_slices_cover_a_dim_once(part: int, tp: int) -> None:
    slices = [shard.even("intermediate_size", part * tp, tp, index) for index in range(tp)]
    assert [row for one in slices for row in one] == list(range(part * tp))


def test_a_size_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(LayoutError) as caught:
        shard.even("intermediate_size", 12, 5, 0)
    assert "tensor_parallel_size=5" in str(caught.value)
    assert "intermediate_size=12" in str(caught.value)
    assert "1, 2, 3, 4, 6, 12" in str(caught.value)


@given(st.integers(1, 200_000), st.integers(1, 16))
def test_the_vocabulary_is_padded_evenly(size: int, tp: int) -> None:
    slices = [shard.vocabulary(size, tp, index) for index in range(tp)]
    assert len({len(one) for one in slices}) == 1
    assert len(slices[0]) % shard.VOCAB_PADDING == 0
    assert slices[0].start == 0
    assert all(left.stop == right.start for left, right in itertools.pairwise(slices))
    assert size <= slices[-1].stop < size + shard.VOCAB_PADDING * tp


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 32))
def test_every_query_head_meets_its_kv_head(kv_heads: int, group: int, tp: int) -> None:
    query_heads = kv_heads * group
    assume(query_heads % tp == 0)
    shards = [shard.heads(query_heads, kv_heads, tp, index) for index in range(tp)]
    assert [head for rank in shards for head in rank.q] == list(range(query_heads))
    for rank in shards:
        each = len(rank.q) // len(rank.kv)
        assert each * len(rank.kv) == len(rank.q)
        for local, head in enumerate(rank.q):
            assert rank.kv[local // each] == head // group
    assert len({len(rank.kv) for rank in shards}) == 1
    if kv_heads % tp == 0:
        assert [head for rank in shards for head in rank.kv] == list(range(kv_heads))
    if tp % kv_heads == 0:
        assert all(len(rank.kv) == 1 for rank in shards)


def test_head_counts_that_cannot_be_split_are_named() -> None:
    with pytest.raises(LayoutError, match="num_attention_heads=12"):
        shard.heads(12, 4, 5, 0)
    with pytest.raises(LayoutError, match="num_key_value_heads=5"):
        shard.heads(12, 5, 2, 0)
