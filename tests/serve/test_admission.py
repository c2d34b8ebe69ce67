# SPDX-License-Identifier: Apache-2.0
"""The door counts what is inside, and gives every place back."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import EngineClosed, Overloaded, RankDied, RequestError
from phalanx.serve.admission import QUEUED_BATCHES, AdmissionControl, Phase


def door(*, batch=2, max_reqs=3, max_tokens=None, clock=lambda: 0.0):
    made = AdmissionControl(max_tokens=max_tokens, clock=clock)
    made.begin(batch=batch, max_reqs=max_reqs)
    return made


def test_as_many_as_the_batch_and_the_queue_hold():
    held = door()
    tickets = [held.enter(1) for _ in range(5)]
    with pytest.raises(Overloaded, match=r"1 more was asked for; 5 completions wait, and 5 may: 3 \(max_num_queued_reqs\) and 2"):
        held.enter(1)
    for ticket in tickets[:2]:
        ticket.started(0)
    with pytest.raises(Overloaded, match=r"3 completions wait, and 3 may: 3 \(max_num_queued_reqs\) and 0 for"):
        held.enter(1)  # the batch is full now
    tickets[0].__exit__(None, None, None)
    with held.enter(1):
        assert (held.open, held.queued) == (5, 4)
    assert (held.open, held.queued) == (4, 3)


def test_all_of_a_request_or_none():
    held = door()
    with held.enter(4):
        with pytest.raises(Overloaded, match="2 more were asked for; 4 completions wait, and 5 may"):
            held.enter(2)
        assert (held.open, held.queued) == (4, 4)
    with pytest.raises(RequestError, match="6 completions were asked for at once; this server holds 5") as never:
        held.enter(6)
    assert not isinstance(never.value, Overloaded)


def test_tokens():
    held = door(max_tokens=100)
    with held.enter(2) as first:
        first.prompt([80, 80])  # the first may be longer than the queue
        with held.enter(1) as second:
            with pytest.raises(Overloaded, match="160 tokens are waiting, and 100 may"):
                second.prompt([1])
            first.started(0)
            second.prompt([20])
            assert held.queued_tokens == 100
            first.started(1)
            first.started(1)
            assert held.queued_tokens == 20
    assert (held.open, held.queued, held.queued_tokens) == (0, 0, 0)


def test_a_cap_by_default():
    held = door(max_reqs=None)
    assert held.max_reqs == QUEUED_BATCHES * 2
    nothing_waits = door(max_reqs=0)
    with nothing_waits.enter(2), pytest.raises(Overloaded):
        nothing_waits.enter(1)


def test_phases():
    held = AdmissionControl()
    with pytest.raises(EngineClosed, match="starting"):
        held.enter(1)
    held.begin(batch=1, max_reqs=1)
    with held.enter(1):
        held.drain()
        assert held.phase is Phase.DRAINING
        with pytest.raises(EngineClosed, match="shutting down"):
            held.enter(1)
        assert held.open == 1
    held.fail(RankDied("rank 3 died"))
    held.drain()
    assert held.phase is Phase.FAILED
    with pytest.raises(EngineClosed, match="rank 3 died"):
        held.enter(1)
    stopped = AdmissionControl()
    stopped.drain()
    stopped.begin(batch=1, max_reqs=1)
    assert stopped.phase is Phase.DRAINING


def test_retry_after_follows_the_rate():
    now = [0.0]
    held = door(max_reqs=100, clock=lambda: now[0])
    assert held.retry_after() == 1
    for _ in range(10):  # one leaves each second
        with held.enter(1):
            now[0] += 1.0
    held.enter(20)
    assert 15 <= held.retry_after() <= 20
    held.enter(80)
    assert held.retry_after() == 60


def test_emptied():
    async def wait() -> None:
        held = door()
        await held.emptied()
        ticket = held.enter(1)
        waits = asyncio.create_task(held.emptied())
        await asyncio.sleep(0)
        assert not waits.done()
        ticket.__exit__(None, None, None)
        await waits

    asyncio.run(wait())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["enter", "tokens", "start", "leave"]), st.integers(0, 4)), max_size=60))
def test_counts_never_drift(acts):
    held, inside = door(batch=3, max_reqs=4, max_tokens=50), []
    for act, number in acts:
        try:
            if act == "enter":
                inside.append((held.enter(number + 1), number + 1))
            elif inside:
                ticket, size = inside[number % len(inside)]
                if act == "tokens" and len(ticket._waiting) == size and not any(ticket._waiting.values()):
                    ticket.prompt([number] * size)
                elif act == "start":
                    ticket.started(number)
                elif act == "leave":
                    ticket.__exit__(None, None, None)
                    inside.pop(number % len(inside))
        except (Overloaded, RequestError):
            pass
        assert held.open == sum(size for _, size in inside)
        assert 0 <= held.queued <= held.open <= 3 + 4
        assert held.queued_tokens == sum(sum(t._waiting.values()) for t, _ in inside)
    for ticket, _ in inside:
        ticket.__exit__(None, None, None)
    assert (held.open, held.queued, held.queued_tokens) == (0, 0, 0)
