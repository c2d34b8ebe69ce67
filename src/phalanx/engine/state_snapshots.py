# SPDX-License-Identifier: Apache-2.0
"""The states of prefixes, for models some of whose layers keep a state of each request.

A prefix hit needs, beside the KV blocks of the prefix, the state behind its last token. The state is there only while the request
is at that position: a step ends there, and before the next step the state is copied from the request's slot. Copies are done in
the order in which they are made here, and so no state is overwritten before it has been read.

A state that gives way goes to host memory (`host_blocks`, with the numbers of slots and places for blocks), and comes from there to
the slot of the request that hits it. Of one step:

    places and slots -> host memory     first: a state whose place is written in the same step leaves from the slot that it is in
    slots -> places, places -> slots    in the order in which they are made
    host memory -> slots                last: what a slot had may have been kept
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from phalanx.engine.blocks import BlockPool
from phalanx.engine.host_blocks import HostBlocks
from phalanx.engine.messages import Stats
from phalanx.engine.prefix import longest_hit
from phalanx.errors import EngineError


class StateSnapshots:
    """The states of up to `count` prefixes of whole blocks; the least recently used gives way. slots: of requests; the places of
    prefixes are numbered behind these. host: what gives way is there; no bound on copies out: each stands for a prompt that was
    computed."""

    def __init__(self, slots: int, count: int, host: HostBlocks | None = None) -> None:
        self.count, self.host = count, host or HostBlocks(0)
        self._free = list(range(slots + count - 1, slots - 1, -1))
        self._places: OrderedDict[bytes, int] = OrderedDict()  # by the key of the prefix' last block; oldest first
        self._to_keep: list[tuple[int, bytes]] = []
        self._copies: list[tuple[int, int]] = []
        self._written: dict[int, int] = {}  # place -> slot from which a copy of the next step writes it

    def keep(self, slot: int, key: bytes) -> None:
        """Keep the state that the slot has behind the step that is being made."""
        self._to_keep.append((slot, key))

    def begin_step(self) -> None:
        """Copy what the steps before are to keep."""
        for slot, key in self._to_keep:
            if key not in self._places and (self._free or self._places):
                place = self._free.pop() if self._free else self._evicted()
                self._places[key] = place
                self._copies.append((slot, place))
                self._written[place] = slot
            self._touch(key)
        self._to_keep = []

    def _evicted(self) -> int:
        """The place of the state that gives way."""
        key, place = self._places.popitem(last=False)
        self.host.save(self._written.get(place, place), key)
        return place

    def restore(self, key: bytes, slot: int) -> bool:
        """Give the slot the state of a prefix, as `longest` told it. Returns whether it comes from host memory, where it stays."""
        self.host.taken(slot)
        if key in self._places:
            self._touch(key)
            self._copies.append((self._places[key], slot))
            return False
        place = self.host.find(key)
        assert place is not None, "`longest` told of it"
        self.host.reserve([place], [key])
        self.host.load(place, slot)
        return True

    def only_on_host(self, key: bytes) -> bool:
        """Whether a hit of this prefix has to load its state."""
        return key not in self._places and self.host.find(key) is not None

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies that the ranks do before the step's rows, once."""
        copies, self._copies, self._written = self._copies, [], {}
        return copies

    def longest(self, pool: BlockPool, keys: Sequence[bytes], block_size: int, windows: Sequence[int | None]) -> list[int]:
        """As `longest_hit`, of the prefixes with a state."""
        count = len(keys)
        while count:
            if keys[count - 1] in self._places or self.host.find(keys[count - 1]) is not None:
                blocks = longest_hit(pool, keys[:count], block_size, windows)
                if len(blocks) == count * len(windows):
                    return blocks
                count = len(blocks) // len(windows)
            else:
                count -= 1
        return []

    def forget(self) -> None:
        """Have no state of a prefix."""
        self._free += self._places.values()
        self._places.clear()
        self._to_keep, self._copies, self._written = [], [], {}
        self.host.forget()

    def write(self, stats: Stats) -> None:
        """Its gauges."""
        stats.host_states, stats.host_states_used = self.host.count, self.host.used

    def check(self) -> None:
        """Verify the accounting. Raises EngineError."""
        self.host.check()
        if len({*self._free, *self._places.values()}) != self.count:
            raise EngineError(
                "the accounting of states is broken", held=f"{len(self._free)} free, {len(self._places)} in use of {self.count}",
                next="report this with the log",
            )  # fmt: skip

    def _touch(self, key: bytes) -> None:
        if key in self._places:
            self._places.move_to_end(key)
