# SPDX-License-Identifier: Apache-2.0
"""Prefix keys, and the longest beginning that is still held, with and without a window."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.blocks import BlockPool
from phalanx.engine.prefix import block_key, extend_keys, longest_hit


def keys_of(tokens: list[int], size: int) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, size, len(tokens) // size)
    return keys


def test_a_key_depends_on_every_token_before_it() -> None:
    tokens = list(range(12))
    keys = keys_of(tokens, 4)
    assert len(set(keys)) == 3
    for index in range(12):
        changed = tokens.copy()
        changed[index] += 100
        others = keys_of(changed, 4)
        assert [a == b for a, b in zip(keys, others, strict=True)] == [block < index // 4 for block in range(3)]


def test_equal_blocks_behind_different_beginnings_differ() -> None:
    assert keys_of([1, 1, 5, 5], 2)[1] != keys_of([2, 2, 5, 5], 2)[1]
    assert keys_of([1, 1, 1, 1], 2)[0] != keys_of([1, 1, 1, 1], 2)[1]
    assert block_key(None, [1]) != block_key(None, [256])


def test_keys_grow_with_the_tokens() -> None:
    keys: list[bytes] = []
    tokens = list(range(10))
    extend_keys(keys, tokens, 2, 2)
    extend_keys(keys, tokens, 2, 5)
    extend_keys(keys, tokens, 2, 1)
    assert keys == keys_of(tokens, 2)


@settings(max_examples=200, deadline=None)
@given(cached=st.lists(st.booleans(), max_size=12), size=st.integers(1, 5), window=st.none() | st.integers(1, 30))
def test_the_longest_usable_beginning_is_found(cached: list[bool], size: int, window: int | None) -> None:
    """Against the definition: try every length, longest first."""
    keys = [b"%d" % index for index in range(len(cached))]
    pool = BlockPool(max(1, len(cached)))
    blocks = pool.take(len(cached))
    for index, there in enumerate(cached):
        if there:
            pool.register(blocks[index], keys[index])
    pool.release(blocks)
    best: list[int] = []
    for count in range(len(cached), 0, -1):
        first = 0 if window is None else max(0, count * size - window) // size
        if all(cached[first:count]):
            best = [-1] * first + blocks[first:count]
            break
    assert longest_hit(pool, keys, size, window) == best
