# SPDX-License-Identifier: Apache-2.0
"""How long Triton's compiler takes in this process; kernels that it finds in its cache are counted apart."""

from __future__ import annotations

from typing import Any

COMPILED, CACHED = "(kernels compiled)", "(kernels from the cache)"


def count_seconds(seconds: dict[str, float]) -> None:
    """From now on, add the seconds that Triton spends on kernels to `seconds`, under `COMPILED` and `CACHED`. Where copies of this
    process compile (see `ahead`), these are more seconds than pass. Triton must be installed."""
    from triton import knobs

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        name = CACHED if cache_hit else COMPILED
        seconds[name] = seconds.get(name, 0.0) + times.total / 1e6

    knobs.compilation.listener = listen
