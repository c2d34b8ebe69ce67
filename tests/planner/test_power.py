# SPDX-License-Identifier: Apache-2.0
"""A rested GPU runs at full clocks until its credit is spent; who computes without a pause is slowed."""

from __future__ import annotations

import pytest

from phalanx.planner.power import CREDIT, REST, PowerCredit


def test_credit_is_spent_by_what_is_saved_and_earned_by_rest():
    power = PowerCredit()
    assert power.spend((0.010, 0.012), (0.008, 0.009)) == (0.008, 0.009)
    assert power.seconds == pytest.approx(CREDIT - 0.003)
    power.rest(0.001)
    assert power.seconds == pytest.approx(CREDIT - 0.003 + REST * 0.001)
    power.rest(100.0)
    assert power.seconds == CREDIT


def test_without_a_pause_the_limit_binds():
    power = PowerCredit()
    times = [power.spend((1.0,), (0.85,))[0] for _ in range(5)]
    assert times[0] == pytest.approx(1.0 - CREDIT)
    assert times[1:] == [1.0] * 4


def test_what_the_limit_does_not_slow_costs_nothing():
    power = PowerCredit()
    assert power.spend((0.01, 0.01), (0.01, 0.01)) == (0.01, 0.01)
    assert power.seconds == CREDIT


def test_pauses_as_measured():
    """8,192 tokens of a layer, one after another and with pauses of 40 percent (benchmarks/results/kernels_power.json)."""
    limited, free, pause = 10.52, 8.92, 6.19
    power, paused = PowerCredit(), []
    for _ in range(200):
        paused.append(power.spend((limited * 1e-3,), (free * 1e-3,))[0])
        power.rest(pause * 1e-3)
    assert sum(paused) / 200 == pytest.approx(8.94e-3, rel=0.01)
