# SPDX-License-Identifier: Apache-2.0
"""The states of prefixes, for models some of whose layers keep a state of each request.

A prefix hit needs, beside the KV blocks of the prefix, the state behind its last token. The state is there only while the request
is at that position: a step ends there, and before the next step the state is copied from the request's slot. Copies are done in
the order in which they are made here, and so no state is overwritten before it has been read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from phalanx.engine.blocks import BlockPool
from phalanx.engine.prefix import longest_hit


class StateSnapshots:
    """The states of up to `count` prefixes of whole blocks; the least recently used gives way. slots: of requests; the places of
    prefixes are numbered behind these."""

    def __init__(self, slots: int, count: int) -> None:
        self._free = list(range(slots + count - 1, slots - 1, -1))
        self._places: OrderedDict[bytes, int] = OrderedDict()  # by the key of the prefix' last block; oldest first
        self._to_keep: list[tuple[int, bytes]] = []
        self._copies: list[tuple[int, int]] = []

    def keep(self, slot: int, key: bytes) -> None:
        """Keep the state that the slot has behind the step that is being made."""
        self._to_keep.append((slot, key))

    def begin_step(self) -> None:
        """Copy what the steps before are to keep."""
        for slot, key in self._to_keep:
            if key not in self._places and (self._free or self._places):
                place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
                self._places[key] = place
                self._copies.append((slot, place))
            self._touch(key)
        self._to_keep = []

    def restore(self, key: bytes, slot: int) -> None:
        """Give the slot the state of a prefix, as `longest` told it."""
        self._touch(key)
        self._copies.append((self._places[key], slot))

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies that the ranks do before the step's rows, once."""
        copies, self._copies = self._copies, []
        return copies

    def longest(self, pool: BlockPool, keys: Sequence[bytes], block_size: int, windows: Sequence[int | None]) -> list[int]:
        """As `longest_hit`, of the prefixes with a state."""
        count = len(keys)
        while count:
            if keys[count - 1] in self._places:
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
        self._to_keep, self._copies = [], []

    def _touch(self, key: bytes) -> None:
        if key in self._places:
            self._places.move_to_end(key)
