# SPDX-License-Identifier: Apache-2.0
"""What Triton's compiler takes: its seconds in this process, those of kernels that it finds in its cache apart."""

from __future__ import annotations

from typing import Any

COMPILED, CACHED = "(kernels compiled)", "(kernels from the cache)"


def count(seconds: dict[str, float]) -> None:
    """From now on, add up the seconds that Triton takes for kernels, under `COMPILED` and `CACHED`; more than have passed, where
    copies of this process compile (see `ahead`). Triton must be installed."""
    from triton import knobs

    def heard(*, times: Any, cache_hit: bool, **_: Any) -> None:
        name = CACHED if cache_hit else COMPILED
        seconds[name] = seconds.get(name, 0.0) + times.total / 1e6

    knobs.compilation.listener = heard
