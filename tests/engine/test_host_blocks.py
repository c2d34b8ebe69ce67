# SPDX-License-Identifier: Apache-2.0
"""KV blocks in host memory: which slot has what, and that every block of a hit has its content, whatever is evicted meanwhile."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from phalanx.config import SamplingParams
from phalanx.engine.blocks import BlockPool
from phalanx.engine.dp_scheduler import DpIndex
from phalanx.engine.fake import FakeExecutor, fake_tokens
from phalanx.engine.host_blocks import HostBlocks, entry_of
from phalanx.engine.limits import SchedulerOptions, depth_of
from phalanx.engine.messages import AddRequest, BlockCopy, RequestUpdate, StepResult
from phalanx.engine.prefix import group_key
from phalanx.engine.request import Request
from phalanx.engine.request_blocks import RequestBlocks
from phalanx.engine.scheduler import Scheduler
from phalanx.errors import EngineError, StepDiverged
from tests.support.engine_client import each_update
from tests.support.engine_drafts import proposer
from tests.support.engine_grammar import VOCAB
from tests.support.fuzz import fuzz_seeds

SIZE, NEW = 2, 8


def evicted(pool: BlockPool, *keys: bytes) -> None:
    """These were on the device, and have left."""
    blocks = pool.take(pool.count)
    for block, key in zip(blocks, keys, strict=False):
        pool.register(block, key)
    pool.release(blocks)
    pool.release(pool.take(pool.count))


def test_what_leaves_the_device_is_found_in_host_memory_and_comes_back() -> None:
    pool = BlockPool(2, HostBlocks(2))
    evicted(pool, b"a", b"b")
    assert pool.host.take_copies() == ([BlockCopy(0, 0, 1), BlockCopy(1, 1, 1)], [])
    entry = pool.find(b"b")
    assert entry == entry_of(1)
    assert entry_of(entry) == 1
    (block,) = pool.take_loaded([entry], [b"b"])
    assert pool.find(b"b") == block
    assert pool.host.take_copies() == ([], [BlockCopy(block, 1, 1)])
    pool.release([block])
    pool.release(pool.take(2))
    assert pool.host.take_copies() == ([], []), "its content is there, and is not copied again"
    assert pool.find(b"b") == entry


def test_the_least_recently_used_gives_way_and_a_slot_has_another_generation_then() -> None:
    pool = BlockPool(3, HostBlocks(2))
    evicted(pool, b"a", b"b")
    pool.host.take_copies()
    (block,) = pool.take_loaded([entry_of(0)], [b"a"])
    pool.host.take_copies()
    evicted_block = pool.take(1)
    pool.register(evicted_block[0], b"c")
    pool.release(evicted_block)
    pool.release(pool.take(2))
    assert pool.find(b"b") is None
    assert pool.host.take_copies() == ([BlockCopy(evicted_block[0], 1, 2)], [])
    pool.check([[block]])


def test_a_slot_that_the_step_reads_is_not_written_in_it() -> None:
    host = HostBlocks(1)
    host.save(5, b"a")
    host.take_copies()
    host.reserve([0], [b"a"])
    host.load(0, 7)
    host.save(6, b"b")
    assert (host.find(b"b"), host.dropped) == (None, 1)
    assert host.take_copies() == ([], [BlockCopy(7, 0, 1)])
    host.save(6, b"b")
    assert host.find(b"a") is None
    assert host.take_copies() == ([BlockCopy(6, 0, 2)], [])


def test_a_block_that_is_taken_again_before_its_copy_is_not_written() -> None:
    pool = BlockPool(1, HostBlocks(1))
    evicted(pool, b"a")
    pool.host.take_copies()
    pool.release(pool.take_loaded([entry_of(0)], [b"a"]))  # its request is preempted in the step that admitted it
    pool.take(1)
    assert pool.host.take_copies() == ([], [])
    assert pool.find(b"a") == entry_of(0)
    pool.host.check()


def test_a_long_hit_does_not_push_out_what_is_to_come_behind_it() -> None:
    """Host memory is full, and its oldest content is the hit, whose parts evict blocks of the device meanwhile."""
    kv = RequestBlocks(SchedulerOptions(8, SIZE, 4, 64, 64, host_blocks=16, copied_blocks=2))
    requests = [
        Request(AddRequest(f"{number}", [number] * 17, SamplingParams()), seed=0, limit=64, matcher=None) for number in range(3)
    ]
    for request in requests:
        kv.prefix_hit(request)
        for key in request.keys:
            [block] = kv.pool.take(1)
            kv.pool.register(block, group_key(key, 0))
            kv.pool.release([block])
            kv.pool.host.take_copies()
    first = requests[0]
    assert all(block < -1 for block in kv.prefix_hit(first))
    steps = 0
    while not kv.loads_at_once(first, hit := kv.prefix_hit(first)):
        kv.load_part(first, hit)
        kv.pool.host.take_copies()
        steps += 1
    assert steps == 3
    assert len(kv.prefix_hit(first)) == 8, "all of it is still there"


def test_hits_on_the_device_do_not_wait_for_those_that_are_loaded() -> None:
    kv = RequestBlocks(SchedulerOptions(8, SIZE, 4, 64, 64, host_blocks=8, copied_blocks=1))
    kv.pool.host._in = {0: 0, 1: 1}  # what was loaded at once, when nothing ran
    assert kv.loads_at_once(Request(AddRequest("r", [1], SamplingParams()), seed=0, limit=2, matcher=None), [])


def test_a_step_has_a_bound_on_copies_out_and_what_is_beyond_is_counted() -> None:
    host = HostBlocks(9, bound=2)
    for block, key in enumerate((b"a", b"b", b"c")):
        host.save(block, key)
    assert (host.find(b"c"), host.dropped) == (None, 1)
    assert len(host.take_copies()[0]) == 2
    host.allow(1)
    for block, key in enumerate((b"d", b"e", b"f", b"g", b"a")):
        host.save(block, key)
    assert (host.dropped, host.used) == (2, 5)
    assert len(host.take_copies()[0]) == 3


def test_prompts_and_loads_have_copies_out_for_what_gives_way_to_them() -> None:
    """Everything that leaves the device is kept, though a step has one copy out beside these."""
    kv = RequestBlocks(SchedulerOptions(8, SIZE, 4, 64, 64, host_blocks=99, copied_blocks=1))
    for number in [0, 1, 2, 0]:
        request = Request(AddRequest(f"{number}", [number] * 16, SamplingParams()), seed=0, limit=64, matcher=None)
        kv.share(request, kv.prefix_hit(request))
        kv.take_ahead(request, 16, 16, kept=0)
        request.submitted = 16
        kv.release(request)
        kv.pool.host.take_copies()
    assert (kv.pool.host.used, kv.pool.host.dropped) == (24, 0)
    request.decoding = True
    kv.share(request, [])
    kv.take_ahead(request, 6, 6, kept=0)
    assert kv.pool.host.dropped == 0, "these were copied before"


def test_what_a_load_brought_counts_as_from_host_memory_for_the_first_that_has_it() -> None:
    kv = RequestBlocks(SchedulerOptions(8, SIZE, 4, 64, 64, host_blocks=16, copied_blocks=3))
    one, other = (Request(AddRequest(name, [1] * 9, SamplingParams()), seed=0, limit=64, matcher=None) for name in "ab")
    kv.prefix_hit(one)
    evicted(kv.pool, *(group_key(key, 0) for key in one.keys[:3]))
    kv.pool.host.take_copies()
    kv.load_part(one, kv.prefix_hit(one))  # its request waits
    kv.pool.host.take_copies()
    hit = kv.prefix_hit(other)
    assert len(hit) == 3
    assert min(hit) >= 0
    assert kv.share(other, hit) == 3 * SIZE
    assert kv.share(one, kv.prefix_hit(one)) == 0, "the other left it on the device"


def test_an_index_counts_the_blocks_that_a_hit_in_host_memory_takes() -> None:
    """A request whose prefix is there needs as many blocks as one that computes it."""
    index = DpIndex(SchedulerOptions(8, SIZE, 4, 64, 64, host_blocks=16))
    request = Request(AddRequest("a", [1] * 15, SamplingParams()), seed=0, limit=64, matcher=None)
    index.kv.prefix_hit(request)
    evicted(index.kv.pool, *(group_key(key, 0) for key in request.keys))
    running = Request(AddRequest("b", [2] * 3, SamplingParams()), seed=0, limit=64, matcher=None)
    index.running.append(running)
    assert index.load_with(request, index.load()) is None, "7 blocks of the hit, one beside, and one for the other to grow"
    index.running.clear()
    assert index.load_with(request, index.load()) == 1


def test_nothing_is_left_when_prefixes_are_forgotten() -> None:
    pool = BlockPool(2, HostBlocks(2))
    evicted(pool, b"a", b"b")
    pool.take_loaded([entry_of(0)], [b"a"])
    pool.forget()
    assert (pool.find(b"a"), pool.find(b"b"), pool.host.used) == (None, None, 0)
    assert pool.host.take_copies() == ([], [])
    pool.host.check()


@pytest.mark.parametrize("damage", ["lost", "read"])
def test_the_check_sees_damage(damage: str) -> None:
    host = HostBlocks(2)
    host.save(0, b"a")
    if damage == "lost":
        host._free.pop()
    else:
        host._readers[0] = 1
    with pytest.raises(EngineError, match="in host memory is broken"):
        host.check()


# ---- any order of requests, with less memory than they want ---------------------------------------------------------------------


@dataclass
class Memories:
    """The contents of device and host, which change as steps say, later than these are made."""

    device: dict[int, bytes] = field(default_factory=dict)
    slots: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    loads: int = 0

    def run(self, saved: list[BlockCopy], loaded: list[BlockCopy], reads: dict[int, bytes], writes: dict[int, bytes]) -> None:
        for copy in saved:
            self.slots[copy.slot] = copy.generation, self.device[copy.block]
        for copy in loaded:
            generation, content = self.slots[copy.slot]
            assert generation == copy.generation
            self.device[copy.block] = content
            self.loads += 1
        for block, digest in reads.items():
            assert self.device[block] == digest, "a request reads what is not its own past"
        self.device |= writes


def digest_of(tokens: list[int]) -> bytes:
    return hashlib.sha256(bytes(tokens)).digest()


def run_random_requests(seed: int, memories: Memories) -> None:
    """Prompts with common beginnings come, read and write their blocks, and leave, with a pool that is always full."""
    chance = random.Random(seed)
    windows = chance.choice([(None,), (None,), (None, 3), (4, 7)])
    groups, blocks = len(windows), len(windows) * chance.randrange(8, 14)
    options = SchedulerOptions(blocks, SIZE, 4, 64, 64, windows=windows, host_blocks=chance.choice([1, 5, 30]))
    kv = RequestBlocks(options)
    running: list[Request] = []
    late: deque[tuple[list[BlockCopy], list[BlockCopy], dict[int, bytes], dict[int, bytes]]] = deque()
    for number in range(120):
        while running and (chance.random() < 0.4 or len(running) == 4):
            kv.release(running.pop(chance.randrange(len(running))))
        root = chance.randrange(5)
        tokens = [root] * (SIZE * chance.randrange(1, 7)) + [chance.randrange(3)] * chance.randrange(1, 3)
        request = Request(AddRequest(str(number), tokens, SamplingParams()), seed=0, limit=99, matcher=None)
        hit = kv.prefix_hit(request)
        entries, more = len(hit), kv.blocks_for(len(tokens)) - len(hit) // groups
        if kv.unreferenced(hit) + more * groups > kv.pool.available:
            continue
        kv.share(request, hit)
        kv.take(request, more)
        contents = {
            block: digest_of([place % groups, *tokens[: (place // groups + 1) * SIZE]])
            for place, block in enumerate(request.blocks) if block >= 0
        }  # fmt: skip
        shared = set(request.blocks[:entries])
        reads = {block: content for block, content in contents.items() if block in shared}
        late.append((*kv.pool.host.take_copies(), reads, {b: c for b, c in contents.items() if b not in shared}))
        request.submitted = len(tokens)
        running.append(request)
        kv.register(request)
        kv.pool.check([each.blocks for each in running])
        while late and chance.random() < 0.5:
            memories.run(*late.popleft())
    for step in late:
        memories.run(*step)


def test_each_hit_reads_its_own_past_whatever_is_evicted() -> None:
    loads = 0
    with fuzz_seeds(60) as seeds:
        for seed in seeds:
            memories = Memories()
            run_random_requests(seed, memories)
            loads += memories.loads
    assert loads > 500


class Faulty(Memories):
    """Its host memory loses what the third copy wrote."""

    def run(self, saved: list[BlockCopy], *rest: object) -> None:
        super().run(saved, *rest)  # type: ignore[arg-type]
        for copy in saved:
            self.slots[copy.slot] = copy.generation, b"other"


def test_a_wrong_block_in_host_memory_is_seen_at_the_hit() -> None:
    with pytest.raises(AssertionError, match="not its own past"):
        run_random_requests(0, Faulty())


# ---- the scheduler --------------------------------------------------------------------------------------------------------------


def conversations(turns: int, host_blocks: int, *, corrupt: bool = False) -> Scheduler:
    """Four conversations take turns on a device that holds the KV cache of two; each prompt is the one before and more."""
    sizes = {"num_blocks": 24, "block_size": 4, "max_batch_size": 2, "max_num_tokens": 32, "max_seq_len": 64}
    scheduler = Scheduler(SchedulerOptions(**sizes, host_blocks=host_blocks))  # type: ignore[arg-type]
    ranks = FakeExecutor.of(vocab_size=97, thorough=True, host_blocks=host_blocks, **sizes)  # type: ignore[arg-type]
    for turn in range(turns):
        for user in range(4):
            prompt = [user, *range(8 * (turn + 1))]
            scheduler.add(AddRequest(f"{user}.{turn}", prompt, SamplingParams(max_tokens=4, temperature=0.0)))
            while not scheduler.idle:
                if (step := scheduler.schedule()) is not None:
                    ranks.submit(step)
                    for result in ranks.collect():
                        scheduler.process_result(result)
                if corrupt:
                    checker = ranks.checkers[0]
                    checker.host = [(generation, [(0, 0, 0)] * 4) for generation, _ in checker.host]
    ranks.shutdown()
    scheduler.check()
    return scheduler


def test_conversations_that_the_device_cannot_hold_are_hits_with_host_memory() -> None:
    without, with_tier = conversations(5, 0).stats(), conversations(5, 100).stats()
    assert without.prefix_hits < 0.3 * without.prefix_queries
    assert with_tier.prefix_hits > 0.6 * with_tier.prefix_queries
    assert with_tier.prefix_queries == without.prefix_queries
    assert 0 < with_tier.host_hits <= with_tier.prefix_hits
    assert with_tier.host_loaded * 4 >= with_tier.host_hits
    assert (with_tier.host_total, without.host_hits, without.host_saved) == (100, 0, 0)
    assert 0 < with_tier.host_used <= with_tier.host_saved


def crowd(seed: int) -> Scheduler:
    """Requests that begin alike come at random to a device that holds little more than one of them. Each has the tokens that it has
    alone; the ranks check what each row reads."""
    chance = random.Random(seed)
    windows, stages = chance.choice([(None,), (None,), (None, 5), (None, None, 9), (7,)]), chance.choice([1, 1, 2])
    drafts, host_blocks, loaded = chance.choice([0, 0, 3]), chance.choice([3, 20, 200]), chance.choice([1, 3, 64])
    sizes: dict[str, Any] = {
        "num_blocks": len(windows) * chance.randrange(14, 24), "block_size": 4, "max_batch_size": 4, "windows": windows,
        "max_num_tokens": chance.choice([8, 40]), "max_seq_len": 48, "pipeline_stages": stages,
    }  # fmt: skip
    depth = depth_of(stages, returns_tokens=False)
    scheduler = Scheduler(
        SchedulerOptions(
            **sizes, depth=depth, max_drafts=drafts, host_blocks=host_blocks, copied_blocks=loaded, vocab_size=VOCAB
        )
    )  # fmt: skip
    ranks = FakeExecutor.of(
        vocab_size=VOCAB, thorough=True, host_blocks=host_blocks, propose=proposer(chance, 0.7) if drafts else None, **sizes
    )  # fmt: skip
    roots = [[chance.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    prompts: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    results: deque[StepResult] = deque()
    while len(prompts) < 60 or not scheduler.idle:
        if len(prompts) < 60 and chance.random() < 0.3:
            name = str(len(prompts))
            prompts[name], tokens[name] = chance.choice(roots)[: chance.randrange(8, 40)], []
            scheduler.add(AddRequest(name, prompts[name], SamplingParams(max_tokens=NEW, temperature=0.0), stop_token_ids=[0]))
        if chance.random() < 0.6 and (step := scheduler.schedule()) is not None:
            ranks.submit(step)
            results += ranks.collect()
        elif results:
            for update in each_update(scheduler.process_result(results.popleft())):
                assert isinstance(update, RequestUpdate)
                tokens[update.request_id] += update.tokens
    ranks.shutdown()
    scheduler.check()
    for name, prompt in prompts.items():
        alone = fake_tokens(prompt, SamplingParams(temperature=0.0), seed=0, vocab_size=VOCAB, count=NEW)
        assert tokens[name] == alone[: len(tokens[name])], name
        assert len(tokens[name]) == NEW or 0 in alone[: len(tokens[name]) + 1]
    return scheduler


def test_requests_of_a_crowd_have_the_tokens_that_each_has_alone() -> None:
    loads = preemptions = 0
    with fuzz_seeds(20) as seeds:
        for seed in seeds:
            stats = crowd(seed).stats()
            loads, preemptions = loads + stats.host_loaded, preemptions + stats.preemptions
    print(f"{seeds.count} crowds: {loads} blocks from host memory, {preemptions} preemptions")
    assert loads > 500
    assert preemptions > 5


def test_long_hits_come_in_parts_while_others_run() -> None:
    """The others' steps go on meanwhile; then the whole prefix is a hit. Without others it comes at once."""
    sizes = {"num_blocks": 40, "block_size": 4, "max_batch_size": 2, "max_num_tokens": 64, "max_seq_len": 128}
    scheduler = Scheduler(SchedulerOptions(**sizes, host_blocks=100, copied_blocks=3))  # type: ignore[arg-type]
    ranks = FakeExecutor.of(vocab_size=97, thorough=True, host_blocks=100, **sizes)  # type: ignore[arg-type]
    loaded: list[tuple[int, int]] = []  # of each step: blocks, and rows

    def run(until: Callable[[], bool]) -> None:
        while not until():
            if (step := scheduler.schedule()) is not None:
                loaded.append((len(step.batches[0].loaded), len(step.batches[0].rows)))
                ranks.submit(step)
                for result in ranks.collect():
                    scheduler.process_result(result)

    def add(name: str, prompt: Sequence[int], new: int) -> None:
        scheduler.add(AddRequest(name, list(prompt), SamplingParams(max_tokens=new, temperature=0.0)))

    prompts = [[(7 * number + first) % 97 for number in range(90)] for first in range(3)]
    for first, prompt in enumerate(prompts):
        add(f"fill {first}", prompt, 1)
        run(lambda: scheduler.idle)
    loaded.clear()
    add("other", [5, 5, 5], 60)
    run(lambda: scheduler.stats().generation_tokens >= 4)
    before = scheduler.stats().prefix_hits
    add("again", prompts[0][:45], 2)
    run(lambda: scheduler.idle)
    parts = [count for count, _ in loaded if count]
    assert len(parts) >= 2
    assert max(parts) <= 3
    assert all(rows for count, rows in loaded if count), "who runs goes on"
    assert scheduler.stats().prefix_hits - before == 44
    assert scheduler.stats().host_hits >= 4 * sum(parts)
    add("once more", prompts[1], 1)
    loaded.clear()
    run(lambda: scheduler.idle)
    assert max(count for count, _ in loaded) > 3
    ranks.shutdown()
    scheduler.check()


