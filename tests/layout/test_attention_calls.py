# SPDX-License-Identifier: Apache-2.0
"""The calls that the planner prices are those that the CPU's attention makes."""

from __future__ import annotations

import random

from phalanx.layout import attention_calls
from phalanx.models.layers.attention import sdpa


def test_calls_keys_and_pairs_are_those_of_the_back_end():
    draw = random.Random(5)
    for _ in range(50):
        rows = [(draw.choice([1, 1, 1, draw.randint(2, 300)]), draw.randint(0, 900)) for _ in range(draw.randint(1, 20))]
        starts, lengths = [0], []
        for queries, before in rows:
            starts.append(starts[-1] + queries)
            lengths.append(before + queries)
        limit = sdpa.MASK_LIMITS["cpu"]
        bundles = sdpa.bundles(sdpa.query_chunks(starts, lengths, None, 16, limit), 16, limit)
        calls, keys, pairs = attention_calls.padded(rows, 16)
        shapes = [(len(each), max(c.count for c in each), 16 * max(c.blocks for c in each)) for each in bundles]
        assert calls == len(bundles)
        assert keys == sum(count * width for count, _, width in shapes)
        assert pairs == sum(count * queries * width for count, queries, width in shapes if queries > 1)
