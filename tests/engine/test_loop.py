# SPDX-License-Identifier: Apache-2.0
"""The loop between a client's socket and the fake ranks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from phalanx.config import SamplingParams, StructuredOutputParams
from phalanx.engine import loop
from phalanx.engine.fake import FakeExecutor, fake_tokens
from phalanx.engine.loop import Loop
from phalanx.engine.messages import (
    Abort,
    AddRequest,
    Failed,
    GetStats,
    Heartbeat,
    NextTokens,
    RequestRejected,
    RequestUpdate,
    Shutdown,
    Stats,
    Step,
    StepResult,
    Stopped,
)  # fmt: skip
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import RankDied
from tests.support.engine_client import SIZES, Client, ended


class Breaks(FakeExecutor):
    """Ranks that die at a step."""

    at = 5

    def submit(self, step: Step) -> None:
        super().submit(step)
        if step.number == self.at:
            raise self.error()

    def error(self) -> Exception:
        return RankDied("rank 1 was killed by SIGKILL")


class Bug(Breaks):
    def error(self) -> Exception:
        return ZeroDivisionError("a bug")


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(*args: Any, **options: Any) -> Client:
        clients.append(Client(*args, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.finish()
        assert not client.thread.is_alive()


def test_requests_are_answered_with_their_own_tokens(make: Callable[..., Client]) -> None:
    client = make()
    for number in range(20):
        client.add(f"r{number}", [number, 1, 2], temperature=0, max_tokens=12)
    ended(client, 20)
    for number in range(20):
        expected = fake_tokens([number, 1, 2], SamplingParams(temperature=0), seed=0, vocab_size=50, count=12)
        assert client.tokens(f"r{number}") == expected
    client.say(Shutdown())
    client.hear(Stopped)
    assert client.finish() == 0
    assert not [m for m in client.heard if isinstance(m, (RequestRejected, Failed))]


def test_tokens_that_come_with_nothing_else_come_together(make: Callable[..., Client]) -> None:
    """A step is one message for the client, beside those of requests that begin, end or want more."""
    client = make()
    everything = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    client.say(*(AddRequest(f"r{n}", [n, 1, 2], SamplingParams(**everything, logprobs=2 if n == 3 else None)) for n in range(4)))
    ended(client, 4)
    together = [message for message in client.messages if isinstance(message, NextTokens)]
    assert {id for message in together for id in message.request_ids} == {"r0", "r1", "r2"}
    assert sum(len(message.tokens) for message in together) == 3 * 38, "neither the first token nor the last one"
    # Of two steps in flight, either has some of the requests: which depends on when they came.
    assert max(len(message.tokens) for message in together) >= 2
    updates = [message for message in client.messages if isinstance(message, RequestUpdate)]
    assert sorted(message.request_id for message in updates) == ["r0"] * 2 + ["r1"] * 2 + ["r2"] * 2 + ["r3"] * 40
    assert all(len(message.logprobs) == 1 for message in updates if message.request_id == "r3")


def test_scores_of_a_long_prompt_come_in_parts(make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is so long that the client is held up by decoding it."""
    monkeypatch.setattr(loop, "SCORES_PER_UPDATE", 8)
    client = make()
    prompt = list(range(1, 36))
    client.add("scored", prompt, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    client.hear(Stats)
    updates = [message for message in client.hear(RequestUpdate, 7) if message.request_id == "scored"]
    parts = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    assert [len(part) for part in parts] == [8, 8, 8, 8, 3]
    assert [one and one.token for part in parts for one in part] == [None, *prompt[1:]]
    assert [len(update.tokens) for update in updates] == [0, 0, 0, 0, 1, 1, 1]


def test_tokens_pass_the_scores_of_a_long_prompt(make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client decodes messages in their order: between two parts of one request's scores come tokens of others."""
    monkeypatch.setattr(loop, "SCORES_PER_UPDATE", 8)
    monkeypatch.setattr(loop, "SCORES_SECONDS", 0.1)
    client = make()
    prompt = list(range(1, 36))
    both = [
        AddRequest("scored", prompt, SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)),
        AddRequest("other", [1, 2], SamplingParams(max_tokens=100, ignore_eos=True)),
    ]
    client.say(*both)
    ended(client, 2)
    names = [message.request_id for message in client.heard if isinstance(message, RequestUpdate)]
    parts = [place for place, name in enumerate(names) if name == "scored"]
    assert len(parts) == 6
    assert "other" in names[parts[0] : parts[4]]
    assert len(client.tokens("other")) == 100


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_scores_that_nobody_waits_for_are_dropped(make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(loop, "SCORES_PER_UPDATE", 2)
    monkeypatch.setattr(loop, "SCORES_SECONDS", 5.0)
    client = make()
    client.add("scored", list(range(1, 36)), max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    client.hear(RequestUpdate)
    if end == "abort":
        client.say(Abort(["scored"]), GetStats())
        client.hear(Stats)
    client.say(Shutdown())
    client.hear(Stopped, seconds=5.0)
    assert client.finish() == 0
    assert sum(isinstance(message, RequestUpdate) for message in client.heard) < 10


def test_stats_come_while_there_is_work_and_once_it_is_done(make: Callable[..., Client]) -> None:
    client = make()
    client.add("a", [1], max_tokens=100)
    ended(client, 1)
    last = client.hear(Stats, 2)[-1]
    assert (last.running, last.waiting, last.blocks_referenced, last.blocks_total) == (0, 0, 0, 64)
    assert (last.prompt_tokens, last.generation_tokens) == (1, 100)
    assert last.rank_bytes == {0: {"total": 0}}
    client.say(GetStats())
    client.hear(Stats, 3)


def test_an_idle_engine_beats_and_does_not_spin(make: Callable[..., Client]) -> None:
    client = make()
    turns = 0
    step = client.loop.iterate

    def counted() -> None:
        nonlocal turns
        turns += 1
        step()

    client.loop.iterate = counted
    client.hear(Heartbeat, 3)
    assert turns < 30
    assert not [m for m in client.heard if isinstance(m, Stats)]


def test_an_abort_frees_what_the_request_held(make: Callable[..., Client]) -> None:
    client = make(FakeExecutor.of(vocab_size=50, **SIZES, latency=0.01))
    for name in "abcdefghijkl":
        client.add(name, [1, 2, 3], max_tokens=120)
    client.hear(RequestUpdate, 5)
    client.say(Abort(list("abcdefghijkl")))
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        client.say(GetStats())
        stats = client.hear(Stats, len(client.hear(Stats, 0)) + 1)[-1]
        if not (stats.running or stats.waiting):
            break
    assert stats.blocks_referenced == 0


def test_what_cannot_run_is_refused_and_the_rest_goes_on(make: Callable[..., Client]) -> None:
    client = make()
    broken = msgspec.msgpack.encode(["AddRequest", "broken", [1], {"temperature": -1.0}])
    client.say(b"noise", msgspec.msgpack.encode(["AddRequest"]), msgspec.msgpack.encode({"a": 1}), broken)
    client.add("long", [1] * 500)
    client.add("unknown token", [50])
    client.add("good", [1], max_tokens=3)
    ended(client, 1)
    refused = {message.request_id: message.error for message in client.hear(RequestRejected, 3)}
    assert refused["broken"]["kind"] == "OptionError"
    assert "temperature" in refused["broken"]["why"]
    assert refused["long"]["kind"] == "PromptTooLong"
    assert refused["unknown token"]["kind"] == "RequestError"
    assert len(client.tokens("good")) == 3


@pytest.mark.parametrize(("ranks", "kind", "words"), [(Breaks, "RankDied", "SIGKILL"), (Bug, "EngineError", "ZeroDivisionError")])
def test_every_open_request_hears_why_the_engine_ends(
    make: Callable[..., Client], ranks: type[FakeExecutor], kind: str, words: str
) -> None:
    client = make(ranks.of(vocab_size=50, **SIZES, latency=0.02))
    for number in range(12):
        client.add(str(number), [1], max_tokens=100)
    (failed,) = client.hear(Failed)
    assert client.finish() == 1
    assert failed.error["kind"] == kind
    assert words in str(failed.error)
    assert sorted(int(message.request_id) for message in client.hear(RequestRejected, 12)) == list(range(12))
    assert all(message.error == failed.error for message in client.hear(RequestRejected))


def test_a_shutdown_refuses_what_is_open_and_stops(make: Callable[..., Client]) -> None:
    client = make(FakeExecutor.of(vocab_size=50, **SIZES, latency=0.05))
    client.add("a", [1], max_tokens=100)
    client.hear(RequestUpdate)
    client.loop.stop()
    client.hear(Stopped)
    assert client.finish() == 0
    assert [message.error["kind"] for message in client.hear(RequestRejected)] == ["EngineClosed"]


def test_a_broken_accounting_is_found_when_the_engine_is_idle(make: Callable[..., Client]) -> None:
    client = make()
    client.scheduler.pool.take(1)
    client.add("a", [1], max_tokens=2)
    (failed,) = client.hear(Failed)
    assert "accounting is broken" in failed.error["failure"]
    assert client.finish() == 1


def test_constrained_requests_wait_for_their_grammars_and_the_others_do_not(make: Callable[..., Client]) -> None:
    gate = threading.Event()

    def slowly(compiled: str) -> Any:
        gate.wait(30)
        raise ValueError(f"{compiled!r} is no grammar")

    client = make(open_matcher=slowly)
    for name in ("constrained", "aborted", "another"):
        client.add(name, [1], structured_output=StructuredOutputParams(compiled="{}"))
    client.add("free", [1], max_tokens=3)
    client.say(Abort(["aborted"]))
    ended(client, 1)
    assert len(client.tokens("free")) == 3
    assert not client.hear(RequestRejected, 0)
    gate.set()
    assert {message.request_id for message in client.hear(RequestRejected, 2)} == {"constrained", "another"}


def test_a_result_of_no_step_ends_the_engine(make: Callable[..., Client]) -> None:
    class Strays(FakeExecutor):
        def collect(self) -> list[StepResult]:
            return [StepResult(99, [[]]) for _ in super().collect()]

    client = make(Strays.of(vocab_size=50, **SIZES))
    client.add("a", [1])
    assert client.hear(Failed)[0].error["kind"] == "StepDiverged"


def test_nobody_waits_for_the_check_of_the_accounting(make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.engine.loop.QUIET_SECONDS", 0.4)
    client = make()
    checked: list[float] = []
    check = client.scheduler.check

    def slow() -> None:
        check()
        checked.append(time.monotonic())
        time.sleep(0.3)

    client.scheduler.check = slow  # type: ignore[method-assign]
    for name in ("a", "b"):  # the second comes before the engine was quiet for long
        client.add(name, [1], max_tokens=3)
        ended(client, 1 if name == "a" else 2)
        answered = time.monotonic()
        assert not checked
    deadline = time.monotonic() + 20
    while not checked and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(checked) == 1 and checked[0] > answered + 0.3  # noqa: PT018 (one sentence)
    time.sleep(0.8)
    assert len(checked) == 1


def test_broken_accounting_is_told_at_the_latest_when_the_engine_ends(make: Callable[..., Client]) -> None:
    client = make()
    client.add("a", [1], max_tokens=3)
    ended(client, 1)
    client.scheduler.pool._free.pop()
    assert client.finish() == 1


def test_many_long_prompts_do_not_keep_the_ranks_waiting() -> None:
    """The messages of one iteration are taken until their time is over; the others are not lost."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += loop.RECEIVE_SECONDS * 0.4
        return now

    encode = msgspec.msgpack.Encoder().encode
    frames = [encode(AddRequest(f"r{i}", [1, 2, 3], SamplingParams())) for i in range(10)]
    scheduler = Scheduler(SchedulerOptions(**SIZES, vocab_size=50))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        one = Loop(socket, FakeExecutor.of(vocab_size=50, **SIZES), scheduler, backlog=frames, clock=clock)
        one._receive()
        assert list(scheduler.open_ids) == ["r0", "r1", "r2"]
        while one._frames:
            one._receive()
    assert sorted(scheduler.open_ids) == [f"r{i}" for i in range(10)]


class Stuck(FakeExecutor):
    """Ranks that stop at the third step."""

    def collect(self) -> list[StepResult]:
        return [result for result in super().collect() if result.number < 3]


def test_work_that_waits_for_a_step_that_does_not_end_is_reported(make: Callable[..., Client]) -> None:
    client = make(Stuck.of(vocab_size=50, **SIZES))
    client.loop._times._step_timeout = 1.0
    client.add("waits", [1, 2, 3], max_tokens=9)
    begin = time.monotonic()
    while not (stats := client.hear(Stats, len([m for m in client.heard if isinstance(m, Stats)]) + 1)[-1]).stalled:
        assert time.monotonic() - begin < 10
    assert stats.stalled.startswith("step 3 has run for ")
    client.say(Abort(["waits"]))


def test_requests_for_which_no_step_begins_are_reported(make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STALLED_SECONDS", 0.3)
    client = make()
    monkeypatch.setattr(client.scheduler, "schedule", lambda *_: None)
    client.add("waits", [1, 2, 3], max_tokens=9)
    assert any(stats.stalled == "" for stats in client.hear(Stats))
    while not (stats := client.hear(Stats, len([m for m in client.heard if isinstance(m, Stats)]) + 1)[-1]).stalled:
        pass
    assert re.fullmatch(r"requests wait, and no step has begun for \d+ s", stats.stalled)
