# SPDX-License-Identifier: Apache-2.0
"""An all-reduce whose rows have owners, in three acts that leave the GPU to other work in between: `Beside`.

    send     each rank's rows begin to travel to their owners
    finish   owners add up what has come, norm it, and begin to hand it out
    take     what was handed out is there

A step is cut into parts, each of which has its all-reduces one after another; acts of different parts interleave as the caller
likes, in the same order on every rank.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm

PARTS = 4
"""Of one step, at most. More hide more, and make smaller products."""
TILE = 128
"""Parts are whole tiles of the products' rows, but for the last; so each begins on a whole vector of 16 bytes."""


class Beside(Protocol):
    """Of one group. parts: most of a step; part_tokens: the most tokens of one."""

    parts: int
    part_tokens: int

    def send(self, part: int, x: Tensor) -> None:
        """Begin the all-reduce of a part: x [t, H], this rank's finished product, contiguous. Comes after the part's last `take`.
        x may be let go of."""

    def finish(self, part: int, fusion: ResidualRmsNorm) -> None:
        """Add up, add the residual [t, H] (whole, or OwnedRows of this part's last all-reduce), norm and quantize."""

    def take(self, part: int) -> tuple[Tensor, ...]:
        """What the group's `all_reduce` returns for that fusion with may_own, for work that is issued from now on and before the
        part's next `finish`."""


class InTurn:
    """By the group's own all-reduce, which nothing runs beside."""

    def __init__(self, group: Group, parts: int, part_tokens: int) -> None:
        self.parts, self.part_tokens, self._group = parts, part_tokens, group
        self._sent: dict[int, Tensor] = {}
        self._finished: dict[int, tuple[Tensor, ...]] = {}

    def send(self, part: int, x: Tensor) -> None:
        assert part not in self._sent, f"part {part} was sent and is not finished"
        assert part not in self._finished, f"part {part} was finished and is not taken"
        self._sent[part] = x

    def finish(self, part: int, fusion: ResidualRmsNorm) -> None:
        self._finished[part] = self._group.all_reduce(self._sent.pop(part), fusion)

    def take(self, part: int) -> tuple[Tensor, ...]:
        return self._finished.pop(part)
