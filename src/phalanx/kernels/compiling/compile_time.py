# SPDX-License-Identifier: Apache-2.0
"""How long Triton's compiler takes in this process; kernels that it finds in its cache are counted apart."""

from __future__ import annotations

from threading import Thread
from typing import Any

COMPILED, CACHED = "(kernels compiled)", "(kernels from the cache)"


def begin_hashing_compiler() -> Thread | None:
    """Start a thread that hashes Triton's own files, and return it; None where this Triton has another way. The hash is a part of
    each kernel's key in Triton's cache: without the thread, a process's first kernel waits for it, half a second and more."""
    try:
        from triton.runtime.cache import triton_key  # keeps its result
    except ImportError:
        return None
    thread = Thread(target=triton_key, name="hash of the compiler", daemon=True)
    thread.start()
    return thread


def count_seconds(seconds: dict[str, float]) -> None:
    """From now on, add the seconds that Triton spends on kernels to `seconds`, under `COMPILED` and `CACHED`. Where copies of this
    process compile (see `ahead`), these are more seconds than pass. Triton must be installed."""
    from triton import knobs

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        name = CACHED if cache_hit else COMPILED
        seconds[name] = seconds.get(name, 0.0) + times.total / 1e6

    knobs.compilation.listener = listen
