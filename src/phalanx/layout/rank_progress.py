# SPDX-License-Identifier: Apache-2.0
"""Where a rank is in its step: which layer, and which calls of collectives it has made. `RankProgress` is written by what runs the
step, at the cost of a list's append for each collective, and read by a thread that tells the engine.

A call is one number: the layer, the group and the operation. Ranks of one tensor-parallel group make the same calls in each step,
in one order: `executor.stuck` compares them.

On CPU a call is recorded when it is made. On GPUs it is recorded when it is queued, or captured in a graph, and then added at each
replay. How far the device has come in these records, it says itself: the first kernel of a call counts it
(`comm.device_marks`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

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
UNCOUNTED = -16
"""In the place of a call's number for kernels: it is not the first kernel of a call, or no step is recorded."""


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


class DevicePlace(NamedTuple):
    """What a device last said. step: that it runs. entered: calls of this step whose first kernel has begun. total: the sum of
    their numbers as kernels have them (`take_call`), modulo 2^32."""

    step: int
    entered: int
    total: int

    def fits(self, recorded: Sequence[int]) -> bool:
        """Whether the first `entered` of these calls are those that it has come to."""
        return self.entered <= len(recorded) and sum(recorded[: self.entered]) << 4 & 0xFFFFFFFF == self.total


class ReportingDevice(Protocol):
    """A device that says where it is: `comm.device_marks`."""

    def begin(self, step: int) -> None:
        """Queue the beginning of a step."""

    def read(self) -> DevicePlace | None:
        """Where it is in a step that is late; None while it was not asked."""


class Place(NamedTuple):
    """Where a rank is. begun, finished: the last steps that it began and finished. layer, inside, queued: as `RankProgress`. calls:
    in the step begun, packed. on_device: all of this is of the device. Then `inside` is whether it has come to a call at all, as
    it does not say when a call ends; `queued`, whether it has not yet come to all that the host queued, or all is queued."""

    begun: int
    finished: int
    layer: int
    inside: bool
    queued: bool
    calls: bytes
    on_device: bool


class RankProgress:
    """Of this process. step: that it runs; 0 before the first. finished: the last one whose results it has. layer: BEFORE_LAYERS,
    n + 1 in layer n, BEHIND_LAYERS. queued: the device has all of the step. inside: how deep it is in collectives, which may call
    others: 0 where it computes. between_layers: called before each layer that is not replayed from a graph; it calls no
    collective. device: the GPU, where it says how far it is; None where what runs the step is at the place itself. pending: the
    call that no kernel has been launched for yet; UNCOUNTED for none."""

    __slots__ = ("_recorded", "between_layers", "calls", "device", "finished", "inside", "layer", "pending", "queued", "step")

    def __init__(self) -> None:
        self.step = self.finished = self.layer = self.inside = 0
        self.queued = False
        self.between_layers: Callable[[], None] | None = None
        self.device: ReportingDevice | None = None
        self.pending = UNCOUNTED
        self.calls = array(_WORD)
        self._recorded: dict[int, array[int]] = {}  # of steps that the device has not finished

    def begin(self, step: int) -> None:
        """A step begins: its calls are counted from here."""
        self.calls = array(_WORD)
        self.step, self.layer, self.inside, self.queued = step, BEFORE_LAYERS, 0, False
        if self.device is not None:
            unfinished = {number: calls for number, calls in self._recorded.items() if number > self.finished}
            self._recorded = {**unfinished, step: self.calls}
            self.device.begin(step)

    def enter_layer(self, number: int) -> None:
        """Layer `number` of the model begins."""
        self.layer = number + 1
        if self.between_layers is not None:
            self.between_layers()

    def marker(self, group: str) -> CallMarker:
        """What a group of this name tells its calls to."""
        return CallMarker(self, GROUPS.index(group))

    @contextmanager
    def capturing(self) -> Iterator[array[int]]:
        """Inside, calls are recorded in what this yields, instead of in the step: a graph captures them."""
        before = self.calls, self.step
        self.calls, self.step = array(_WORD), self.step or -1
        try:
            yield self.calls
        finally:
            self.calls, self.step = before

    def replay(self, calls: array[int]) -> None:
        """A graph that captured these calls is about to be replayed."""
        if self.step:
            self.calls.extend(calls)
            self.layer = BEHIND_LAYERS

    def take_call(self) -> int:
        """The number that the next kernel gives to the device: of the call that it begins, a multiple of 16, so that kernels are
        compiled once for all; else UNCOUNTED."""
        call, self.pending = self.pending, UNCOUNTED
        return call

    @property
    def packed_calls(self) -> bytes:
        return pack(self.calls)

    @property
    def place(self) -> Place:
        """Where this rank is now; for another thread than the one that runs steps."""
        if self.device is None:
            return Place(self.step, self.finished, self.layer, self.inside > 0, self.queued, self.packed_calls, False)
        at = self.device.read()
        recorded = None if at is None else self._recorded.get(at.step)
        if at is None or (recorded is not None and not at.fits(recorded)):  # as on a GPU that does not say its place
            return Place(self.step, self.finished, self.layer, self.inside > 0, self.queued, b"", False)
        recorded = recorded or array(_WORD)  # none: the step has ended
        calls = recorded[: at.entered]
        queued = len(recorded) > at.entered or self.step > at.step or self.queued
        layer = calls[-1] >> 8 if calls else BEFORE_LAYERS
        return Place(at.step, self.finished, layer, len(calls) > 0, queued, pack(calls), True)


class CallMarker:
    """Tells `RankProgress` of one group's calls. One that is made within another is a part of that, and not recorded. On a device,
    one that launches nothing is no call."""

    __slots__ = ("_group", "_progress")

    def __init__(self, progress: RankProgress, group: int) -> None:
        self._progress, self._group = progress, group << 4

    def enter(self, operation: int) -> None:
        progress = self._progress
        if not progress.inside and progress.step:
            call = progress.layer << 8 | self._group | operation
            progress.calls.append(call)
            progress.pending = call << 4
        progress.inside += 1

    def leave(self) -> None:
        progress = self._progress
        progress.inside -= 1
        if progress.device is not None and not progress.inside and progress.pending != UNCOUNTED:
            progress.calls.pop()
            progress.pending = UNCOUNTED

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
        return [Call(word >> 8, GROUPS[word >> 4 & 0xF], OPERATIONS[word & 0xF]) for word in words]
    except IndexError:
        raise ValueError("no rank makes such a call") from None
