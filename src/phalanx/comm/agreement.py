# SPDX-License-Identifier: Apache-2.0
"""Before ranks work together they compare what must be equal: a difference is an error that names the ranks and the fact."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from phalanx.errors import EngineError


class Store(Protocol):
    """Where ranks meet: what torch.distributed's stores have in common. `get` waits for the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def agree(store: Store, rank: int, world: int, facts: Mapping[str, str], *, name: str = "start") -> None:
    """Compare `facts` (name -> value) over all ranks through the store; every rank comes to the same verdict.

    `name` sets one comparison apart from another. Raises EngineError for the first fact (in alphabetical order) that differs: who
    holds what.
    """
    store.set(f"agreement/{name}/{rank}", json.dumps(dict(facts), sort_keys=True))
    held = [json.loads(store.get(f"agreement/{name}/{other}")) for other in range(world)]
    verdict = difference(held)
    if verdict is not None:
        raise verdict


def difference(held: list[dict[str, str]]) -> EngineError | None:
    """The verdict over every rank's facts, `held[rank]`; None when all agree."""
    for fact in sorted(set().union(*held)):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(held):
            holders[facts.get(fact, "nothing")].append(rank)
        if len(holders) > 1:
            return EngineError(
                f"all ranks must hold the same {fact}",
                held=", ".join(f"{_named(ranks)}: {value}" for value, ranks in holders.items()),
                why="ranks that differ in it would compute different things",
                next=f"give every host the same {fact}",
            )
    return None


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
