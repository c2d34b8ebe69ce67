# SPDX-License-Identifier: Apache-2.0
"""The host tier: KV blocks that left the device are in slots of host memory, and come back by copy.

A block with a key that is evicted from the device is copied to a slot; a prefix hit on it takes a block of the device and copies it
back. The slot keeps its content, so that a block that leaves again need not be copied again. The copies of a step are done before
its rows: first all that write slots, then all that read them. This module keeps that order sound:

    a slot that a copy of the step reads is not written in that step
    a block that is taken by somebody else is no target of a copy any more

Copies run beside the steps as far as the ranks have buffers. So a step has no more of them than `bound`, beside what `allow` adds
for blocks whose contents take much longer to compute; what is evicted beyond is lost, as it would be without a host tier.

Each write of a slot has a generation, which the copies that read it name: ranks refuse to read another one.

States of prefixes go the same way, in slots of their own (`state_snapshots`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from phalanx.engine.messages import BlockCopy, Stats
from phalanx.errors import EngineError

_FIRST = -2
"""As an entry of a prefix hit, of slot 0; that of slot n is n lower. -1 stands for no block."""


def entry_of(slot: int) -> int:
    """How a prefix hit names a slot, where it has block ids of the device otherwise; and the slot of such an entry."""
    return _FIRST - slot


class HostBlocks:
    """The slots 0 .. count-1 of one dp index. bound: copies out of one step. Counts of blocks since the start: saved, loaded:
    copied out and in; dropped: not copied out, since the step had its copies or reads what would give way."""

    def __init__(self, count: int, bound: int = 1 << 62) -> None:
        self.count, self._bound, self._room = count, bound, bound
        self.saved = self.loaded = self.dropped = 0
        self._free = list(range(count - 1, -1, -1))  # a stack: slot 0 goes first
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by the key of what is there; the least recently used first
        self._generations = [0] * count
        self._out: dict[int, int] = {}  # slot -> block: copies of the next step
        self._in: dict[int, int] = {}  # block -> slot
        self._readers = [0] * count  # of these

    @property
    def used(self) -> int:
        """Slots with content."""
        return len(self._slots)

    @property
    def loading(self) -> int:
        """Blocks that the next step loads."""
        return len(self._in)

    def find(self, key: bytes) -> int | None:
        """The slot with this content; None where there is none."""
        return self._slots.get(key)

    def save(self, block: int, key: bytes) -> None:
        """The device evicts a block with this key: keep its content. The least recently used gives way, unless a copy reads it."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = None
        if self._room:
            slot = self._free.pop() if self._free else self._evicted()
        if slot is None:
            self.dropped += self.count > 0
            return
        self._room -= 1
        self._slots[key] = slot
        self._generations[slot] += 1
        self._out[slot] = block

    def allow(self, count: int) -> None:
        """The next step may have so many more copies out."""
        self._room += count

    def _evicted(self) -> int | None:
        """A slot whose content gives way; None where all are read: what is read has been used last."""
        key, slot = next(iter(self._slots.items()), (b"", -1))
        if slot < 0 or self._readers[slot]:
            return None
        del self._slots[key]
        return slot

    def touch(self, keys: Iterable[bytes]) -> None:
        """What is there of these keys has been used now, the last one last."""
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)

    def reserve(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """The contents of these slots, as `find` returned them for these keys, will be loaded: until then none gives way."""
        for slot, key in zip(slots, keys, strict=True):
            self._readers[slot] += 1
            self._slots.move_to_end(key)

    def load(self, slot: int, block: int) -> None:
        """Copy a reserved slot to a block of the device, which has been taken for it."""
        self._in[block] = slot

    def taken(self, block: int) -> None:
        """The device gives this block to somebody: no copy writes it."""
        slot = self._in.pop(block, None)
        if slot is not None:
            self._readers[slot] -= 1

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """The copies that ranks do before the step's rows, once: those from blocks to slots, then those from slots to blocks."""
        out = [BlockCopy(block, slot, self._generations[slot]) for slot, block in self._out.items()]
        back = [BlockCopy(block, slot, self._generations[slot]) for block, slot in self._in.items()]
        for copy in back:
            self._readers[copy.slot] -= 1
        self._out, self._in, self._room = {}, {}, self._bound
        self.saved += len(out)
        self.loaded += len(back)
        return out, back

    def forget(self) -> None:
        """No content is found any more, and nothing is copied."""
        self._free += self._slots.values()
        self._slots.clear()
        self._out, self._in = {}, {}
        self._readers = [0] * self.count

    def write(self, stats: Stats) -> None:
        """Its counts and gauges."""
        stats.host_total, stats.host_used, stats.host_dropped = self.count, self.used, self.dropped
        stats.host_saved, stats.host_loaded = self.saved, self.loaded

    def check(self) -> None:
        """Verify the accounting. Raises EngineError. Sums alone: there may be a million slots, and requests wait meanwhile."""
        slots, numbers = len(self._free) + len(self._slots), sum(self._free) + sum(self._slots.values())
        readers = sum(self._readers)
        if slots != self.count or numbers != self.count * (self.count - 1) // 2 or readers != len(self._in):
            raise EngineError(
                "the accounting of KV blocks in host memory is broken",
                held=f"{slots} of {self.count} slots are free or in use; {readers} copies read them, and {len(self._in)} are to",
                next="report this with the log",
            )  # fmt: skip
