# SPDX-License-Identifier: Apache-2.0
"""Bytes of a KV block are those of the cache that holds it, and a budget holds as many as it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import CapacityError
from phalanx.models.batch import LayerCache
from phalanx.plan.memory import INT8_KV, KvSpec, block_bytes, blocks_in

SPECS = st.lists(
    st.builds(KvSpec, st.integers(1, 4), st.sampled_from([8, 10, 64]), st.sampled_from([2, 4])), min_size=1, max_size=4
)


@given(SPECS, st.integers(1, 32))
def test_a_block_takes_what_its_cache_takes(specs: list[KvSpec], block_size: int) -> None:
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    caches = [LayerCache.zeros(3, block_size, s.heads, s.head_dim, dtypes[s.itemsize], torch.device("cpu")) for s in specs]
    assert 3 * block_bytes(specs, block_size) == sum(cache.key.nbytes + cache.value.nbytes for cache in caches)


@given(st.integers(1, 4), st.sampled_from([8, 10, 64]), st.integers(1, 32))
def test_a_block_in_int8_takes_what_its_values_and_scales_take(heads: int, head_dim: int, block_size: int) -> None:
    cache = LayerCache.zeros(3, block_size, heads, head_dim, torch.int8, torch.device("cpu"))
    spec = KvSpec(heads, head_dim, INT8_KV.itemsize, scale_bytes=INT8_KV.scale_bytes)
    assert 3 * block_bytes([spec], block_size) == cache.nbytes


@given(SPECS, st.integers(1, 32), st.integers(1, 50), st.integers(0, 100))
def test_a_budget_holds_whole_blocks(specs: list[KvSpec], block_size: int, count: int, rest: int) -> None:
    one = block_bytes(specs, block_size)
    assert blocks_in(count * one + min(rest, one - 1), specs, block_size, what="kv_cache_bytes") == count


def test_a_budget_that_holds_none_says_what_would_do() -> None:
    specs = [KvSpec(2, 64, 2)] * 3
    with pytest.raises(CapacityError) as caught:
        blocks_in(24_575, specs, 16, what="kv_cache_bytes")
    assert "kv_cache_bytes gives the KV cache 24,575 bytes" in str(caught.value)
    assert "24,576 bytes" in str(caught.value)
    assert blocks_in(24_576, specs, 16, what="kv_cache_bytes") == 1
