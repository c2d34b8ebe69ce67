# SPDX-License-Identifier: Apache-2.0
"""Placements of experts: what holds for every load, and how near to the best they come."""

from __future__ import annotations

import itertools
import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout.expert_placement import (
    Placement,
    balanced_placement,
    copies_table,
    default_placement,
    imbalance,
    rank_loads,
    steps_between,
    transfers,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(load, ranks, redundant)"""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = ranks * draw(st.integers(1, 6))
    redundant = ranks * draw(st.integers(0, min(3, experts - experts // ranks)))
    load = draw(st.lists(st.integers(0, 1000) | st.integers(0, 10**9), min_size=experts, max_size=experts))
    return load, ranks, min(redundant, experts * (ranks - 1))


def per_rank(placement: Placement, ranks: int) -> list[Placement]:
    size = len(placement) // ranks
    return [placement[rank * size : (rank + 1) * size] for rank in range(ranks)]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_placement_is_whole_and_no_worse_than_the_default(case: tuple[list[int], int, int]) -> None:
    load, ranks, redundant = case
    default = default_placement(len(load), ranks, redundant)
    placement = balanced_placement(load, default, ranks)
    for each in (default, placement):
        assert len(each) == len(load) + redundant
        assert set(each) == set(range(len(load)))
        assert all(len(set(own)) == len(own) for own in per_rank(each, ranks))
    before, after = rank_loads(load, default, ranks), rank_loads(load, placement, ranks)
    assert sum(after) == pytest.approx(sum(load))
    assert imbalance(after) <= imbalance(before) * (1 + 1e-9)
    # Once more with the same load: nothing moves.
    assert balanced_placement(load, placement, ranks, min_gain=1e-9) == placement


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=6, max_size=6) | st.lists(st.integers(0, 20), min_size=8, max_size=8))
def test_near_the_optimum_of_all_placements(load: list[int]) -> None:
    """Over two ranks without copies: LPT alone is within 7/6 of the optimum without the limit on places (Graham 1969, for two
    machines); swaps make up for the limit."""
    ranks = 2
    half = len(load) // ranks
    best = min(max(sum(one), sum(load) - sum(one)) for one in itertools.combinations(load, half))
    largest = max(rank_loads(load, balanced_placement(load, default_placement(len(load), ranks), ranks), ranks))
    assert best <= largest + 1e-9
    assert largest <= best * 7 / 6 + 1e-9


def test_rearrangement_and_copies_of_a_skewed_load() -> None:
    """Qwen3's 128 experts over 8 ranks, loads that fall with the power 1.2: the hottest is more than a rank's mean."""
    load = [1e6 / (1 + number) ** 1.2 for number in range(128)]
    default = default_placement(128, 8)
    rearranged = balanced_placement(load, default, 8)
    least = load[0] + sum(load[-15:])  # of the rank that has the hottest, and 15 others
    assert max(rank_loads(load, rearranged, 8)) == pytest.approx(least)
    copied = balanced_placement(load, default_placement(128, 8, 16), 8)
    assert copied.count(0) > 1
    results = [imbalance(rank_loads(load, each, 8)) for each in (default, rearranged, copied)]
    assert results == sorted(results, reverse=True)
    assert results[-1] < 1.001


def test_a_small_gain_moves_nothing() -> None:
    load = [10, 10, 10, 11]
    default = default_placement(4, 2)
    assert balanced_placement([10, 10, 11, 11], default, 2) != default
    assert balanced_placement([10, 10, 11, 11], default, 2, min_gain=0.05) == default
    assert balanced_placement(load, default, 2) == default  # no other is better


def test_what_stays_keeps_its_place() -> None:
    current = (0, 1, 2, 3, 4, 5)
    placement = balanced_placement([9, 9, 1, 1, 1, 1], current, 2)
    moved = [place for place in range(6) if placement[place] != current[place]]
    assert len(moved) == 2
    assert {place // 3 for place in moved} == {0, 1}


@settings(max_examples=200, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_each_step_of_a_move_has_every_expert(case: tuple[list[int], int, int], random: Random) -> None:
    """Weights follow the placements: simulated with one value for each physical expert."""
    load, ranks, redundant = case
    shuffled = random.sample(load, len(load))
    current = balanced_placement(load, default_placement(len(load), ranks, redundant), ranks)
    goal = balanced_placement(shuffled, current, ranks)
    weights, state, size = list(current), current, len(current) // ranks
    for placement in steps_between(current, goal):
        assert set(placement) == set(range(len(load)))
        assert 1 <= sum(a != b for a, b in zip(state, placement, strict=True)) <= 2
        moves = transfers(state, placement, ranks)
        assert [move.source // size for move in moves] == sorted(move.source // size for move in moves)
        sent = [weights[move.source] for move in moves]
        for move, value in zip(moves, sent, strict=True):
            weights[move.target] = value
        assert tuple(weights) == placement
        state = placement
    assert state == goal
    assert len(transfers(current, goal, ranks)) == sum(a != b for a, b in zip(current, goal, strict=True))


def test_copies_table() -> None:
    assert copies_table((0, 1, 2, 0, 3, 1), 4) == [[2, 0, 3], [2, 1, 5], [1, 2, -1], [1, 4, -1]]
    assert copies_table((1, 0), 2) == [[1, 1], [1, 0]]


def test_a_model_of_many_layers_takes_milliseconds_a_layer() -> None:
    generator = np.random.default_rng(3)
    load, default = generator.pareto(1.2, 128).tolist(), default_placement(128, 8, 16)
    begin = time.perf_counter()
    for _ in range(5):
        balanced_placement(load, default, 8)
    assert (time.perf_counter() - begin) / 5 < 0.1