def loading_queue(slots: int, blocks: int = 60, **options: Any) -> tuple[Scheduler, Callable[..., None], Callable[[], list[str]]]:
    """A scheduler with a request that runs for long, and prompts in host memory of 22 blocks, of which one comes in a step. Returns
    it, how to add a request, and a step, which returns whom it admits."""
    sizes = {"num_blocks": blocks, "block_size": 4, "max_batch_size": slots, "max_num_tokens": 64, "max_seq_len": 128, **options}
    scheduler = Scheduler(SchedulerOptions(**sizes, host_blocks=200, copied_blocks=1))
    ranks = FakeExecutor.of(vocab_size=97, thorough=True, host_blocks=200, **sizes)
    names: dict[tuple[int, ...], str] = {}

    def add(name: str, prompt: Sequence[int], new: int = 1) -> None:
        names[tuple(prompt)] = name
        scheduler.add(AddRequest(name, list(prompt), SamplingParams(max_tokens=new, temperature=0.0), stop_token_ids=[96]))

    def step() -> list[str]:
        step = scheduler.schedule()
        assert step is not None
        ranks.submit(step)
        for result in ranks.collect():
            scheduler.process_result(result)
        return [names[tuple(each.token_ids[: each.prompt_length])] for each in step.batches[0].admitted]

    for first in range(5):
        add(f"fill {first}", [(7 * number + first) % 97 for number in range(90)])
        while not scheduler.idle:
            step()
    add("runs", [5, 5, 5], 100)
    step()
    return scheduler, add, step


