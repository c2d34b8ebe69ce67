# SPDX-License-Identifier: Apache-2.0
"""Where a rank is in its step: which layer, and which calls of collectives it has made. `RankProgress` is written by what runs the
step, at the cost of a list's append for each collective, and read by a thread that tells the engine.

A call is one number: the layer, the group and the operation. Ranks of one tensor-parallel group make the same calls in each step,
in one order: `executor.stuck` compares them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")

OPERATIONS = (
    "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "barrier", "expert_exchange", "send", "receive",
)  # fmt: skip
(
    ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, BROADCAST, BARRIER, EXPERT_EXCHANGE, SEND, RECEIVE,
) = range(len(OPERATIONS))  # fmt: skip
GROUPS = ("tp", "pp", "dp", "world", "ends", "dcp")
"""The groups of a rank, by their names in `comm.torch_group.Groups`."""
GROUP_WORDS = {
    "tp": "tensor-parallel group", "pp": "pipeline", "dp": "data-parallel group", "world": "group of all ranks",
    "ends": "group of the first and the last stage", "dcp": "context-parallel group",
}  # fmt: skip

BEFORE_LAYERS = 0
"""In the place of a layer: the embedding, or nothing yet. Layer n of the model is n + 1."""
BEHIND_LAYERS = 0xFFFF
"""The norm, the LM head and the sampler."""
_WORD = "I" if array("I").itemsize == 4 else "L"


class Call(NamedTuple):
    """A collective that a rank has called. layer: as `RankProgress.layer`."""

    layer: int
    group: str
    operation: str

    @property
    def words(self) -> str:
        return f"{self.operation} of the {GROUP_WORDS[self.group]} {in_layer(self.layer)}"

    @property
    def between_two(self) -> bool:
        """Whether it is a message from one rank to another, and no call of all ranks of its group."""
        return self.operation in ("send", "receive")


def in_layer(layer: int) -> str:
    """As errors say it: `layer` as `RankProgress.layer`."""
    if layer == BEFORE_LAYERS:
        return "before the layers"
    return "behind the layers" if layer == BEHIND_LAYERS else f"in layer {layer - 1}"


class RankProgress:
    """Of this process. step: that it runs; 0 before the first. finished: the last one whose results it has. layer: BEFORE_LAYERS,
    n + 1 in layer n, BEHIND_LAYERS. queued: the device has all of the step. inside: how deep it is in collectives, which may call
    others: 0 where it computes. between_layers: called before each layer that is not replayed from a graph; it calls no
    collective."""

    __slots__ = ("between_layers", "calls", "finished", "inside", "layer", "queued", "step")

    def __init__(self) -> None:
        self.step = self.finished = self.layer = self.inside = 0
        self.queued = False
        self.between_layers: Callable[[], None] | None = None
        self.calls = array(_WORD)

    def begin(self, step: int) -> None:
        """A step begins: its calls are counted from here."""
        self.calls = array(_WORD)
        self.step, self.layer, self.inside, self.queued = step, BEFORE_LAYERS, 0, False

    def enter_layer(self, number: int) -> None:
        """Layer `number` of the model begins."""
        self.layer = number + 1
        if self.between_layers is not None:
            self.between_layers()

    def marker(self, group: str) -> CallMarker:
        """What a group of this name tells its calls to."""
        return CallMarker(self, GROUPS.index(group))

    @property
    def packed_calls(self) -> bytes:
        return pack(self.calls)


class CallMarker:
    """Tells `RankProgress` of one group's calls. One that is made within another is a part of that, and not recorded."""

    __slots__ = ("_group", "_progress")

    def __init__(self, progress: RankProgress, group: int) -> None:
        self._progress, self._group = progress, group << 8

    def enter(self, operation: int) -> None:
        progress = self._progress
        if not progress.inside and progress.step:
            progress.calls.append(progress.layer << 16 | self._group | operation)
        progress.inside += 1

    def leave(self) -> None:
        self._progress.inside -= 1

    def call(self, operation: int, collective: Callable[[], Result]) -> Result:
        """What the collective returns. An error leaves the mark of its call, in which the rank was."""
        self.enter(operation)
        result = collective()
        self.leave()
        return result


def pack(calls: array[int]) -> bytes:
    """Little endian."""
    if sys.byteorder == "big":
        calls = calls[:]
        calls.byteswap()
    return calls.tobytes()


def unpack(packed: bytes) -> list[Call]:
    """The calls that `RankProgress.packed_calls` has. Raises ValueError for what it cannot be."""
    words = array(_WORD)
    words.frombytes(packed)
    if sys.byteorder == "big":
        words.byteswap()
    try:
        return [Call(word >> 16, GROUPS[word >> 8 & 0xFF], OPERATIONS[word & 0xFF]) for word in words]
    except IndexError:
        raise ValueError("no rank makes such a call") from None
