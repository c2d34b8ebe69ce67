# SPDX-License-Identifier: Apache-2.0
"""What the engine makes of the counts that ranks report."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from phalanx.engine.experts import RECENT_SECONDS, ExpertLoads
from phalanx.engine.messages import RankFacts


def report(*rows: list[int]) -> bytes:
    return zlib.compress(np.array(rows, dtype="<i8").tobytes())


def facts(moe_layers: dict[int, list[int]]) -> list[RankFacts]:
    return [RankFacts(rank, 0, "cpu", (0, 4), moe_layers=layers) for rank, layers in moe_layers.items()]


def test_counts_of_stages_and_ranks_fall_into_place() -> None:
    """Two stages of four ranks; two ranks share each expert, and the first of them reports. Layer 0 is dense."""
    now = 10.0
    loads = ExpertLoads(facts({0: [1], 1: [], 2: [1], 3: [], 4: [2, 3], 5: [], 6: [2, 3], 7: []}), 4, clock=lambda: now)
    assert loads.layers == [1, 2, 3]
    assert loads.ranks == [[0, 2], [4, 6], [4, 6]]
    assert loads.placements == [(0, 1, 2, 3)] * 3
    loads.update({0: report([5, 6, 0, 0]), 6: report([0, 0, 1, 2], [0, 0, 3, 4])})
    loads.update({2: report([0, 0, 7, 8]), 4: report([9, 0, 0, 0], [0, 9, 0, 0])})
    assert loads.tokens.sum(1).tolist() == [[5, 6, 7, 8], [9, 0, 1, 2], [0, 9, 3, 4]]
    assert loads.tokens.sum(2).tolist() == [[11, 15], [9, 3], [9, 7]]


def test_recent_is_the_last_minute() -> None:
    now = 0.0
    loads = ExpertLoads(facts({0: [0]}), 2, clock=lambda: now)
    for second in range(200):
        now = float(second)
        loads.update({0: report([second, 2 * second])})
    recent, seconds = loads.recent()
    assert RECENT_SECONDS <= seconds <= RECENT_SECONDS * 1.2
    assert recent.tolist() == [[[round(seconds), 2 * round(seconds)]]] or abs(int(recent[0, 0, 0]) - seconds) <= 1
    assert loads.tokens.tolist() == [[[199, 398]]]


def movable(*layers: int) -> ExpertLoads:
    ranks = [RankFacts(rank, 0, "cpu", (0, 4), moe_layers=list(layers), expert_bytes=10) for rank in (0, 1)]
    return ExpertLoads(ranks, 8, clock=lambda: 0.0)


def drive(loads: ExpertLoads, seconds: float = 0.001, limit: int = 50) -> list[tuple[int, int, int]]:
    """Steps until nothing is left: (step, layer, experts at other places than before)."""
    moves, step, before = [], 0, list(loads.placements)
    while loads.moving and step < limit:
        step += 1
        move = loads.next_move(step)
        if move is not None:
            index = loads.layers.index(move.layer)
            moves.append((step, move.layer, sum(a != b for a, b in zip(before[index], move.placement, strict=True))))
            assert loads.next_move(step + 1) is None  # one at a time
            before = list(loads.placements)
            assert before[index] == tuple(move.placement)
        loads.step_done(step, seconds)
    return moves


def test_a_rebalance_goes_layer_by_layer_and_leaves_even_layers_alone() -> None:
    loads = movable(0, 1, 2)
    hot, even = [900, 800, 700, 600, 0, 0, 0, 0], [100] * 8
    for rank, half in ((0, slice(0, 4)), (1, slice(4, 8))):
        own = [[count if number in range(8)[half] else 0 for number, count in enumerate(row)] for row in (hot, even, hot)]
        loads.update({rank: report(*own)})
    loads.begin_rebalance()
    assert loads.stats().layers_left == 3
    moves = drive(loads)
    assert {layer for _, layer, _ in moves} == {0, 2}
    assert loads.placements[1] == tuple(range(8))
    assert [sum(hot[expert] for expert in loads.placements[0][:4]), sum(hot[expert] for expert in loads.placements[0][4:])] == [
        1500
    ] * 2
    assert loads.stats().moved == sum(count for _, _, count in moves)
    assert loads.stats().layers_left == 0
    loads.begin_rebalance()
    assert drive(loads) == []  # it is even now


@pytest.mark.parametrize("last", [True, False])
def test_recent_loads_begin_anew_after_a_rebalance(last: bool) -> None:
    """Also where the last layer stays as it is, so that no move ends the rebalance."""
    loads = movable(0, 1)
    hot, even = [900, 800, 700, 600, 0, 0, 0, 0], [100] * 8
    rows = (even, hot) if last else (hot, even)
    for rank, half in ((0, range(4)), (1, range(4, 8))):
        loads.update({rank: report(*[[count if number in half else 0 for number, count in enumerate(row)] for row in rows])})
    loads.begin_rebalance()
    assert drive(loads)
    recent, _ = loads.recent()
    assert not recent.any()


def test_slow_moves_become_smaller_and_quick_ones_larger() -> None:
    sizes = {}
    for seconds in (0.001, 0.1):
        loads = movable(0)
        loads.update({0: report([0] * 8), 1: report([0] * 8)})
        rebalance = loads._rebalance
        rebalance.begin(0, tuple(range(8)), (7, 6, 5, 4, 3, 2, 1, 0))
        sizes[seconds] = [count for _, _, count in drive(loads, seconds)]
        assert sum(sizes[seconds]) == 8
        assert loads.stats().longest_move == seconds
    assert sizes == {0.001: [2, 4, 2], 0.1: [2, 2, 2, 2]}


def test_experts_that_cannot_move_stay() -> None:
    loads = ExpertLoads(facts({0: [0], 1: [0]}), 4, clock=lambda: 0.0)
    loads.begin_rebalance()
    assert not loads.moving
    assert not loads.stats().movable
