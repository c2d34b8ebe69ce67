# SPDX-License-Identifier: Apache-2.0
"""The block pool: three states, and a check that sees each way to break them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.engine.blocks import BlockPool
from phalanx.errors import EngineError


def test_blocks_without_content_go_first_and_the_oldest_content_next() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    assert first == [0, 1, 2]
    for block in (0, 1):
        pool.register(block, b"%d" % block)
    pool.release([1, 0, 2])
    assert (pool.referenced, pool.cached, pool.available) == (0, 2, 4)
    assert pool.take(2) == [2, 3]
    assert pool.take(1) == [1], "released before block 0"
    assert pool.find(b"1") is None
    assert pool.find(b"0") == 0


def test_a_shared_block_is_free_when_the_last_holder_is_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.register(block, b"key")
    pool.share(block)
    pool.release([block])
    assert not pool.idle(block)
    pool.check([[block]])
    pool.release([block])
    assert pool.idle(block)
    assert pool.find(b"key") == block
    pool.share(block)
    assert (pool.referenced, pool.cached) == (1, 0)


def test_equal_content_is_found_in_the_first_block_that_had_it() -> None:
    pool = BlockPool(2)
    a, b = pool.take(2)
    pool.register(a, b"key")
    pool.register(b, b"key")
    assert pool.find(b"key") == a
    pool.release([b])
    assert pool.cached == 0
    pool.check([[a]])


def test_releasing_twice_is_seen_at_once() -> None:
    pool = BlockPool(1)
    pool.release(pool.take(1))
    with pytest.raises(EngineError, match="more often"):
        pool.release([0])


def _count(pool: BlockPool) -> None:
    pool._references[0] += 1


def _free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def _lost(pool: BlockPool) -> None:
    pool._free.pop()


def _key_lost(pool: BlockPool) -> None:
    pool._keys[1] = None


def _stray_key(pool: BlockPool) -> None:
    pool._blocks[b"stray"] = 3


@pytest.mark.parametrize("damage", [_count, _free_twice, _lost, _key_lost, _stray_key])
def test_the_check_sees_damage(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.register(1, b"key")
    pool.release([1])
    pool.check([blocks[:1]])
    damage(pool)
    with pytest.raises(EngineError, match="accounting is broken"):
        pool.check([blocks[:1]])


@pytest.mark.parametrize("damage", [_count, _free_twice, _lost, _key_lost, _stray_key])
def test_the_check_sees_damage_where_nobody_holds_a_block(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    pool.take(2)
    pool.register(1, b"key")
    pool.release([1, 0])
    pool.check([])
    damage(pool)
    with pytest.raises(EngineError, match="accounting is broken"):
        pool.check([])


class Pool(RuleBasedStateMachine):
    """Any order of the operations keeps the accounting whole."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.blocks: list[int] = []
        self.keys = 0

    @precondition(lambda self: self.pool.available)
    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        taken = self.pool.take(min(count, self.pool.available))
        assert not set(taken) & set(self.blocks)
        self.blocks += taken

    @precondition(lambda self: self.blocks)
    @rule(index=st.integers(0, 99), fresh=st.booleans())
    def name(self, index: int, fresh: bool) -> None:
        self.keys += fresh
        self.pool.register(self.blocks[index % len(self.blocks)], b"%d" % self.keys)

    @rule(back=st.integers(0, 3))
    def share(self, back: int) -> None:
        block = self.pool.find(b"%d" % (self.keys - back))
        if block is not None:
            self.pool.share(block)
            self.blocks.append(block)

    @precondition(lambda self: self.blocks)
    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        self.pool.release([self.blocks.pop(index % len(self.blocks))])

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check([self.blocks])
        assert self.pool.referenced == len(set(self.blocks))
        assert self.pool.referenced + self.pool.available == 6


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
