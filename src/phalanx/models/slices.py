# SPDX-License-Identifier: Apache-2.0
"""Which part of which checkpoint tensor goes where: every layer says it for its own weights, and `weights` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.comm.group import Group


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) begin .. begin + target.shape[dim] of checkpoint tensor `name`, whose whole shape config.json
    implies to be `shape`; they are copied into `target`, a view of a weight on this rank."""

    name: str
    shape: tuple[int, ...]
    target: Tensor
    begin: int = 0
    dim: int = 0

    @property
    def end(self) -> int:
        return self.begin + self.target.shape[self.dim]


@dataclass(frozen=True)
class Seat:
    """Where a layer's weights live: the ranks that share it, the dtype of weights and arithmetic, the device."""

    group: Group
    dtype: torch.dtype
    device: torch.device

    def weight(self, *shape: int) -> nn.Parameter:
        """An uninitialized weight."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


class Sliced(nn.Module):
    """A layer with weights of its own."""

    def slices(self) -> Iterator[Slice]:
        """What to read from a checkpoint, covering every weight of this layer."""
        raise NotImplementedError
