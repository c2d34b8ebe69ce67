# SPDX-License-Identifier: Apache-2.0
"""`WatchClock`: the time that a process has watched others. By it the silence of a process and the time of a step are judged."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_SECONDS = 1.0


class WatchClock:
    """Seconds. From one look to the next at most LOOK_SECONDS pass: beyond that this process stood still itself, as in a virtual
    machine that was stopped, and what others have sent lies unread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked, self._lost = clock, clock(), 0.0

    def look(self) -> float:
        """The time now. Call this several times per LOOK_SECONDS."""
        now = self._clock()
        self._lost += max(now - self._looked - LOOK_SECONDS, 0.0)
        self._looked = now
        return now - self._lost
