# SPDX-License-Identifier: Apache-2.0
"""Which prefixes have a state, and in which order states are copied."""

from __future__ import annotations

from phalanx.config import SamplingParams
from phalanx.engine.blocks import BlockPool
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import AddRequest
from phalanx.engine.request import Request
from phalanx.engine.request_blocks import RequestBlocks
from phalanx.engine.state_snapshots import StateSnapshots

A, B, C = b"a", b"b", b"c"
SLOTS, SIZE = 4, 8


def snapshots(count: int, *kept: bytes) -> StateSnapshots:
    states = StateSnapshots(SLOTS, count)
    for key in kept:
        states.keep(0, key)
        states.begin_step()
    states.take_copies()
    return states


def test_a_state_is_copied_before_the_step_behind_the_one_that_computes_it() -> None:
    states = StateSnapshots(SLOTS, 2)
    states.keep(3, A)
    assert states.take_copies() == []
    states.begin_step()
    states.restore(A, 1)
    assert states.take_copies() == [(3, 4), (4, 1)]
    assert states.take_copies() == []


def test_the_least_recently_used_gives_way_and_is_read_before_it_is_overwritten() -> None:
    states = snapshots(2, A, B)
    states.restore(A, 0)
    states.restore(B, 1)
    states.restore(A, 2)
    states.keep(3, C)
    states.begin_step()
    assert states.take_copies() == [(4, 0), (5, 1), (4, 2), (3, 5)]


def test_a_prefix_that_has_a_state_is_not_copied_again() -> None:
    states = snapshots(2, A, B)
    states.keep(1, A)
    states.begin_step()
    assert states.take_copies() == []
    states.keep(1, C)
    states.begin_step()
    assert states.take_copies() == [(1, 5)]  # B, since A was used


def test_a_hit_needs_blocks_and_the_state_behind_the_last() -> None:
    pool, keys = BlockPool(3), [A, B, C]
    blocks = pool.take(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    assert snapshots(3).longest(pool, keys, SIZE, (None,)) == []
    assert snapshots(3, B).longest(pool, keys, SIZE, (None,)) == blocks[:2]
    assert snapshots(3, A, C).longest(pool, keys, SIZE, (None,)) == blocks
    assert snapshots(3, A, C).longest(pool, keys[:2], SIZE, (None,)) == blocks[:1]
    assert snapshots(3, B).longest(pool, keys, SIZE, (SIZE,)) == [-1, blocks[1]]
    pool.release([blocks[1]])
    pool.take(1)  # of B
    assert snapshots(3, A, C).longest(pool, keys, SIZE, (None,)) == blocks[:1]
    assert snapshots(3, C).longest(pool, keys, SIZE, (SIZE,)) == [-1, -1, blocks[2]]


def kept_at(kv: RequestBlocks, tokens: list[int], **params: object) -> list[int]:
    """Where a request with this prompt keeps its state; it computes all of it, and ends."""
    add = AddRequest("r", tokens, SamplingParams(**params))  # type: ignore[arg-type]
    request = Request(add, seed=0, limit=len(tokens) + 1, matcher=None)
    request.slot, hit = 0, kv.prefix_hit(request)
    kv.share(request, hit)
    request.submitted = len(hit) * SIZE
    kept = request.kept_at
    for end in [*kept, len(tokens)]:
        assert kv.until_kept(request, 100) == (100 if end == len(tokens) else end - request.submitted)
        kv.take(request, kv.blocks_for(end) - len(request.blocks))
        request.submitted = end
        kv.keep_state(request)
    kv.release(request)
    kv.states.begin_step()
    return kept


def test_a_state_is_kept_behind_a_prompt_and_where_prompts_part() -> None:
    options = SchedulerOptions(64, SIZE, SLOTS, 64, 256, state_snapshots=8, least_kept=2 * SIZE)
    kv, system = RequestBlocks(options), list(range(5 * SIZE))
    assert kept_at(kv, system[:SIZE]) == []
    assert kept_at(kv, system[: 2 * SIZE]) == []  # its last token is always computed
    assert kept_at(kv, system + [100] * 2 * SIZE) == [2 * SIZE, 6 * SIZE]
    assert kept_at(kv, system + [200] * (2 * SIZE + 3)) == [5 * SIZE, 7 * SIZE]
    assert kept_at(kv, system + [300] * (SIZE + 3)) == []  # begins behind the system prompt, and has too little of its own
    assert kept_at(kv, system + [300] * 4 * SIZE) == [8 * SIZE]
    assert kept_at(kv, [7] * 4 * SIZE, prompt_logprobs=1) == []  # has no prefix hits


def test_states_of_other_weights_are_no_hit_and_are_copied_anew() -> None:
    pool, keys = BlockPool(2), [A, B]
    for block, key in zip(pool.take(2), keys, strict=True):
        pool.register(block, key)
    states = snapshots(2, A, B)
    states.keep(0, C)
    states.forget()
    assert states.longest(pool, keys, SIZE, (None,)) == []
    states.begin_step()
    assert states.take_copies() == []
    states.keep(1, A)
    states.keep(2, B)
    states.begin_step()
    assert sorted(place for _, place in states.take_copies()) == [4, 5]
