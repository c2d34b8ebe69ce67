# SPDX-License-Identifier: Apache-2.0
"""The KV block pool: which blocks are free, who references the others, and which content can be found again.

A block is in exactly one of three states:

    free        nobody references it and its content has no key
    cached      nobody references it, but its content has a key; the least recently used is given away when none is free
    referenced  by one or more requests, with or without a key

Every operation is O(1) per block. `KvForecast` tells whether blocks will do for what requests are going to take.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from phalanx.errors import EngineError


class BlockPool:
    """Block ids 0 .. count-1 of one dp index."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # a stack: block 0 goes first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * count
        self._keys: list[bytes | None] = [None] * count
        self._blocks: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def referenced(self) -> int:
        """Blocks that requests hold."""
        return self.count - len(self._free) - len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Blocks for one writer, each with one reference and without content. The caller has seen that `available` suffices."""
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One more reference to a block with content, as `find` gave it."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each. What comes first is given away first, so a sequence is released from its end."""
        for block in blocks:
            left = self._references[block] = self._references[block] - 1
            if left == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
            elif left < 0:
                raise EngineError(
                    f"KV block {block} was released more often than it was taken", why="the block accounting is broken"
                )

    def name(self, block: int, key: bytes) -> None:
        """Let a referenced block be found by its content's key. A key that another block holds already stays there."""
        if key not in self._blocks and self._keys[block] is None:
            self._blocks[key] = block
            self._keys[block] = key

    def find(self, key: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._blocks.get(key)

    def idle(self, block: int) -> bool:
        """Whether nobody references the block."""
        return self._references[block] == 0

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks[key]
            self._keys[block] = None

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Verify the whole accounting against `held`: the blocks of every request that holds some (-1: none at that place).

        Raises EngineError naming the first contradiction. O(count), some milliseconds for 100,000 blocks that nobody holds.
        """
        expected = Counter(block for blocks in held for block in blocks if block >= 0)
        if not expected and self._whole():
            return
        free = set(self._free)
        if len(free) != len(self._free):
            raise self._broken("a block is free twice")
        for block in range(self.count):
            references, key = self._references[block], self._keys[block]
            if references != expected[block]:
                raise self._broken(f"block {block} has {references} references and {expected[block]} holders")
            states = (block in free, block in self._cached, references > 0)
            if sum(states) != 1:
                raise self._broken(f"block {block} is free, cached, referenced: {states}")
            if (block in free and key is not None) or (block in self._cached and key is None):
                raise self._broken(f"block {block} has the wrong key for its state")
            if key is not None and self._blocks.get(key) != block:
                raise self._broken(f"block {block} cannot be found by its key")
        if len(self._blocks) != sum(key is not None for key in self._keys):
            raise self._broken("a key leads to a block that does not hold it")

    def _whole(self) -> bool:
        """Whether nobody holds a block and all are in their places: what `check` finds of each, asked of all at once."""
        free, cached = set(self._free), self._cached
        placed = len(free) == len(self._free) and free.isdisjoint(cached) and len(free) + len(cached) == self.count
        keyed = self._keys.count(None) == len(free) and len(self._blocks) == len(cached)
        found = all(self._blocks.get(self._keys[block] or b"") == block for block in cached)
        return not any(self._references) and placed and keyed and found

    def _broken(self, what: str) -> EngineError:
        return EngineError(
            "the KV block accounting is broken", held=what, why="blocks would leak or be written by two requests",
            next="report this with the log",
        )  # fmt: skip


class KvForecast:
    """The KV tokens that requests will hold, if each goes on by one token a step to its limit and then leaves.

    capacity: tokens that they may hold together. slack: what one may hold beyond its tokens, since blocks are whole.
    """

    def __init__(self, capacity: int, slack: int) -> None:
        self._capacity, self._slack = capacity, slack
        self._to_go: list[tuple[int, int]] = []  # (tokens to go, negative; tokens held)
        self._together = 0  # what they would hold if all ended at once: no less than the peak

    def add(self, held: int, to_go: int | None) -> None:
        """One more request, with so many tokens now and so many to its limit. None: it may end at any time, so that nothing is set
        aside for what it will take, and nothing is hoped for from its end."""
        if to_go is None:
            self._capacity -= held + self._slack
        else:
            self._to_go.append((-to_go, held))
            self._together += held + to_go + self._slack

    def admits(self, held: int, to_go: int | None, *, anyway: bool = False) -> bool:
        """Whether all of them and this one would have their blocks to the end. If so, or `anyway`, it is added."""
        before = self._capacity, self._together
        self.add(held, to_go)
        if anyway or self._together <= self._capacity or self._peak() <= self._capacity:
            return True
        self._capacity, self._together = before
        if to_go is not None:
            self._to_go.remove((-to_go, held))
        return False

    def _peak(self) -> int:
        """Before each departure those that stay have grown by as many tokens as the one that leaves."""
        self._to_go.sort()
        most = together = 0
        for count, (to_go, held) in enumerate(self._to_go, start=1):
            together += held
            most = max(most, together + count * (self._slack - to_go))
        return most
