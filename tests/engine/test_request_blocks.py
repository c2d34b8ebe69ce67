# SPDX-License-Identifier: Apache-2.0
"""The forecast of KV tokens equals counting step by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.request_blocks import KvForecast


def peak(requests: list[tuple[int, int]], slack: int) -> int:
    """Step by step: what requests of (tokens held, tokens to go) hold together."""
    last = max((to_go for _, to_go in requests), default=0)
    return max(sum(used + step + slack for used, to_go in requests if to_go >= step) for step in range(last + 1))


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=8),
    slack=st.integers(0, 4), capacity=st.integers(1, 300),
)  # fmt: skip
def test_a_forecast_equals_counting_step_by_step(requests: list[tuple[int, int]], slack: int, capacity: int) -> None:
    forecast = KvForecast(capacity, slack)
    taken: list[tuple[int, int]] = []
    for used, to_go in requests:
        fits = peak([*taken, (used, to_go)], slack) <= capacity
        assert forecast.add_if_fits(used, to_go) == fits
        if fits:
            taken.append((used, to_go))


def test_a_forecast_sets_nothing_aside_for_what_may_end_at_any_time() -> None:
    forecast = KvForecast(100, 4)
    forecast.add(30, None)
    assert not forecast.add_if_fits(30, 33)
    assert forecast.add_if_fits(30, 32)
    assert not forecast.add_if_fits(1, None)
