# SPDX-License-Identifier: Apache-2.0
"""What Triton's compiler takes: its seconds in this process, those of kernels that it finds in its cache apart."""

from __future__ import annotations

from threading import Lock
from typing import Any

COMPILED, CACHED = "(kernels compiled)", "(kernels from the cache)"


def count(seconds: dict[str, float]) -> None:
    """From now on, add up the seconds that Triton takes for kernels, under `COMPILED` and `CACHED`: those of all threads, so that
    they can be more than have passed. Triton must be installed."""
    from triton import knobs

    adding = Lock()

    def heard(*, times: Any, cache_hit: bool, **_: Any) -> None:
        name = CACHED if cache_hit else COMPILED
        with adding:
            seconds[name] = seconds.get(name, 0.0) + times.total / 1e6

    knobs.compilation.listener = heard
