# SPDX-License-Identifier: Apache-2.0
"""Which adapters are in slots, which requests wait for one, and how adapters come and go beside running requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config import SamplingParams
from phalanx.engine.adapter_loads import AdapterLoads
from phalanx.engine.adapters import Adapter, Adapters, Claims
from phalanx.engine.fake import FakeExecutor, fake_tokens
from phalanx.engine.messages import AdaptersChanged, AddRequest, LoadAdapter, PlaceAdapter, UnloadAdapter
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import AdapterNotFound, PhalanxError, WeightError
from phalanx.layout.adapter import AdapterFile
from tests.support.engine_client import each_update

OPTIONS = SchedulerOptions(num_blocks=100, block_size=4, max_batch_size=8, max_num_tokens=32, max_seq_len=64)


def some_adapters(slots: int, names: str) -> Adapters:
    adapters = Adapters(slots)
    for name in names:
        adapters.put(Adapter(name, adapters.next_key(), AdapterFile("", name.encode() * 16, 8, ())))
    return adapters


class Served:
    """A scheduler on checked ranks."""

    def __init__(self, slots: int, names: str, num_blocks: int = OPTIONS.num_blocks) -> None:
        self.adapters = some_adapters(slots, names)
        options = replace(OPTIONS, num_blocks=num_blocks)
        self.scheduler = Scheduler(options, adapters=self.adapters)
        names_of_sizes = "num_blocks", "block_size", "max_batch_size", "max_num_tokens", "max_seq_len"
        sizes = {name: getattr(options, name) for name in names_of_sizes}
        self.ranks = FakeExecutor.of(vocab_size=90, **sizes)
        for name in names:
            adapter = self.adapters.named(name)
            assert adapter is not None
            self.ranks.read_adapter(adapter.key, adapter.file)
        self.works: list[PlaceAdapter] = []
        self.ended: list[str] = []

    def add(self, id: str, adapter: str | None, tokens: int = 6) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, adapter=adapter)
        self.scheduler.add(AddRequest(id, [1, 2, 3], params))

    def load(self, name: str, digest: bytes) -> None:
        """Under a new name, or in the place of what has it."""
        adapter = Adapter(name, self.adapters.next_key(), AdapterFile("", digest, 8, ()))
        self.ranks.read_adapter(adapter.key, adapter.file)
        self.adapters.put(adapter)

    def forget(self) -> None:
        for key in self.adapters.forgotten(self.scheduler.open_adapters):
            self.ranks.drop_adapter(key)

    def step(self) -> list[tuple[str, list[int]]]:
        """The new tokens of each request."""
        step, outputs = self.scheduler.schedule(), []
        if step is not None:
            self.works += [work for work in step.before if isinstance(work, PlaceAdapter)]
            self.ranks.submit(step)
        for result in self.ranks.collect():
            messages = list(each_update(self.scheduler.process_result(result)))
            self.ended += [message.request_id for message in messages if message.finish_reason]  # type: ignore[union-attr]
            outputs += [(message.request_id, message.tokens) for message in messages]  # type: ignore[union-attr]
        return outputs

    def running(self) -> set[str]:
        return {request.id for request in self.scheduler.running}


def test_a_request_of_an_adapter_without_a_slot_does_not_hold_up_those_behind_it():
    served = Served(1, "ab")
    served.add("first", "a", tokens=20)
    served.step()
    served.add("blocked", "b")
    served.add("base", None)
    served.step()
    assert served.running() == {"first", "base"}
    while "first" not in served.ended:
        served.step()
    served.step()
    assert "blocked" in served.running()
    assert [work.slot for work in served.works] == [0, 0]


def test_a_request_that_waits_for_a_slot_is_not_passed_for_ever():
    """New requests come for the adapters that have slots, all the time."""
    served = Served(2, "abc")
    for number in range(4):
        served.add(f"old {number}", "ab"[number % 2], tokens=8)
    served.step()
    served.add("patient", "c")
    for number in range(60):
        served.add(f"new {number}", "ab"[number % 2], tokens=8)
        served.step()
        if "patient" in served.ended:
            break
    assert "patient" in served.ended
    assert number < 40


def test_the_longest_unused_adapter_leaves_and_none_that_runs():
    served = Served(2, "abc")
    for id, name in (("1", "a"), ("2", "b")):
        served.add(id, name)
        while id not in served.ended:
            served.step()
    served.add("3", "a", tokens=20)
    served.step()
    served.add("4", "c")
    served.step()
    in_slots = [adapter.name for adapter in served.adapters.slots.occupants if adapter is not None]
    assert in_slots == ["a", "c"], "b is the longest unused"
    assert len(served.works) == 3, "an adapter that is in a slot is not placed again"


def test_an_unknown_adapter_is_refused_by_name_and_nothing_else_changes():
    served = Served(1, "a")
    with pytest.raises(AdapterNotFound, match="adapter 'x' is not loaded; loaded: a"):
        served.add("1", "x")
    served.add("2", "a")
    served.step()
    assert served.scheduler.open_ids == ["2"]


def test_a_waiting_request_keeps_the_adapter_that_its_name_stood_for():
    served = Served(1, "ab")
    served.add("first", "b", tokens=12)
    served.step()
    served.add("waits", "a", tokens=12)
    old = served.adapters.named("a")
    assert old is not None
    served.adapters.put(Adapter("a", served.adapters.next_key(), AdapterFile("", b"new" * 5, 8, ())))
    assert served.adapters.forgotten(served.scheduler.open_adapters) == []
    while "waits" not in served.ended:
        served.step()
    assert served.works[-1].key == old.key
    assert served.adapters.forgotten(served.scheduler.open_adapters) == [old.key]
    assert served.adapters.slots.occupants == [None], "its slot is free"


def test_one_step_admits_no_more_adapters_than_there_are_slots():
    adapters = some_adapters(2, "abc")
    claims = Claims(adapters.slots)
    first, second, third = (adapters.named(name) for name in "abc")
    for adapter in (first, second):
        assert claims.allow(adapter)
        claims.admit(adapter)
    assert not claims.allow(third)
    assert claims.allow(None)
    assert not claims.allow(first), "the longest unused one takes no request that came later"
    assert claims.allow(second)


def expected(prompt: list[int], params: SamplingParams, digest: bytes) -> list[int]:
    return fake_tokens(prompt, params, seed=1, vocab_size=90, count=params.max_tokens or 0, adapter=digest)


@pytest.mark.parametrize("seed", range(12))
def test_no_token_is_by_the_weights_of_another(seed):
    """Random loads, reloads under the same name, unloads, requests and preemptions, in a cache that holds few of them: each request
    says what the adapter does that its name stood for when it came. The ranks check that what an adapter wrote into the cache is
    read by it alone, and that none leaves its slot under a running request."""
    chance, served = random.Random(seed), Served(2, "", num_blocks=16)
    contents, wanted, outputs = 0, dict[str, list[int]](), dict[str, list[int]]()
    preempted = 0
    for number in range(220):
        act = chance.random()
        name = chance.choice("abcde")
        if act < 0.15 or (act < 0.2 and name in served.adapters):
            contents += 1
            served.load(name, (b"%08d" % contents) * 2)
        elif act < 0.25 and name in served.adapters:
            served.adapters.remove(name)
        elif act < 0.6:
            named = name if name in served.adapters and chance.random() < 0.8 else None
            adapter, id = served.adapters.named(named), str(number)
            prompt = [5, 6, 7, 8, 9, 10, 11, 12][: chance.randint(3, 8)]  # of all the same, so that blocks would be shared
            params = SamplingParams(temperature=0.0, max_tokens=chance.randint(1, 30), adapter=named, seed=1)
            wanted[id] = expected(prompt, params, b"" if adapter is None else adapter.file.digest)
            served.scheduler.add(AddRequest(id, prompt, params))
        elif act < 0.7 and served.scheduler.running:
            served.scheduler.preempt(served.scheduler.running[-1])
            preempted += 1
        for id, tokens in served.step():
            outputs.setdefault(id, []).extend(tokens)
        served.forget()
    for _ in range(4000):
        if not served.scheduler.open_ids:
            break
        for id, tokens in served.step():
            outputs.setdefault(id, []).extend(tokens)
        served.forget()
    assert outputs == wanted
    assert preempted > 5
    assert len(served.works) > 10, "adapters take each other's slots"
    for name in "abcde":
        if name in served.adapters:
            served.adapters.remove(name)
    served.forget()
    assert served.ranks._adapters == {}, "ranks forget what no name and no request has"
    assert served.adapters.slots.occupants == [None, None]


class Loads:
    """Adapters of an engine whose folders are the names of digests; "broken" cannot be read, ranks cannot read "rank"."""

    def __init__(self, slots: int = 1) -> None:
        self.executor = FakeExecutor.of(vocab_size=9)
        self.adapters, self.open = Adapters(slots), list[Adapter | None]()
        self.loads = AdapterLoads(self.adapters, self.executor, self._read, lambda: None)
        self._answers: list[AdaptersChanged] = []
        read = self.executor.adapters_read
        self.executor.adapters_read = lambda: [  # type: ignore[method-assign]
            (key, WeightError("rank 1: no such file") if key in self.refused else error) for key, error in read()
        ]
        self.refused: set[int] = set()
        self.dropped: list[int] = []
        drop = self.executor.drop_adapter
        self.executor.drop_adapter = lambda key: (self.dropped.append(key), drop(key))[1]  # type: ignore[method-assign, func-returns-value]

    def _read(self, folder: Path) -> AdapterFile:
        if folder.name == "broken":
            raise WeightError("broken holds nothing", next="train it")
        if folder.name == "odd":
            raise KeyError("odd")
        return AdapterFile(str(folder), folder.name.encode(), 4, ())

    def ask(self, message: LoadAdapter | UnloadAdapter) -> AdaptersChanged:
        answer = self.loads.load(message) if isinstance(message, LoadAdapter) else self.loads.unload(message)
        return answer or self.awaited()

    def awaited(self) -> AdaptersChanged:
        deadline = time.monotonic() + 20
        while not self._answers:
            assert time.monotonic() < deadline
            self._answers += self.loads.poll(lambda: self.open)
            time.sleep(0.001)
        return self._answers.pop(0)


def error_of(answer: AdaptersChanged) -> str:
    assert answer.error is not None
    assert answer.error["kind"] in ("AdapterError", "AdapterNotFound"), "requests that fail, not engines"
    return str(PhalanxError.from_wire(answer.error))


def names(facts: Iterable[object]) -> list[str]:
    return [each.name for each in facts]  # type: ignore[attr-defined]


def test_adapters_come_and_go():
    loads = Loads()
    answer = loads.ask(LoadAdapter(1, "a", "one"))
    assert (answer.call, answer.error, names(answer.adapters)) == (1, None, ["a"])
    assert "already loaded" in error_of(loads.ask(LoadAdapter(2, "a", "two")))
    answer = loads.ask(LoadAdapter(3, "a", "two", replace=True))
    assert answer.error is None
    assert [each.folder for each in answer.adapters] == ["two"]
    assert loads.dropped == [1], "the ranks forget the one that was replaced"
    assert loads.ask(UnloadAdapter(4, "a")).adapters == []
    assert "'a' is not loaded; loaded: none" in error_of(loads.ask(UnloadAdapter(5, "a")))
    loads.loads.poll(lambda: loads.open)
    assert loads.dropped == [1, 2]


@pytest.mark.parametrize(("folder", "failure"), [
    ("broken", "adapter 'a' is not loaded: broken holds nothing; train it"), ("odd", "not loaded: odd cannot be read; KeyError"),
])  # fmt: skip
def test_an_adapter_that_cannot_be_read_changes_nothing(folder, failure):
    loads = Loads()
    assert failure in error_of(loads.ask(LoadAdapter(1, "a", folder)))
    assert loads.ask(LoadAdapter(2, "a", "sound")).error is None


def test_where_one_rank_cannot_read_it_none_has_it():
    loads = Loads()
    loads.refused = {1}
    assert error_of(loads.ask(LoadAdapter(1, "a", "one"))) == "adapter 'a' is not loaded: rank 1: no such file"
    assert loads.dropped == [1]
    assert names(loads.ask(LoadAdapter(2, "a", "one")).adapters) == ["a"]


def test_two_loads_of_one_name_do_not_race():
    loads = Loads()
    assert loads.loads.load(LoadAdapter(1, "a", "one")) is None
    second = loads.loads.load(LoadAdapter(2, "a", "two", replace=True))
    assert second is not None
    assert "is being loaded" in error_of(second)
    assert loads.awaited().call == 1


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a,b"])
def test_a_name_that_no_request_could_give_is_refused(name):
    assert "is no name of an adapter" in error_of(Loads().ask(LoadAdapter(1, name, "one")))


def test_without_slots_the_option_is_named():
    assert "max_loras is 0; start with max_loras=1" in error_of(Loads(slots=0).ask(LoadAdapter(1, "a", "one")))


def test_an_adapter_of_open_requests_stays_on_the_ranks_until_they_end():
    loads = Loads()
    loads.ask(LoadAdapter(1, "a", "one"))
    loads.open = [loads.adapters.named("a")]
    loads.ask(UnloadAdapter(2, "a"))
    poll: Callable[[], object] = lambda: loads.loads.poll(lambda: loads.open)  # noqa: E731
    poll()
    assert loads.dropped == []
    loads.open = [None]
    poll()
    assert loads.dropped == [1]
