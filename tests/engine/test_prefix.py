# SPDX-License-Identifier: Apache-2.0
"""Prefix keys, and the longest beginning that is still held, with and without a window."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.blocks import BlockPool
from phalanx.engine.prefix import block_key, extend_keys, longest_hit, root_key


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
    assert block_key(root_key(), [1]) != block_key(root_key(), [256])


def test_requests_with_other_salts_share_no_block() -> None:
    tokens, salts = [7] * 8, ["", "a", "b", "phalanx kv block", array("q", [7, 7]).tobytes().decode("latin-1")]
    salted: list[list[bytes]] = [[] for _ in salts]
    for salt, keys in zip(salts, salted, strict=True):
        extend_keys(keys, tokens, 2, 4, root=root_key(salt))
    assert len({key for keys in salted for key in [*keys, root_key()]}) == 4 * len(salts) + 1


def test_adapters_and_salts_are_of_different_kinds() -> None:
    """A salt that spells an adapter's digest, or the other way round, is another root; and so is each pair of them."""
    digests = [b"", b"a" * 16, b"b" * 16]
    salts = ["", "a" * 16, "b" * 16, "a" * 32]
    assert len({root_key(salt, digest) for salt in salts for digest in digests}) == len(salts) * len(digests)


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
