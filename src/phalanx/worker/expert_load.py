# SPDX-License-Identifier: Apache-2.0
"""`ExpertLoad`: how many tokens each expert has received on this rank, counted on the device and read without a wait."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

READ_SECONDS = 2.0
"""How often the counts are copied to the host, at most."""


class CountingLayer(Protocol):
    """A layer with experts. load [physical experts of this rank] int64: where its kernels count. local_experts: which experts
    those are."""

    load: Tensor
    local_experts: tuple[int, ...]


class _Copy(NamedTuple):
    """Counts on their way to the host. event: their arrival; None where they have arrived."""

    counts: Tensor
    event: torch.cuda.Event | None


class ExpertLoad:
    """The counters of all layers with experts on this rank, in one tensor [layers, physical experts] that captured graphs add to.

    Used from the rank's main thread, between steps, except for `latest`, which the heartbeat's thread reads: it makes no call to
    the device.
    """

    def __init__(
        self, layers: Sequence[CountingLayer], experts: int, device: torch.device, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        """layers: at least one; their `load` becomes a view. experts: of a layer, on all ranks. Before graphs are captured."""
        self.latest = b""
        """zlib of int64 [layers, experts], little endian: tokens since the start; empty before the first."""
        self._clock = clock
        self.counts = torch.zeros(len(layers), len(layers[0].local_experts), dtype=torch.int64, device=device)
        for layer, counts in zip(layers, self.counts, strict=True):
            layer.load = counts
        # What was counted before experts moved, by expert.
        self._moved = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        self._experts_of = torch.tensor([layer.local_experts for layer in layers], dtype=torch.int64, device=device)
        self._host = torch.zeros(len(layers), experts, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copy: _Copy | None = None
        self._due: float | None = None  # when the next copy begins; None: nothing was counted since the last

    def reset(self) -> None:
        """Forget what was counted: the steps so far were a warm-up."""
        self.counts.zero_()
        self._moved.zero_()

    def step_queued(self) -> None:
        """A step that counts was queued on the device."""
        if self._due is None:
            self._due = self._clock() + READ_SECONDS

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `read` has something to do; None while it has nothing."""
        if self._copy is not None:
            return READ_SECONDS / 100
        return None if self._due is None else max(0.0, self._due - self._clock())

    def read(self) -> None:
        """Begin a copy to the host where one is due; take it in where it has arrived. Never waits."""
        if self._copy is None:
            if self._due is None or self._clock() < self._due:
                return
            self._due = None
            self._host.copy_(self._moved.scatter_add(1, self._experts_of, self.counts), non_blocking=True)
            event = None
            if self.counts.is_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._copy = _Copy(self._host, event)
        if self._copy.event is None or self._copy.event.query():  # type: ignore[no-untyped-call]
            self.latest = zlib.compress(self._copy.counts.numpy().astype("<i8").tobytes(), 1)
            self._copy = None

    def experts_moved(self, layer: int, local_experts: Sequence[int]) -> None:
        """From the next step on, layer `layer` (counted from 0 among these) has these experts. In the order of the
        device's queue."""
        self._moved[layer].index_add_(0, self._experts_of[layer], self.counts[layer])
        self.counts[layer].zero_()
        self._experts_of[layer].copy_(torch.tensor(local_experts, dtype=torch.int64))
        self.step_queued()
