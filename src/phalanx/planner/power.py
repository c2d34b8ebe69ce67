# SPDX-License-Identifier: Apache-2.0
"""The power limit binds who computes without a pause: a GPU that rested before runs its long steps at full clocks for a while.

Measured on H200: 8,192 tokens through a layer of 70B take 15 percent less time with pauses of 40 percent between them than one
behind another, at 650 instead of 706 W (benchmarks/results/kernels_power.json); prompts of up to 4,096 tokens between decodes run
as fast as without a limit (plan_served_cuda.json).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CREDIT = 0.015
"""Seconds at the limit's power that a rested GPU may draw beyond it. The least that plan_served_cuda.json asks for: with 0.005,
prompts of 2,500 tokens and more would take 8 percent longer than they did. Steps that follow one another for seconds have used it
up, whatever it is."""

REST = 0.44
"""Of the limit's power, what a GPU between long steps leaves unused: it draws 390 of 700 W. From the same rows of
kernels_power.json: 829 W, as the operations of a joule say, in 59 percent of the time, and 650 W on average."""


@dataclass
class PowerCredit:
    """Of the GPUs of one replica, which compute alike."""

    seconds: float = CREDIT

    def rest(self, seconds: float) -> None:
        """Nothing that the limit slows down ran for so long."""
        self.seconds = min(self.seconds + REST * seconds, CREDIT)

    def spend(self, limited: Sequence[float], free: Sequence[float]) -> tuple[float, ...]:
        """What the stages of a step take: as without a limit, for as long as there is credit. limited, free: their seconds with the
        limit and without it; the same joules in less time are drawn on credit."""
        debt = max(slow - fast for slow, fast in zip(limited, free, strict=True))
        if debt <= 0:
            return tuple(limited)
        part = min(self.seconds / debt, 1.0)
        self.seconds -= part * debt
        return tuple(slow - part * (slow - fast) for slow, fast in zip(limited, free, strict=True))
