# SPDX-License-Identifier: Apache-2.0
"""Counters on the device for GEMMs whose programs share a tile of the weight."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from phalanx.errors import EngineError


class Counters:
    """Zeros on one device, some for each weight: how many programs have left their sums of each row of its tiles. The kernel leaves
    zeros again. They are cut from a block that holds many weights', since a CUDA graph that has a weight's first GEMM may not
    create any: they would be zero only after the graph ran. Outside of captures there is always room for `ROOM` more."""

    BLOCK, ROOM, LINE = 1 << 20, 1 << 19, 32
    """In counters; LINE of them are a line of the L2 cache, which no two weights share."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._block, self._taken = device, torch.empty(0, dtype=torch.int32), 0
        self._of: dict[tuple[int, int], Tensor] = {}

    def of(self, weight: int, places: int) -> Tensor:
        """int32 [places], always the same for the weight at that address. Raises EngineError where a capture finds too little room:
        more than a model's layers take."""
        if len(self._block) - self._taken < self.ROOM + places and not self._capturing():
            self._block, self._taken = torch.zeros(self.BLOCK + places, dtype=torch.int32, device=self._device), 0
        counters = self._of.get((weight, places))
        if counters is None:
            if places > len(self._block) - self._taken:
                raise EngineError(
                    "the first GEMM with a weight runs while a CUDA graph is captured",
                    why="it needs counters, and new ones would be zero only after the graph ran",
                    next="run the GEMM once before the capture",
                )
            counters = self._block[self._taken : self._taken + places]
            self._of[weight, places] = counters
            self._taken += -(-places // self.LINE) * self.LINE
        return counters

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


counters = cache(Counters)
"""Of a device."""
