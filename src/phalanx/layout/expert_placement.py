# SPDX-License-Identifier: Apache-2.0
"""EPLB: which rank has which experts of a layer, so that each rank gets the same part of a recorded load. Pure; no torch.

The steps are those of EPLB (deepseek-ai/EPLB): copies of the experts with the largest load per copy, then each copy, the largest
first, to the rank with the least load that still has a place. Here swaps between ranks follow, and a placement that is no better
than the present one is not taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.config.experts import require_places

Placement = tuple[int, ...]
"""The expert of each physical expert of one layer. A physical expert is a copy of an expert; of P, each of R ranks has the next
P / R. No rank has two of one expert."""

Loads = np.ndarray[Any, np.dtype[np.float64]]

_MAX_SWAPS = 64  # of one layer; a swap costs about 50 us, and most layers need fewer than 10


def default_placement(experts: int, ranks: int, redundant: int = 0) -> Placement:
    """Before any load is known: rank r has the r-th run of the experts, and copies of the first experts behind its run. Raises
    LayoutError as `require_places`."""
    require_places(experts, ranks, redundant)
    run, more = experts // ranks, redundant // ranks
    return tuple((rank * run + number) % experts for rank in range(ranks) for number in range(run + more))


def rank_loads(load: Sequence[float], placement: Placement, ranks: int) -> list[float]:
    """load [E] of a layer's experts -> [ranks]: each expert's is split evenly over its copies."""
    experts = np.array(placement, dtype=np.int64)
    copies = np.bincount(experts, minlength=len(load))
    part = np.asarray(load, dtype=np.float64) / np.maximum(copies, 1)
    sums: list[float] = part[experts].reshape(ranks, -1).sum(1).tolist()
    return sums


def imbalance(loads: Sequence[float]) -> float:
    """The largest load over the mean: 1 where all are alike, or there is none. The others wait for the rank that has it."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def balanced_placement(load: Sequence[float], current: Placement, ranks: int, *, min_gain: float = 0.0) -> Placement:
    """Where to have the experts of a layer under load [E], with as many copies in all as `current` has. Experts that stay on a rank
    keep their places there, and ranks keep as many experts as possible.

    `current` itself, unless the largest load of a rank falls by more than min_gain of it (0.05: 5 percent).
    """
    copies = _copies(load, len(current) - len(load), ranks)
    part = np.asarray(load, dtype=np.float64) / np.array(copies)
    packs = _swapped(_packed(part, copies, ranks), part)
    placement = _in_place(packs, current, ranks)
    before, after = (max(rank_loads(load, each, ranks)) for each in (current, placement))
    return placement if after < before * (1.0 - min_gain) else current


def copies_table(placement: Placement, experts: int) -> list[list[int]]:
    """[experts][1 + most copies]: how many copies an expert has, then their places in `placement`; the rest is -1."""
    places: list[list[int]] = [[] for _ in range(experts)]
    for place, expert in enumerate(placement):
        places[expert].append(place)
    most = max(map(len, places))
    return [[len(each), *each, *[-1] * (most - len(each))] for each in places]


class Transfer(NamedTuple):
    """The weights of physical expert `source` replace those of `target`; both are places in a placement."""

    source: int
    target: int


