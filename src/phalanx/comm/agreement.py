# SPDX-License-Identifier: Apache-2.0
"""Ranks compare the facts that must be equal before they start. A difference is an error that names the fact and the ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from phalanx.errors import EngineError


class Store(Protocol):
    """What the stores of torch.distributed have in common. `get` waits for the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def agree(store: Store, rank: int, world: int, facts: Mapping[str, str], *, name: str = "start") -> None:
    """Compare `facts` (name -> value) over all ranks through the store; every rank gets the same result.

    `name` distinguishes one comparison from another. Raises EngineError for the first fact (in alphabetical order) that differs,
    with the value of each rank.
    """
    store.set(f"agreement/{name}/{rank}", json.dumps(dict(facts), sort_keys=True))
    by_rank = [json.loads(store.get(f"agreement/{name}/{other}")) for other in range(world)]
    error = difference(by_rank)
    if error is not None:
        raise error


def difference(by_rank: list[dict[str, str]]) -> EngineError | None:
    """The error for the facts of all ranks, by rank; None where they are equal."""
    for fact in sorted(set().union(*by_rank)):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(by_rank):
            holders[facts.get(fact, "nothing")].append(rank)
        if len(holders) > 1:
            return EngineError(
                f"the ranks differ in {fact}",
                held=", ".join(f"{_named(ranks)}: {value}" for value, ranks in holders.items()),
                why="they would compute different results",
                next=f"give every host the same {fact}",
            )
    return None


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
