# SPDX-License-Identifier: Apache-2.0
"""How long Triton's compiler takes in this process; kernels that it finds in its cache are counted apart."""

from __future__ import annotations

from typing import Any

from phalanx.log import get_logger

_log = get_logger(__name__)

COMPILED, CACHED = "(kernels compiled)", "(kernels from the cache)"


def count_seconds(seconds: dict[str, float]) -> None:
    """From now on, add the seconds that Triton spends on kernels to `seconds`, under `COMPILED` and `CACHED`. Where copies of this
    process compile (see `ahead`), these are more seconds than pass. Triton must be installed."""
    from triton import knobs

    def listen(*, times: Any, cache_hit: bool, metadata: Any = None, **_: Any) -> None:
        name = CACHED if cache_hit else COMPILED
        seconds[name] = seconds.get(name, 0.0) + times.total / 1e6
        if metadata is not None and not cache_hit:  # of this process: it waited for the kernel
            _log.debug("compiled the kernel %s in %.2f s", metadata["name"], times.total / 1e6)

    knobs.compilation.listener = listen
