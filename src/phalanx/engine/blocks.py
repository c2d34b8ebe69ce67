# SPDX-License-Identifier: Apache-2.0
"""The KV block pool: which blocks are free, how often the others are referenced, and which content can be found again.

A block is in exactly one of three states:

    free        no request references it and its content has no key
    cached      no request references it, but its content has a key; the least recently used is evicted when none is free
    referenced  by one or more requests, with or without a key

What is evicted goes to host memory, where there is some for it (`host_blocks`), and is found there.

Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from phalanx.engine.host_blocks import HostBlocks, entry_of
from phalanx.errors import EngineError


class BlockPool:
    """Block ids 0 .. count-1 of one dp index, and host memory."""

    def __init__(self, count: int, host: HostBlocks | None = None) -> None:
        self.count, self.host = count, host or HostBlocks(0)
        self._brought: set[int] = set()  # blocks whose content came from host memory, and was no hit yet
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
        """Blocks that requests reference."""
        return self.count - len(self._free) - len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without a reference whose content can still be found."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Blocks for one writer, each with one reference and without content. The caller has checked `available`."""
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._evict(block)
            self.host.taken(block)
            self._brought.discard(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def take_loaded(self, entries: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """As `take`: blocks that get the contents of these slots of host memory before the next step, and are found by these
        keys. entries: as `find` returned them for the keys."""
        slots = [entry_of(entry) for entry in entries]
        self.host.reserve(slots, keys)
        blocks = self.take(len(slots))
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            self.host.load(slot, block)
            self.register(block, key)
        self._brought.update(blocks)
        return blocks

    def first_hit(self, block: int) -> bool:
        """Whether its content came from host memory, and nobody has asked this since."""
        brought = block in self._brought
        self._brought.discard(block)
        return brought

    def share(self, block: int) -> None:
        """Add a reference to a block with content, as `find` returned it."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each. The first block is evicted first, so a sequence is released from its end."""
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

    def register(self, block: int, key: bytes) -> None:
        """Let a referenced block be found by its content's key. A key that another block has already stays there."""
        if key not in self._blocks and self._keys[block] is None:
            self._blocks[key] = block
            self._keys[block] = key

    def find(self, key: bytes) -> int | None:
        """The block with this content, or the entry of a slot of host memory (`entry_of`); None where there is none."""
        block = self._blocks.get(key)
        if block is None and (slot := self.host.find(key)) is not None:
            return entry_of(slot)
        return block

    def forget(self) -> None:
        """No content is found any more: cached blocks are free, and those that requests reference have no key."""
        self.host.forget()
        self._free += reversed(self._cached)
        self._cached.clear()
        self._keys = [None] * self.count
        self._blocks.clear()
        self._brought.clear()

    def idle(self, block: int) -> bool:
        """Whether no request references the block."""
        return self._references[block] == 0

    def _evict(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self.host.save(block, key)
            del self._blocks[key]
            self._keys[block] = None

    def check(self, request_blocks: Iterable[Sequence[int]]) -> None:
        """Verify the accounting against the blocks of every request that has some (-1: none at that place).

        Raises EngineError naming the first contradiction. O(count): some milliseconds for 100,000 blocks without a reference.
        """
        self.host.check()
        expected = Counter(block for blocks in request_blocks for block in blocks if block >= 0)
        if not expected and self._all_idle():
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

    def _all_idle(self) -> bool:
        """Whether no block has a reference and all are in their places: the checks of `check`, for all blocks at once."""
        free, cached = set(self._free), self._cached
        placed = len(free) == len(self._free) and free.isdisjoint(cached) and len(free) + len(cached) == self.count
        keyed = self._keys.count(None) == len(free) and len(self._blocks) == len(cached)
        findable = all(self._blocks.get(self._keys[block] or b"") == block for block in cached)
        return not any(self._references) and placed and keyed and findable

    def _broken(self, what: str) -> EngineError:
        return EngineError(
            "the KV block accounting is broken", held=what, why="blocks would leak or be written by two requests",
            next="report this with the log",
        )  # fmt: skip
