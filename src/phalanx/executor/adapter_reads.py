# SPDX-License-Identifier: Apache-2.0
"""Adapters that ranks are reading: one is there once every rank has its part, or none has it."""

from __future__ import annotations

from phalanx.errors import PhalanxError, StepDiverged
from phalanx.executor.protocol import AdapterRead


class AdapterReads:
    """Of `world` ranks."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._waiting: dict[int, set[int]] = {}  # key -> ranks that have not answered
        self._errors: dict[int, PhalanxError] = {}
        self._completed: list[int] = []

    def begin(self, key: int) -> None:
        """Every rank was told to read an adapter."""
        self._waiting[key] = set(range(self._world))

    def record(self, read: AdapterRead) -> None:
        """A rank has answered. Raises StepDiverged where nothing was asked."""
        waiting = self._waiting.get(read.key, set())
        if read.rank not in waiting:
            raise StepDiverged(
                f"rank {read.rank} has read adapter {read.key}, which it was not told to", held=f"awaited: {sorted(self._waiting)}"
            )
        waiting.discard(read.rank)
        if read.error is not None:
            wire = {**read.error, "failure": f"rank {read.rank}: {read.error['failure']}"}
            self._errors.setdefault(read.key, PhalanxError.from_wire(wire))
        if not waiting:
            del self._waiting[read.key]
            self._completed.append(read.key)

    def completed(self) -> list[tuple[int, PhalanxError | None]]:
        """See `Executor.adapters_read`."""
        keys, self._completed = self._completed, []
        return [(key, self._errors.pop(key, None)) for key in keys]
