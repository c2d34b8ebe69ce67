# SPDX-License-Identifier: Apache-2.0
"""Cases from seeds: as many in CI on every machine, and for PHALANX_FUZZ_SECONDS in `make fuzz`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST = int(os.environ.get("PHALANX_FUZZ_SEED", "0"))
SECONDS = float(os.environ.get("PHALANX_FUZZ_SECONDS", "0"))


class Seeds:
    """PHALANX_FUZZ_SEED, or 0, and those that follow: `least` of them, and more until `seconds` have passed."""

    def __init__(self, least: int, seconds: float) -> None:
        self._least, self._end = least, time.monotonic() + seconds
        self.count = 0
        self.case = ""
        """What the seed made, for the line that names it."""

    def __iter__(self) -> Iterator[int]:
        while self.count < self._least or time.monotonic() < self._end:
            self.count, self.case = self.count + 1, ""
            yield FIRST + self.count - 1


@contextmanager
def fuzz_seeds(least: int, *, tests: int = 1) -> Iterator[Seeds]:
    """The seeds of a random test, one of `tests` that have PHALANX_FUZZ_SECONDS between them.

    Where the test fails, a line says which seed begins with that case.
    """
    seeds = Seeds(least, SECONDS / tests)
    try:
        yield seeds
    except BaseException:
        print(f"failed with PHALANX_FUZZ_SEED={FIRST + seeds.count - 1}: {seeds.case}".removesuffix(": "))
        raise
