# SPDX-License-Identifier: Apache-2.0
"""Which prefixes have a state, and in which order states are copied."""

from __future__ import annotations

from phalanx.config import SamplingParams
from phalanx.engine.blocks import BlockPool
from phalanx.engine.host_blocks import HostBlocks
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import AddRequest, BlockCopy, Stats
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


def with_host(count: int, on_host: int, *kept: bytes) -> StateSnapshots:
    """States that steps before have kept."""
    states = StateSnapshots(SLOTS, count, HostBlocks(on_host))
    for key in kept:
        states.keep(0, key)
        states.begin_step()
        states.take_copies()
        states.host.take_copies()
    states.check()
    return states


def test_a_state_that_gives_way_goes_to_host_memory_and_comes_back_to_the_slot_of_a_request() -> None:
    pool, states = BlockPool(2), with_host(1, 2, A)
    blocks = pool.take(2)
    for block, key in zip(blocks, [A, B], strict=True):
        pool.register(block, key)
    states.keep(3, B)
    states.begin_step()
    assert states.take_copies() == [(3, 4)]
    assert states.host.take_copies() == ([BlockCopy(4, 0, 1)], []), "A's place is read before it is written"
    assert [states.only_on_host(key) for key in (A, B, C)] == [True, False, False]
    assert states.longest(pool, [A], SIZE, (None,)) == blocks[:1]
    assert states.longest(pool, [A, B], SIZE, (None,)) == blocks
    assert (states.restore(A, 2), states.restore(B, 1)) == (True, False)
    assert states.take_copies() == [(4, 1)]
    assert states.host.take_copies() == ([], [BlockCopy(2, 0, 1)])
    states.write(stats := Stats())
    assert (stats.host_states, stats.host_states_used) == (2, 1), "what comes back stays there"
    states.check()


def test_a_state_whose_place_is_written_in_the_same_step_leaves_from_its_slot() -> None:
    states = with_host(1, 2, A)
    states.keep(1, B)
    states.keep(2, C)
    states.begin_step()
    assert states.take_copies() == [(1, 4), (2, 4)]
    assert states.host.take_copies()[0] == [BlockCopy(4, 0, 1), BlockCopy(1, 1, 1)]
    states.keep(3, A)
    states.begin_step()
    assert states.host.take_copies()[0] == [BlockCopy(4, 0, 2)], "of the next step, C's place again; B was the least recently used"


def test_a_slot_that_another_request_gets_in_the_same_step_is_not_loaded() -> None:
    states = with_host(1, 1, A, B)
    assert states.restore(A, 2)
    assert not states.restore(B, 2), "the first was preempted"
    assert (states.take_copies(), states.host.take_copies()) == ([(4, 2)], ([], []))
    states.check()


def test_states_of_other_weights_are_not_found_in_host_memory() -> None:
    states = with_host(1, 1, A, B)
    states.forget()
    assert not states.only_on_host(A)
    assert states.host.used == 0
    states.check()


def request_of(kv: RequestBlocks, number: int) -> Request:
    """A request whose prefix of two blocks is in the cache of the device, and its state in host memory alone."""
    request = Request(AddRequest(f"{number}", [number] * 17, SamplingParams()), seed=0, limit=64, matcher=None)
    kv.prefix_hit(request)
    blocks = kv.pool.take(2)
    for block, key in zip(blocks, request.keys, strict=True):
        kv.pool.register(block, key)
    kv.pool.release(blocks)
    for key in (request.keys[1], b"another"):
        kv.states.keep(0, key)
        kv.states.begin_step()
        kv.states.host.take_copies()
    return request


def test_a_step_loads_two_states_beside_requests_that_run_and_counts_their_prefixes_as_found_on_the_host() -> None:
    kv = RequestBlocks(SchedulerOptions(64, SIZE, SLOTS, 64, 64, state_snapshots=1, host_blocks=8, host_states=8))
    requests = [request_of(kv, number) for number in range(1, 4)]
    for slot, request in enumerate(requests):
        request.slot, hit = slot, kv.prefix_hit(request)
        assert len(hit) == 2
        assert kv.loads_at_once(request, hit) == (slot < 2)
        if slot < 2:
            assert kv.share(request, hit) == 2 * SIZE
    hit = kv.prefix_hit(requests[2])
    kv.load_part(requests[2], hit)
    assert len(kv.states.host.take_copies()[1]) == 2
    assert kv.loads_at_once(requests[2], hit), "the next step has room"
    assert kv.pool.referenced == 4, "of the two that have slots"