def transfers(current: Placement, placement: Placement, ranks: int) -> list[Transfer]:
    """What turns `current` into `placement`, all at once. Ordered by the source's rank, then by the target. A rank that has the
    expert sends it to itself; else its copies take turns."""
    size = len(current) // ranks
    places: dict[int, list[int]] = {}
    for place, expert in enumerate(current):
        places.setdefault(expert, []).append(place)
    moves = []
    for target, expert in enumerate(placement):
        if expert != current[target]:
            own = [place for place in places[expert] if place // size == target // size]
            moves.append(Transfer(own[0] if own else places[expert][target % len(places[expert])], target))
    return sorted(moves, key=lambda move: (move.source // size, move.target))


def steps_between(current: Placement, placement: Placement) -> Iterator[Placement]:
    """Placements that lead from one to another with the same experts, each with one or two places changed against the one before.
    Each has every expert; on the way a rank may have two copies of one."""
    state, wrong = list(current), {place for place in range(len(current)) if current[place] != placement[place]}
    while wrong:
        place = min(wrong)
        expert = state[place]
        other = next((each for each in sorted(wrong) if placement[each] == expert and each != place), None)
        if other is None:  # this copy is needed nowhere else: there is another where it belongs
            state[place] = placement[place]
        else:
            state[place], state[other] = state[other], expert
        wrong = {each for each in wrong if state[each] != placement[each]}
        yield tuple(state)


def _copies(load: Sequence[float], redundant: int, ranks: int) -> list[int]:
    """How many copies of each expert: one, and each further one where the load per copy is largest."""
    copies = [1] * len(load)
    heap = [(-value, expert) for expert, value in enumerate(load)] if ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(redundant):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-load[expert] / copies[expert], expert))
    return copies


def _packed(part: Loads, copies: Sequence[int], ranks: int) -> list[list[int]]:
    """part [E]: the load of one copy. The experts of each rank, as many on each."""
    size = sum(copies) // ranks
    packs: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for expert in sorted(range(len(copies)), key=lambda e: (-part[e], e)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(ranks) if len(packs[rank]) < size]
            rank = min((r for r in free if expert not in packs[r]), key=lambda r: (loads[r], r), default=-1)
            if rank < 0:
                rank = _make_room(packs, loads, part, expert, free[0])
            packs[rank].append(expert)
            loads[rank] += part[expert]
    return packs


def _make_room(packs: list[list[int]], loads: list[float], part: Loads, expert: int, free: int) -> int:
    """All ranks with a free place have the expert: another rank gives one of its experts to rank `free`, and has the place."""
    rank = min((r for r in range(len(packs)) if expert not in packs[r]), key=lambda r: (loads[r], r))
    least = min((e for e in packs[rank] if e not in packs[free]), key=lambda e: (part[e], e))
    packs[rank].remove(least)
    packs[free].append(least)
    loads[rank] -= part[least]
    loads[free] += part[least]
    return rank


def _swapped(packs: list[list[int]], part: Loads) -> list[list[int]]:
    """Swap experts of the rank with the largest load against others as long as that makes the larger of both loads smaller."""
    ranks = len(packs)
    if ranks < 2:
        return packs
    experts = np.array(packs)
    has = np.zeros((ranks, len(part)), dtype=bool)
    np.put_along_axis(has, experts, True, axis=1)
    for _ in range(_MAX_SWAPS):
        loads = part[experts].sum(1)
        heavy = int(loads.argmax())
        # [place on heavy, rank, place there]
        gain = part[experts[heavy]][:, None, None] - part[experts][None]
        larger = np.maximum(loads[heavy] - gain, loads[None, :, None] + gain)
        forbidden = has[:, experts[heavy]].T[:, :, None] | has[heavy][experts][None]
        larger[forbidden] = np.inf  # its own experts, too
        first, rank, second = np.unravel_index(int(larger.argmin()), larger.shape)
        if not larger[first, rank, second] < loads[heavy] * (1 - 1e-9):
            break
        own, other = experts[heavy, first], experts[rank, second]
        experts[heavy, first], experts[rank, second] = other, own
        has[heavy, own] = has[rank, other] = False
        has[heavy, other] = has[rank, own] = True
    swapped: list[list[int]] = experts.tolist()
    return swapped


def _in_place(packs: list[list[int]], current: Placement, ranks: int) -> Placement:
    """The packs as a placement that changes little: each pack to the rank that has most of it, and what is there stays in place."""
    size = len(current) // ranks
    before = [current[rank * size : (rank + 1) * size] for rank in range(ranks)]
    common = sorted(
        (-len(set(pack) & set(before[rank])), number, rank) for number, pack in enumerate(packs) for rank in range(ranks)
    )
    of_rank: dict[int, list[int]] = {}
    assigned: set[int] = set()
    for _, number, rank in common:
        if number not in assigned and rank not in of_rank:
            of_rank[rank] = packs[number]
            assigned.add(number)
    placement: list[int] = []
    for rank in range(ranks):
        staying = set(of_rank[rank]) & set(before[rank])
        coming = iter(expert for expert in of_rank[rank] if expert not in staying)
        placement += [expert if expert in staying else next(coming) for expert in before[rank]]
    return tuple(placement)
