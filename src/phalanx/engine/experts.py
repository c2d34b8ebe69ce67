# SPDX-License-Identifier: Apache-2.0
"""The experts of a running engine: `ExpertLoads` is what ranks report of the tokens that reach them, `Rebalance` moves them.

A rebalance goes layer by layer. Each step carries at most one move, of as few experts as take about 10 ms; requests go on in that
step and between the steps.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.engine.messages import ExpertMove, ExpertStats, RankFacts
from phalanx.layout.expert_placement import Placement, balanced_placement, default_placement, imbalance, rank_loads, steps_between
from phalanx.log import get_logger

RECENT_SECONDS = 60.0
"""The load that gauges show, and placements are made for, is that of the last so many seconds."""
_SAMPLES = 12  # of RECENT_SECONDS

FEW_TOKENS = 16
"""Tokens per expert of a layer, below which its recent load says little: the load since the start counts then."""
MIN_GAIN = 0.05
"""By how much of it the largest load of a rank must fall, for a layer's experts to move."""
MOVE_SECONDS = 0.01, 0.03
"""A move that takes less than the first lets the next one have twice as many experts; one that takes more than the second, half."""
MOVE_BYTES = 256 << 20
"""Of the weights that one move replaces, at most, on all ranks; at least two experts."""

logger = get_logger(__name__)

Counts = np.ndarray[Any, np.dtype[np.int64]]


