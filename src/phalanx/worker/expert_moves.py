# SPDX-License-Identifier: Apache-2.0
"""`ExpertMover`: experts change their ranks between two steps, under captured graphs.

A graph reads weights and the table of places at fixed addresses: a move rewrites both, in the order of the device's queue. The
ranks of a group exchange the weights of a layer's experts by one all-to-all; those that share an expert have slices of it that
correspond, and each sends to the rank with the same slice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.comm.group import Group, Splits
from phalanx.engine.messages import ExpertMove
from phalanx.errors import EngineError
from phalanx.layout.expert_placement import Placement, transfers
from phalanx.models.layers.moe import SparseMoe
from phalanx.worker.expert_load import ExpertLoad


class MoveTime:
    """How long a move delays the step behind it: on a GPU between two events, on CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]
        self._seconds = -time.perf_counter()
        for event in self._events[:1]:
            event.record()

    def end(self) -> None:
        for event in self._events[1:]:
            event.record()
        self._seconds += time.perf_counter()

    @property
    def seconds(self) -> float:
        """Once the step behind the move has ended."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()  # a step without rows has no end of its own
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds * 1e-3


class ExpertMover:
    """Moves the experts of this rank's layers. Used from the rank's main thread, between steps.

    layers: by their numbers in the model. group: the tensor-parallel ranks, moe_ep runs of them. load: what counts their tokens.
    """

    def __init__(self, layers: Mapping[int, SparseMoe], group: Group, moe_ep: int, load: ExpertLoad) -> None:
        self._layers, self._group, self._moe_ep, self._load = layers, group, moe_ep, load
        self._index = {number: index for index, number in enumerate(layers)}
        first = next(iter(layers.values()))
        self.expert_bytes = sum(weight.shape[1] for weight in first.expert_weights())
        self._device = first.load.device

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Connect each rank to each of its group, so that the first move does not wait for that. Collective."""
        size = self._group.size
        self._group.all_to_all(torch.zeros((size, 1), dtype=torch.uint8, device=self._device), Splits([1] * size, [1] * size))

    @torch.inference_mode()
    def apply(self, move: ExpertMove) -> MoveTime | None:
        """Queue a move on the device; collective over the ranks that have the layer. None where another stage has it. Raises
        EngineError for a move that no engine would make."""
        layer, placement = self._layers.get(move.layer), tuple(move.placement)
        if layer is None:
            return None
        if len(placement) != len(layer.placement) or set(placement) != set(range(layer.config.count)):
            raise EngineError(
                f"the experts of layer {move.layer} cannot be placed as {list(placement)}",
                held=f"it has {layer.config.count} experts in {len(layer.placement)} places", why="some expert would have none",
            )  # fmt: skip
        duration = MoveTime(self._device)
        self._exchange(layer, placement)
        layer.place(placement)
        self._load.experts_moved(self._index[move.layer], layer.local_experts)
        duration.end()
        return duration

    def _exchange(self, layer: SparseMoe, placement: Placement) -> None:
        ranks, size, moe_tp = self._moe_ep, len(layer.local_experts), self._group.size // self._moe_ep
        own, slice_index = divmod(self._group.rank, moe_tp)
        moves = transfers(layer.placement, placement, ranks)
        outgoing = sorted((move for move in moves if move.source // size == own), key=lambda move: move.target)
        incoming = [move for move in moves if move.target // size == own]
        weights = layer.expert_weights()
        row_bytes = sum(weight.shape[1] for weight in weights)
        to, source = [move.target for move in outgoing], [move.source for move in incoming]
        splits = Splits(*([row_bytes * n for n in self._counts(places, size, moe_tp, slice_index)] for places in (to, source)))
        sent = torch.empty((len(outgoing), row_bytes), dtype=torch.uint8, device=self._device)
        for part, weight in zip(self._parts(sent, weights), weights, strict=True):
            for row, move in enumerate(outgoing):
                part[row].copy_(weight[move.source % size])
        # As bytes: ranks with other slices of an expert have other numbers of them.
        received = self._group.all_to_all(sent.view(-1), splits).view(len(incoming), row_bytes)
        for part, weight in zip(self._parts(received, weights), weights, strict=True):
            for row, move in enumerate(incoming):
                weight[move.target % size].copy_(part[row])

    def _counts(self, places: list[int], size: int, moe_tp: int, slice_index: int) -> list[int]:
        """How many of these places each rank of the group has, of those with this rank's slice of experts."""
        counts = [0] * self._group.size
        for place in places:
            counts[place // size * moe_tp + slice_index] += 1
        return counts

    def _parts(self, rows: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        """rows [N, bytes of an expert] -> the bytes of each weight, [N, ...]: views."""
        return torch.split(rows, [weight.shape[1] for weight in weights], dim=1)
