# SPDX-License-Identifier: Apache-2.0
"""Bytes of a KV block are those of the cache that holds it, and a budget holds as many as it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import CapacityError
from phalanx.layout.cache import Cache, CacheTensor, request_bytes
from phalanx.layout.memory import block_bytes, blocks_in
from phalanx.models.cache import empty_caches

TENSORS = st.builds(
    CacheTensor, st.uuids().map(str), st.tuples(st.integers(1, 4), st.sampled_from([8, 10, 64])),
    st.sampled_from(["fp8", "int8", "bf16", "fp32"]), st.sampled_from(["token", "request"]), token_dim=st.integers(0, 1),
)  # fmt: skip
CACHES = st.lists(st.lists(TENSORS, max_size=3).map(tuple), min_size=1, max_size=4)


@given(CACHES, st.integers(1, 32), st.integers(1, 5))
def test_blocks_and_slots_take_what_the_caches_take(caches: list[Cache], block_size: int, slots: int) -> None:
    allocated = empty_caches(caches, 3, block_size, torch.device("cpu"), slots=slots)
    assert 3 * block_bytes(caches, block_size) + slots * request_bytes(caches) == sum(cache.nbytes for cache in allocated)


@given(CACHES, st.integers(1, 32), st.integers(1, 50), st.integers(0, 100), st.integers(0, 5))
def test_a_budget_holds_whole_blocks_beside_the_state_of_requests(
    caches: list[Cache], block_size: int, count: int, rest: int, slots: int
) -> None:
    one, state = block_bytes(caches, block_size), slots * request_bytes(caches)
    budget = state + count * one + min(rest, max(one - 1, 0))
    blocks = blocks_in(budget, caches, block_size, states=slots, usable=77, what="kv_cache_bytes")
    assert blocks == (count if one else 77)


def test_a_budget_that_holds_none_says_what_would_do() -> None:
    caches = [(CacheTensor("key", (2, 64), "bf16"), CacheTensor("value", (2, 64), "bf16"))] * 3
    with pytest.raises(CapacityError) as caught:
        blocks_in(24_575, caches, 16, states=8, usable=1, what="kv_cache_bytes")
    assert "kv_cache_bytes gives the KV cache 24,575 bytes" in str(caught.value)
    assert "24,576 bytes" in str(caught.value)
    assert blocks_in(24_576, caches, 16, states=8, usable=1, what="kv_cache_bytes") == 1
    state = [*caches, (CacheTensor("state", (2, 64), "fp32", "request"),)]
    with pytest.raises(CapacityError, match=r"4,096 bytes of 8 states of requests and prefixes; give at least 28,672 .*max_batch"):
        blocks_in(28_671, state, 16, states=8, usable=1, what="kv_cache_bytes")