def test_requests_pass_one_whose_prefix_comes_in_parts() -> None:
    scheduler, add, step = loading_queue(slots=4)
    add("loads", [(7 * number) % 97 for number in range(90)], 9)
    add("loads too", [(7 * number + 1) % 97 for number in range(90)])
    add("short", [9, 9], 40)
    admitted: list[list[str]] = []
    while not admitted or "loads" not in admitted[-1]:
        admitted.append(step())
    assert [request.id for request in scheduler.running] == ["runs", "loads", "short"], "in order of arrival: the last is preempted"
    admitted += [step() for _ in range(60)]
    order = [name for names in admitted for name in names]
    assert order == ["short", "loads", "loads too"]
    assert admitted[0] == ["short"]
    assert sum(bool(names) for names in admitted) == 3
    scheduler.check()


def test_who_passes_leaves_a_slot() -> None:
    scheduler, add, step = loading_queue(slots=2)
    add("loads", [(7 * number) % 97 for number in range(90)])
    add("short", [9, 9])
    assert [name for _ in range(30) for name in step()] == ["loads", "short"]
    scheduler.check()


@pytest.mark.parametrize(("blocks", "windows"), [(60, (None,)), (45, (64,))], ids=["all tokens", "a window"])
def test_who_passes_leaves_blocks_so_that_the_load_ends_in_its_steps(blocks: int, windows: tuple[int | None, ...]) -> None:
    scheduler, add, step = loading_queue(4, blocks, windows=windows)
    add("loads", [(7 * number) % 97 for number in range(90)])
    for number in range(30):  # each takes a third of the blocks, and nobody knows until when
        add(f"short {number}", [number + 10] * 70, 12)
    admitted = [step() for _ in range(40)]
    (begun,) = (number for number, names in enumerate(admitted) if "loads" in names)
    assert begun <= 22, "a block in each step"
    assert 0 < sum(map(len, admitted[:begun])) < sum(map(len, admitted)) - 1, "others came before and behind"
    assert scheduler.stats().preemptions == 0
    assert scheduler.stats().host_hits == (88 if windows == (None,) else 64)
    scheduler.check()


