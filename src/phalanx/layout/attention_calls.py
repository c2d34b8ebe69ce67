# SPDX-License-Identifier: Apache-2.0
"""How attention on a CPU groups the rows of a step into calls: one answer for the back end that makes them
(models/layers/attention/sdpa.py) and the planner that prices them.

A call has rows of similar sizes. Each is padded to the largest of them, in queries and in blocks of keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FEW_BLOCKS = 8
"""Rows with up to this many blocks are padded to one another: fewer calls are worth more than the padding."""


class PaddedAttention(NamedTuple):
    """Of one layer. keys: gathered from the cache, over all rows; pairs: of a query with a key, of rows with several queries."""

    calls: int
    keys: int
    pairs: int


def size_class(queries: int, blocks: int) -> tuple[int, int]:
    """Rows of one class share a call: their sizes are within a factor of two."""
    return (queries - 1).bit_length(), (max(blocks, FEW_BLOCKS) - 1).bit_length()


def padded(rows: Iterable[tuple[int, int]], block_size: int) -> PaddedAttention:
    """Of rows (queries, tokens before them in the cache), in layers without a window."""
    classes: dict[tuple[int, int], list[int]] = {}
    for queries, before in rows:
        blocks = -(-(before + queries) // block_size)
        largest = classes.setdefault(size_class(queries, blocks), [0, 0, 0])
        largest[0] += 1
        largest[1], largest[2] = max(largest[1], queries), max(largest[2], blocks)
    keys = pairs = 0
    for count, queries, blocks in classes.values():
        keys += count * blocks * block_size
        pairs += count * queries * blocks * block_size if queries > 1 else 0
    return PaddedAttention(len(classes), keys, pairs)
