# SPDX-License-Identifier: Apache-2.0
"""`AdapterStore`: the adapters that a rank has in host memory, and their way into slots of its layers."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

from phalanx.engine.messages import PlaceAdapter
from phalanx.errors import EngineError, PhalanxError, WeightError
from phalanx.executor.protocol import AdapterRead, ReadAdapter
from phalanx.log import get_logger
from phalanx.models.adapters import HostFactors, ModelAdapters

logger = get_logger(__name__)


class AdapterStore:
    """Used from the rank's main thread. Reading has a thread of its own each time: no step waits for a disk."""

    def __init__(self, rank: int, model: ModelAdapters) -> None:
        self._rank, self._model = rank, model
        self._factors: dict[int, HostFactors] = {}
        self._reading = 0
        self._read: SimpleQueue[tuple[int, HostFactors | PhalanxError]] = SimpleQueue()

    @property
    def reading(self) -> bool:
        """Whether `answers` is to be asked again."""
        return self._reading > 0

    def read(self, message: ReadAdapter) -> None:
        """Begin to read an adapter."""
        self._reading += 1
        threading.Thread(target=self._read_one, args=(message,), name="read an adapter", daemon=True).start()

    def _read_one(self, message: ReadAdapter) -> None:
        factors: HostFactors | PhalanxError
        try:
            factors = self._model.read(message.folder, message.digest, message.parts)
        except PhalanxError as error:
            factors = error
        except Exception as error:
            logger.exception("an adapter cannot be read")
            factors = WeightError(f"{message.folder} cannot be read", why=repr(error))
        self._read.put((message.key, factors))

    def answers(self) -> list[AdapterRead]:
        """Of the adapters that have been read, or could not be, since the last call."""
        answers: list[AdapterRead] = []
        while True:
            try:
                key, factors = self._read.get_nowait()
            except Empty:
                return answers
            self._reading -= 1
            if isinstance(factors, PhalanxError):
                answers.append(AdapterRead(self._rank, key, factors.to_wire()))
            else:
                self._factors[key] = factors
                answers.append(AdapterRead(self._rank, key))

    def drop(self, key: int) -> None:
        """Forget an adapter."""
        self._factors.pop(key, None)

    def place(self, work: PlaceAdapter) -> None:
        """Write an adapter into a slot. Raises EngineError for one that has not been read."""
        factors = self._factors.get(work.key)
        if factors is None:
            raise EngineError(f"adapter {work.key} was to be placed", held=f"read are {sorted(self._factors) or 'none'}")
        self._model.place(work.slot, factors)
