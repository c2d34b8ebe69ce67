# SPDX-License-Identifier: Apache-2.0
"""A grammar that takes long to follow ends its own request, and nobody waits for it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from phalanx.config import StructuredOutputParams
from phalanx.engine.fake import FakeExecutor
from phalanx.engine.grammar import open_matcher
from phalanx.engine.grammar_threads import (
    MAX_SLOW_CALLS,
    SLOW_NICE,
    THREADS,
    GrammarCall,
    GrammarThreads,
    InlineGrammarCalls,
    calls_run,
    require_room,
)
from phalanx.engine.messages import Abort, RequestRejected, RequestUpdate
from phalanx.errors import Overloaded, RequestError
from tests.support.engine_client import SIZES, Client, ended

REPEATS = "(a{0,200}){100,200}b"
VOCABULARY = [bytes([i]) for i in range(256)] + [b"<end>"]
EOS = 256


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder: Path = tmp_path_factory.mktemp("grammars")
    info = xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, vocab_size=len(VOCABULARY), stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    (folder / "tokenizer.json").write_text(info.serialize_json(), encoding="utf-8")

    def compile_regex(pattern: str) -> str:
        path = folder / f"{abs(hash(pattern))}.json"
        path.write_text(compiler.compile_regex(pattern).serialize_json(), encoding="utf-8")
        return json.dumps({"tokenizer": str(folder / "tokenizer.json"), "grammar": str(path)})

    return compile_regex


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(FakeExecutor.of(vocab_size=257, **SIZES), open_matcher=open_matcher, vocab_size=257, call_seconds=0.05)
    yield client
    client.finish()
    assert not client.thread.is_alive()
    deadline = time.monotonic() + 100
    while calls_run():  # a process does not end in order before
        assert time.monotonic() < deadline
        time.sleep(0.05)


def constrained(client: Client, name: str, compiled: str, **params: Any) -> None:
    output = StructuredOutputParams(regex="x", compiled=compiled)
    client.add(name, [1], structured_output=output, **params)


@pytest.mark.timeout(450)
def test_a_neighbour_does_not_wait_for_a_repeat_within_a_repeat(client: Client, compiled: Callable[[str], str]) -> None:
    warm_up = compiled("a{5}b")
    constrained(client, "first", warm_up, max_tokens=6)
    ended(client, 1)
    for number in range(3):
        constrained(client, f"slow {number}", compiled(REPEATS), max_tokens=110)
    slowest = 0.0
    deadline = time.monotonic() + 350  # the slow calls have a low priority, so on busy cores they take long to use their budget
    count = 0
    while sum(isinstance(message, RequestRejected) for message in client.heard) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # neighbours one upon another would leave the slow calls no core
        begun, count = time.monotonic(), count + 1
        client.add(f"free {count}", [1], max_tokens=5)
        constrained(client, f"constrained {count}", warm_up, max_tokens=5)
        while len(client.tokens(f"free {count}")) < 5 or len(client.tokens(f"constrained {count}")) < 5:
            client.hear(RequestUpdate, sum(isinstance(message, RequestUpdate) for message in client.heard) + 1)
        slowest = max(slowest, time.monotonic() - begun)
    rejected = [message for message in client.heard if isinstance(message, RequestRejected)]
    assert {message.request_id for message in rejected} == {"slow 0", "slow 1", "slow 2"}
    assert all("takes too long to follow" in message.error["failure"] for message in rejected)
    assert all("without repeats within repeats" in message.error["next"] for message in rejected)
    print(f"{count} neighbours, the slowest in {slowest:.3f} s")
    assert slowest < 0.5  # some 0.1 s on two busy cores; a single call into this grammar takes up to 16 s


def test_a_constrained_request_can_be_aborted_at_any_time(client: Client, compiled: Callable[[str], str]) -> None:
    text = compiled(REPEATS)
    for wait in (0.0, 0.01, 0.1, 0.5):
        constrained(client, f"slow {wait}", text, max_tokens=110)
        time.sleep(wait)
        client.say(Abort([f"slow {wait}"]))
    client.add("free", [1], max_tokens=5)
    ended(client, 1)
    assert len(client.tokens("free")) == 5
    client.loop.stop()
    client.thread.join(30)
    assert client.status == 0  # nothing is open, and the accounting is whole


def test_two_requests_of_one_id_are_one_request_and_one_error(compiled: Callable[[str], str]) -> None:
    client = Client(FakeExecutor.of(vocab_size=257, **SIZES, latency=0.05), open_matcher=open_matcher, vocab_size=257)
    for _ in range(2):
        constrained(client, "same", compiled("a{5}b"), max_tokens=6)
    (rejected,) = client.hear(RequestRejected)
    assert "in use" in rejected.error["failure"]
    ended(client, 1)
    assert bytes(client.tokens("same")) == b"aaaaab"
    assert client.finish() == 0


def collect(calls: GrammarThreads, count: int, seconds: float = 20.0) -> list[GrammarCall]:
    collected: list[GrammarCall] = []
    deadline = time.monotonic() + seconds
    while len(collected) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)
        collected += calls.collect()
    return collected


def test_a_call_that_takes_long_holds_no_other_call() -> None:
    gate, notes = threading.Event(), threading.Event()
    calls = GrammarThreads(notes.set)
    for number in range(3 * THREADS):
        calls.begin(f"stuck {number}", lambda: gate.wait(30))
    for number in range(50):
        calls.begin(number, lambda number=number: number * number)
    quick = collect(calls, 50)
    assert sorted(call.owner for call in quick) == list(range(50))
    assert all(call.value == call.owner**2 and call.error is None for call in quick)
    assert notes.is_set()
    assert calls.busy
    gate.set()
    assert all(call.value is True for call in collect(calls, 3 * THREADS))
    assert not calls.busy


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        pass


def test_a_call_beyond_its_cpu_time_is_abandoned_and_one_that_only_waits_is_not() -> None:
    stop, gate = threading.Event(), threading.Event()
    calls = GrammarThreads(call_seconds=0.1)
    calls.begin("waits", lambda: gate.wait(30))
    calls.begin("spins", lambda: spin(stop))
    (call,) = collect(calls, 1)
    assert call.owner == "spins"
    assert "0.1 s of CPU time for one token" in str(call.error)
    stop.set()
    time.sleep(0.2)
    assert not calls.collect()  # what an abandoned call returns is dropped
    gate.set()
    assert collect(calls, 1)[0].error is None


def overrun(stop: threading.Event) -> None:
    """More CPU time than a budget of 0.02 s; then none, so that the test need not share its core with so many threads."""
    begin = time.thread_time()
    while time.thread_time() - begin < 0.03:
        pass
    stop.wait(60)


def test_calls_that_are_abandoned_are_limited_until_they_return() -> None:
    stop = threading.Event()
    calls = GrammarThreads(call_seconds=0.02)
    for number in range(3 * MAX_SLOW_CALLS):
        calls.begin(number, lambda: overrun(stop), quick=False)
    errors = [type(call.error) for call in collect(calls, 3 * MAX_SLOW_CALLS)]
    assert errors.count(RequestError) == MAX_SLOW_CALLS
    assert errors.count(Overloaded) == 2 * MAX_SLOW_CALLS
    assert calls.abandoned == MAX_SLOW_CALLS
    with pytest.raises(Overloaded, match="8 calls beyond their budget still run"):
        require_room(calls)
    calls.begin("quick", lambda: 1)
    assert collect(calls, 1)[0].value == 1  # not the cause, so it goes on
    stop.set()
    deadline = time.monotonic() + 20
    while calls.abandoned:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    require_room(calls)
    calls.begin("after", lambda: 2, quick=False)
    assert collect(calls, 1)[0].value == 2


class FakeMatcher:
    """Allows every token; follows none of them before `stop` is set."""

    finished = False

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def mask(self) -> bytes:
        return ((1 << 50) - 1).to_bytes(8, "little")

    def accept(self, token: int) -> None:
        if not self._stop.is_set():
            overrun(self._stop)


def test_heavy_requests_one_after_another_do_not_pile_up() -> None:
    stop = threading.Event()
    client = Client(FakeExecutor.of(vocab_size=50, **SIZES), open_matcher=lambda _: FakeMatcher(stop), call_seconds=0.02)
    try:
        for number in range(2 * MAX_SLOW_CALLS):
            constrained(client, f"heavy {number}", "any", max_tokens=3)
            client.hear(RequestRejected, number + 1)
        failures = [message.error["failure"] for message in client.hear(RequestRejected)]
        assert ["takes too long to follow" in failure for failure in failures] == [True] * 8 + [False] * 8
        assert all("busy with grammars" in failure for failure in failures[MAX_SLOW_CALLS:])
        assert client.scheduler.grammar_calls.abandoned == MAX_SLOW_CALLS
        client.add("free", [1], max_tokens=3)
        ended(client, 1)
        stop.set()
        deadline = time.monotonic() + 20
        while client.scheduler.grammar_calls.abandoned:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        constrained(client, "light", "any", max_tokens=3)
        ended(client, 2)
        assert len(client.tokens("light")) == 3
    finally:
        stop.set()
        assert client.finish() == 0


def test_what_the_calls_of_one_request_have_taken_counts() -> None:
    stop = threading.Event()
    calls = GrammarThreads()
    calls.begin("spins", lambda: spin(stop), spent=1.95)
    assert "0.01 s of CPU time a token" in str(collect(calls, 1)[0].error)
    stop.set()


def test_a_step_waits_a_moment_for_quick_calls_and_not_for_slow_ones() -> None:
    gate = threading.Event()
    calls = GrammarThreads()
    calls.begin("slow", lambda: gate.wait(30), quick=False)
    begun = time.monotonic()
    for _ in range(100):
        calls.wait()
    assert time.monotonic() - begun < 0.2
    calls.begin("quick", lambda: 1)
    calls.wait()
    assert [call.owner for call in collect(calls, 1)] == ["quick"]
    gate.set()


@pytest.mark.parametrize("kind", [GrammarThreads, InlineGrammarCalls])
def test_an_error_of_a_call_is_its_own(kind: type[Any]) -> None:
    def fail(error: Exception) -> None:
        raise error

    calls = kind()
    calls.begin("one", lambda: fail(RequestError("the grammar rejects the sampled token 3")))
    calls.begin("two", lambda: fail(ValueError("odd")))
    errors = {call.owner: str(call.error) for call in collect(calls, 2)}
    assert "token 3" in errors["one"]
    assert "odd" in errors["two"]


@pytest.mark.parametrize("waits", [True, False], ids=["a call that waits", "a call that computes"])
def test_only_what_takes_cpu_time_gets_a_lower_priority(waits: bool) -> None:
    """Who waits while another reads the same grammar takes the GIL soon, when it returns."""
    threads, ended = GrammarThreads(call_seconds=60.0), threading.Event()
    usual = os.getpriority(os.PRIO_PROCESS, 0)

    def work() -> int:
        while not ended.wait(1.0 if waits else 0):
            pass
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    call = threads.begin(None, work)
    deadline = time.monotonic() + 60
    while not (call.slow if waits else call.lowered):
        assert time.monotonic() < deadline
        threads.collect()
        time.sleep(0.005)
    ended.set()
    while not call.ended:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert call.value == (usual if waits else min(usual + SLOW_NICE, 19))
