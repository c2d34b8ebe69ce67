# SPDX-License-Identifier: Apache-2.0
"""Ranks as generators, stepped in random order: what a protocol of signals must stand."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

STEPS = 200_000
"""After so many, ranks wait for each other."""


def step_ranks(world: int, seed: int, calls: Callable[[int, random.Random], Generator[None, None, None]]) -> None:
    """Step calls(rank, its random numbers) of `world` ranks until all are done: some run far ahead of the others."""
    maker = random.Random(seed)
    ranks = {rank: calls(rank, random.Random(seed * 31 + rank)) for rank in range(world)}
    weights = {rank: maker.choice((1, 1, 30)) for rank in range(world)}
    for _ in range(STEPS):
        if not ranks:
            break
        rank = maker.choices(list(ranks), [weights[r] for r in ranks])[0]
        if next(ranks[rank], "done") == "done":
            del ranks[rank]
    assert not ranks, "ranks wait for each other"
