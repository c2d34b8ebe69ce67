# SPDX-License-Identifier: Apache-2.0
"""Prefix keys, and the longest beginning that is still held, with and without a window."""

from __future__ import annotations

from array import array
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.blocks import BlockPool
from phalanx.engine.prefix import extend_keys, group_key, longest_hit, root_key


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
    assert keys_of([1], 1) != keys_of([256], 1)


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


WINDOWS = st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(windows=WINDOWS, count=st.integers(0, 12), size=st.integers(1, 5), chance=st.randoms())
def test_the_longest_usable_beginning_is_found(windows: list[int | None], count: int, size: int, chance: Random) -> None:
    """Against the definition: try every length, longest first; each group needs what its next token looks back to."""
    keys = [b"%d" % index for index in range(count)]
    part, pool = chance.choice([0.5, 0.9]), BlockPool(max(1, count * len(windows)))
    tables = [pool.take(count) for _ in windows]
    cached = [[chance.random() < part for _ in keys] for _ in windows]
    for group, blocks in enumerate(tables):
        for index, there in enumerate(cached[group]):
            if there:
                pool.register(blocks[index], group_key(keys[index], group))
        pool.release(blocks)
    best: list[int] = []
    for end in range(count, 0, -1):
        firsts = [0 if window is None else max(0, end * size - window) // size for window in windows]
        if all(all(there[first:end]) for there, first in zip(cached, firsts, strict=True)):
            columns = [[-1] * first + blocks[first:end] for first, blocks in zip(firsts, tables, strict=True)]
            best = [block for column in zip(*columns, strict=True) for block in column]
            break
    assert longest_hit(pool, keys, size, windows) == best
