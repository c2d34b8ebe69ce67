# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from phalanx.engine.watch_clock import LOOK_SECONDS, WatchClock


def test_time_in_which_nobody_looked_counts_for_a_second() -> None:
    now = 100.0
    watch = WatchClock(lambda: now)
    begin = watch.look()
    for _ in range(10):
        now += 0.5
        watch.look()
    assert watch.look() - begin == 5.0
    now += 3600.0  # a virtual machine that was stopped
    assert watch.look() - begin == 5.0 + LOOK_SECONDS
    now += 0.25
    assert watch.look() - begin == 5.25 + LOOK_SECONDS
