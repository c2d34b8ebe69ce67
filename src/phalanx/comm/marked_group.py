# SPDX-License-Identifier: Apache-2.0
"""Groups that record their calls in a `RankProgress`: so the engine knows who has not come to which collective.

On GPUs a call returns when it is queued, and a graph makes none: calls are recorded there only where the device says how far it has
come in them (`device_marks`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import overload

import torch
from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm, ScatterTargets, Splits
from phalanx.comm.one_sided import OneSided
from phalanx.comm.torch_group import Groups
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized, Unscaled
from phalanx.layout.rank_progress import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    EXPERT_EXCHANGE,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
    CallMarker,
    RankProgress,
)


def marked_groups(groups: Groups, progress: RankProgress, device: torch.device) -> Groups:
    """These groups of a rank: those of several ranks record their calls. On GPUs that of the ends does not: it has a stream of its
    own, and a device's calls are counted on one."""
    if not _records(progress, device):
        return groups
    members: dict[str, Group] = {each.name: getattr(groups, each.name) for each in fields(groups)}
    plain = {name for name, group in members.items() if group.size == 1 or (name == "ends" and device.type != "cpu")}
    return Groups(
        **{name: group if name in plain else MarkedGroup(group, progress.marker(name)) for name, group in members.items()}
    )


def unmarked(group: Group) -> Group:
    """The group itself, of one that may record its calls."""
    return group.base if isinstance(group, MarkedGroup) else group


def _records(progress: RankProgress, device: torch.device) -> bool:
    return device.type == "cpu" or progress.device is not None


def marked_exchange(exchange: OneSided, progress: RankProgress, device: torch.device) -> OneSided:
    """The exchange between data-parallel ranks, which records its calls as groups do."""
    return MarkedOneSided(exchange, progress.marker("dp")) if _records(progress, device) else exchange


class MarkedGroup:
    """As `Group`."""

    def __init__(self, base: Group, marker: CallMarker) -> None:
        self.base, self._marker = base, marker
        self.rank, self.size = base.rank, base.size

    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: None = None) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]: ...
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm | None = None) -> Tensor | tuple[Tensor, ...]:
        return self._marker.call(ALL_REDUCE, lambda: self.base.all_reduce(x, fusion) if fusion else self.base.all_reduce(x))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self._marker.call(ALL_GATHER, lambda: self.base.all_gather(x, dim))

    def all_to_all(self, x: Tensor, splits: Splits | None = None) -> Tensor:
        return self._marker.call(ALL_TO_ALL, lambda: self.base.all_to_all(x, splits))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._marker.call(REDUCE_SCATTER, lambda: self.base.reduce_scatter(x))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._marker.call(BROADCAST, lambda: self.base.broadcast(x, source))

    def send(self, x: Tensor, to: int) -> None:
        self._marker.call(SEND, lambda: self.base.send(x, to))

    def receive(self, x: Tensor, source: int) -> Tensor:
        return self._marker.call(RECEIVE, lambda: self.base.receive(x, source))

    def barrier(self) -> None:
        self._marker.call(BARRIER, self.base.barrier)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.base.empty(*shape, dtype=dtype, device=device)

    def gemm_reduce_scatter_targets(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> ScatterTargets | None:
        """As Group. The call is made where it is finished."""
        targets = self.base.gemm_reduce_scatter_targets(tokens, hidden, fusion)
        return None if targets is None else targets._replace(finish=lambda: self._marker.call(ALL_REDUCE, targets.finish))


class MarkedOneSided:
    """As `OneSided`."""

    def __init__(self, base: OneSided, marker: CallMarker) -> None:
        self._base, self._marker, self.max_rows = base, marker, base.max_rows

    def dispatch(
        self, x: Tensor | Quantized, routing: Routing, rows: int, experts: int
    ) -> tuple[Tensor | Quantized, Routing]:  # fmt: skip
        return self._marker.call(EXPERT_EXCHANGE, lambda: self._base.dispatch(x, routing, rows, experts))

    def combine(self, sums: Tensor, sent: Routing, received: Routing, experts: int) -> Tensor:
        return self._marker.call(EXPERT_EXCHANGE, lambda: self._base.combine(sums, sent, received, experts))