def test_ranks_with_a_wrong_block_in_host_memory_are_seen_by_their_checker() -> None:
    with pytest.raises(StepDiverged, match="reads"):
        conversations(5, 100, corrupt=True)


def test_who_passes_does_not_grow_into_the_blocks_of_the_load() -> None:
    """Two that nobody knows the end of leave the load its blocks, and take them as they grow: the last that came is preempted, as
    it would be if it had come behind the load; then it waits behind it."""
    scheduler, add, step = loading_queue(4, 60)
    add("loads", [(7 * number) % 97 for number in range(90)], 20)
    for number in range(2):
        add(f"grows {number}", [number + 10] * 36, 60)
    admitted = [step() for _ in range(30)]
    (begun,) = (number for number, names in enumerate(admitted) if "loads" in names)
    assert begun <= 24, "a block in each step, and a step in which the other's last tokens are on their way"
    assert admitted[0] == ["grows 0", "grows 1"]
    assert scheduler.stats().preemptions == 1
    assert [request.id for request in scheduler.running] == ["runs", "loads", "grows 0"]
    assert [request.id for request in scheduler.waiting] == ["grows 1"]
    while not scheduler.idle:
        step()
    assert scheduler.stats().preemptions == 1
    scheduler.check()


def test_who_is_preempted_waits_behind_a_load_that_came_before_it() -> None:
    """The oldest takes the blocks: the load is not what it preempts, and who passed the load comes no sooner than it."""
    scheduler, add, step = loading_queue(4, 50)
    add("loads", [(7 * number) % 97 for number in range(90)])
    add("grows", [10] * 40, 60)
    assert step() == ["grows"]
    scheduler.preempt(scheduler.running[-1])
    assert [request.id for request in scheduler.waiting] == ["loads", "grows"]
