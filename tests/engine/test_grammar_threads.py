# SPDX-License-Identifier: Apache-2.0
"""A grammar that takes long to follow ends its own request, and nobody waits for it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.config import StructuredOutputParams
from phalanx.engine import grammar_threads
from phalanx.engine.fake import FakeExecutor
from phalanx.engine.grammar import HEAD, Grammars
from phalanx.engine.grammar_threads import REQUEST_SECONDS, SHARED_CALLS, GrammarThreads, InlineGrammarCalls
from phalanx.engine.messages import Abort, RequestRejected, RequestUpdate, Vocabulary
from phalanx.errors import RequestError
from tests.support.engine_client import SIZES, Client, ended
from tests.support.grammars import SIZE, VOCABULARY, grammars

AMBIGUOUS = HEAD + 'start: x\nx: x x x x x | x x x x | x x x | x x | "a" |'
"""The costliest kind of grammar that the limits let pass: after a hundred tokens a call takes 0.1 s."""


@pytest.fixture
def client() -> Iterator[Client]:
    endless = Grammars(lambda: Vocabulary(VOCABULARY), SIZE)  # without a token that ends a text
    client = Client(FakeExecutor.of(vocab_size=SIZE, **SIZES), open_matcher=endless.open, vocab_size=SIZE)
    yield client
    client.finish()
    assert not client.thread.is_alive()


def constrained(client: Client, name: str, compiled: str, **params: Any) -> None:
    client.add(name, [1], structured_output=StructuredOutputParams(compiled=compiled), **params)


def test_a_neighbour_does_not_wait_for_an_ambiguous_grammar(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_threads, "REQUEST_SECONDS", 0.3)
    for number in range(3):
        constrained(client, f"slow {number}", AMBIGUOUS, max_tokens=110)
    seconds: list[float] = []
    deadline = time.monotonic() + 100
    while {m.request_id for m in client.heard if isinstance(m, RequestRejected)} != {"slow 0", "slow 1", "slow 2"}:
        assert time.monotonic() < deadline
        begun, count = time.monotonic(), len(seconds)
        client.add(f"free {count}", [1], max_tokens=5)
        constrained(client, f"constrained {count}", HEAD + "start: /a{5}b/", max_tokens=5)
        while len(client.tokens(f"free {count}")) < 5 or len(client.tokens(f"constrained {count}")) < 5:
            client.hear(RequestUpdate, sum(isinstance(message, RequestUpdate) for message in client.heard) + 1)
        seconds.append(time.monotonic() - begun)
    rejected = [message for message in client.heard if isinstance(message, RequestRejected)]
    assert all("takes too long to follow" in message.error["failure"] for message in rejected)
    print(f"{len(seconds)} neighbours, the slowest in {max(seconds):.3f} s")
    assert statistics.median(seconds) < 0.5  # five steps; a few wait for the first slow call of a request


def test_a_constrained_request_can_be_aborted_at_any_time(client: Client) -> None:
    for wait in (0.0, 0.01, 0.1, 0.5):
        constrained(client, f"slow {wait}", AMBIGUOUS, max_tokens=110)
        time.sleep(wait)
        client.say(Abort([f"slow {wait}"]))
    client.add("free", [1], max_tokens=5)
    ended(client, 1)
    assert len(client.tokens("free")) == 5
    client.loop.stop()
    client.thread.join(30)
    assert client.status == 0  # nothing is open, and the accounting is whole


def test_two_requests_of_one_id_are_one_request_and_one_error() -> None:
    executor = FakeExecutor.of(vocab_size=SIZE, **SIZES, latency=0.05)
    client = Client(executor, open_matcher=grammars().open, vocab_size=SIZE)
    for _ in range(2):
        constrained(client, "same", HEAD + "start: /a{5}b/", max_tokens=6)
    (rejected,) = client.hear(RequestRejected)
    assert "in use" in rejected.error["failure"]
    ended(client, 1)
    assert client.tokens("same")
    assert client.finish() == 0


def test_quick_calls_are_shared_and_slow_ones_are_not_waited_for() -> None:
    heard = threading.Event()
    calls = GrammarThreads(heard.set)
    threads = set()

    def quick() -> int:
        threads.add(threading.get_ident())
        time.sleep(0.0005)
        return 1

    slow = calls.begin("slow", lambda: time.sleep(0.3), quick=False)
    many = [calls.begin(number, quick) for number in range(8 * SHARED_CALLS)]
    began = time.monotonic()
    calls.wait()
    assert time.monotonic() - began < 0.25
    ended_calls = calls.collect()
    assert {id(call) for call in ended_calls} <= {id(call) for call in many}
    assert len(threads) > 1
    assert threading.get_ident() in threads
    while calls.busy:
        heard.wait(5)
        heard.clear()
        ended_calls += calls.collect()
    assert slow in ended_calls
    assert all(call.value == 1 for call in many)


@pytest.mark.parametrize("kind", [GrammarThreads, InlineGrammarCalls])
def test_errors_and_budgets(kind: type[Any]) -> None:
    calls = kind()

    def fails() -> None:
        raise ValueError("x")

    def refuses() -> None:
        raise RequestError("no")

    def burns() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    for work, spent in ((fails, 0.0), (refuses, 0.0), (burns, REQUEST_SECONDS), (burns, 0.0)):
        calls.begin("owner", work, spent=spent)
    calls.wait()
    errors = [str(call.error) if call.error else None for call in calls.collect()]
    assert "the grammar failed" in errors[0]
    assert errors[1] == "no"
    assert "takes too long to follow" in errors[2]
    assert errors[3] is None