class ExpertLoads:
    """Tokens by layer, rank and expert, since the start and recently. One per engine, of a model with experts."""

    def __init__(self, facts: Sequence[RankFacts], experts: int, *, redundant: int = 0, clock: Callable[[], float]) -> None:
        """facts: of all ranks; of those that share each expert, one has `moe_layers`. redundant: copies beside each layer's
        experts."""
        self._clock = clock
        ranks: dict[int, list[int]] = {}
        for rank in facts:
            for layer in rank.moe_layers:
                ranks.setdefault(layer, []).append(rank.rank)
        self.layers = sorted(ranks)
        self.ranks = [ranks[layer] for layer in self.layers]
        self.experts = experts
        self.spread = len(self.ranks[0]) if self.ranks else 1
        """Over how many ranks the experts of a layer are spread."""
        self._redundant = redundant
        self.placements: list[Placement] = []
        self.begin_placements()
        self._of_rank = {rank.rank: rank.moe_layers for rank in facts if rank.moe_layers}
        self._last: dict[int, bytes] = {}
        self.movable = any(rank.expert_bytes for rank in facts)
        """Whether ranks can exchange experts: those of a layer are spread over ranks of one tensor-parallel group."""
        self._rebalance = Rebalance(max(2, MOVE_BYTES // max([1, *(rank.expert_bytes for rank in facts)])))
        self.tokens: Counts = np.zeros((len(self.layers), self.spread, experts), dtype=np.int64)
        self._samples: deque[tuple[float, Counts]] = deque([(clock(), self.tokens.copy())])

    def update(self, reports: Mapping[int, bytes]) -> None:
        """Take in what ranks have reported: see `RankStats.experts`."""
        now = self._clock()
        if now - self._samples[-1][0] >= RECENT_SECONDS / _SAMPLES:
            self._samples.append((now, self.tokens.copy()))
            while len(self._samples) > 1 and now - self._samples[1][0] >= RECENT_SECONDS:
                self._samples.popleft()
        for rank, report in reports.items():
            layers = self._of_rank.get(rank)
            if self._last.get(rank) is report or layers is None:
                continue
            self._last[rank] = report
            counts = np.frombuffer(zlib.decompress(report), dtype="<i8").reshape(len(layers), self.experts)
            for layer, row in zip(layers, counts, strict=True):
                index = self.layers.index(layer)
                self.tokens[index, self.ranks[index].index(rank)] = row

    def recent(self) -> tuple[Counts, float]:
        """The tokens [layers, ranks, experts] of the last seconds, and how many seconds those are."""
        begin, tokens = self._samples[0]
        return self.tokens - tokens, self._clock() - begin

    def begin_placements(self) -> None:
        """Experts are where weights put them that were just read."""
        self.placements = [default_placement(self.experts, self.spread, self._redundant) for _ in self.layers]

    # ---- moves -------------------------------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether layers are left of a rebalance, or a move is in flight."""
        return self._rebalance.busy

    def begin_rebalance(self) -> None:
        """Move the experts of all layers to where their load is even; nothing where that is under way, or they cannot move."""
        if self.movable and not self.moving:
            self._rebalance.layers.extend(range(len(self.layers)))
            logger.info("rebalancing the experts of %d layers over %d ranks", len(self.layers), self.spread)

    def next_move(self, step: int) -> ExpertMove | None:
        """What step number `step` is to move; None while another step moves, nothing is left, or the next layer's experts stay. A
        step waits for one placement at most."""
        rebalance = self._rebalance
        if rebalance.step is not None:
            return None
        if not rebalance.path and rebalance.layers:
            index = rebalance.layers.popleft()
            load, current = self._load_of(index), self.placements[index]
            goal = balanced_placement(load, current, self.spread, min_gain=MIN_GAIN)
            before, after = (imbalance(rank_loads(load, each, self.spread)) for each in (current, goal))
            rebalance.begin(index, current, goal)
            if rebalance.path:
                logger.info("layer %d: the largest rank goes from %.2f times the mean to %.2f", self.layers[index], before, after)
        placement = rebalance.next(step)
        if placement is None:
            self._end_rebalance()
            return None
        self.placements[rebalance.layer] = placement
        return ExpertMove(self.layers[rebalance.layer], list(placement))

    def step_done(self, number: int, seconds: float | None) -> None:
        """Step `number` has ended; its move took so long."""
        if self._rebalance.done(number, seconds):
            self._end_rebalance()

    def _end_rebalance(self) -> None:
        """Once nothing is left: where experts have moved, what is recent begins with the new places."""
        rebalance = self._rebalance
        if not rebalance.busy and rebalance.moved > rebalance.moved_before:
            rebalance.moved_before = rebalance.moved
            self._samples = deque([(self._clock(), self.tokens.copy())])
            logger.info(
                "%d experts have moved since the start; the longest move took %.1f ms", rebalance.moved, rebalance.longest * 1e3
            )

    def _load_of(self, index: int) -> list[float]:
        recent, _ = self.recent()
        load = recent[index].sum(0)
        if load.sum() < FEW_TOKENS * self.experts:
            load = self.tokens[index].sum(0)
        values: list[float] = load.astype(np.float64).tolist()
        return values

    def stats(self) -> ExpertStats:
        recent, seconds = self.recent()
        return ExpertStats(
            self.layers,
            self.ranks,
            self.experts,
            _packed(self.tokens),
            _packed(recent),
            seconds,
            [list(each) for each in self.placements],
            len(self._rebalance.layers) + bool(self._rebalance.path),
            self._rebalance.moved,
            self._rebalance.longest,
            self.movable,
        )


def _packed(counts: Counts) -> bytes:
    return zlib.compress(counts.astype("<i8").tobytes(), 1)


class Rebalance:
    """The moves that are left: of whole layers, and within the layer under way. `most`: experts of one move."""

    def __init__(self, most: int) -> None:
        self.layers: deque[int] = deque()
        self.layer = -1
        self.path: deque[Placement] = deque()
        """Placements of the layer under way, each with one or two experts at other places than the one before."""
        self.step: int | None = None
        """The step in flight that moves experts."""
        self.moved = self.moved_before = 0
        """Experts that have moved: since the start, and before this rebalance."""
        self.longest = 0.0
        self._current: Placement = ()
        self._most, self._budget = most, 2

    @property
    def busy(self) -> bool:
        return bool(self.layers or self.path) or self.step is not None

    def begin(self, layer: int, current: Placement, goal: Placement) -> None:
        self.layer, self._current, self.path = layer, current, deque(steps_between(current, goal))

    def next(self, step: int) -> Placement | None:
        """The placement that step `step` is to bring about: as far along the path as the budget of experts goes."""
        placement: Placement | None = None
        while self.path and (placement is None or _differ(self._current, self.path[0]) <= self._budget):
            placement = self.path.popleft()
        if placement is not None:
            self.moved += _differ(self._current, placement)
            self._current, self.step = placement, step
        return placement

    def done(self, step: int, seconds: float | None) -> bool:
        """Whether that step was the one that moved."""
        if step != self.step:
            return False
        self.step = None
        if seconds is not None:
            self.longest = max(self.longest, seconds)
            if seconds < MOVE_SECONDS[0]:
                self._budget = min(self._most, self._budget * 2)
            elif seconds > MOVE_SECONDS[1]:
                self._budget = max(2, self._budget // 2)
        return True


def _differ(first: Placement, second: Placement) -> int:
    return sum(a != b for a, b in zip(first, second, strict=True))
