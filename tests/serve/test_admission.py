# SPDX-License-Identifier: Apache-2.0
"""Admission control counts what is inside, and gives every place back."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import EngineClosed, Overloaded, RankDied, RequestError
from phalanx.serve.admission import QUEUED_BATCHES, AdmissionControl, Phase


def admission_of(*, batch=2, max_reqs=3, max_tokens=None, clock=lambda: 0.0):
    admission = AdmissionControl(max_tokens=max_tokens, clock=clock)
    admission.begin(batch=batch, max_reqs=max_reqs)
    return admission


def test_the_batch_and_the_queue_limit_what_is_accepted():
    admission = admission_of()
    tickets = [admission.enter(1) for _ in range(5)]
    message = (
        r"^the queue is full: 1 more completion does not fit; 5 completions wait, and 5 may: 3 \(max_num_queued_reqs\) and 2 for"
    )
    with pytest.raises(Overloaded, match=message):
        admission.enter(1)
    for ticket in tickets[:2]:
        ticket.started(0)
    with pytest.raises(Overloaded, match=r"3 completions wait, and 3 may: 3 \(max_num_queued_reqs\) and 0 for"):
        admission.enter(1)  # the batch is full now
    tickets[0].__exit__(None, None, None)
    with admission.enter(1):
        assert (admission.open, admission.queued) == (5, 4)
    assert (admission.open, admission.queued) == (4, 3)


def test_a_request_is_accepted_as_a_whole_or_not_at_all():
    admission = admission_of()
    with admission.enter(4):
        with pytest.raises(Overloaded, match="2 more completions do not fit; 4 completions wait, and 5 may"):
            admission.enter(2)
        assert (admission.open, admission.queued) == (4, 4)
    with pytest.raises(RequestError, match=r"^6 completions exceed the limit of one request, 5") as never:
        admission.enter(6)
    assert not isinstance(never.value, Overloaded)


def test_tokens():
    admission = admission_of(max_tokens=100)
    with admission.enter(2) as first:
        first.prompt([80, 80])  # the first may be longer than the queue
        with admission.enter(1) as second:
            with pytest.raises(
                Overloaded, match=r"^the queue is full: a prompt of 1 tokens does not fit; 160 tokens wait, and 100 may"
            ):
                second.prompt([1])
            first.started(0)
            second.prompt([20])
            assert admission.queued_tokens == 100
            first.started(1)
            first.started(1)
            assert admission.queued_tokens == 20
    assert (admission.open, admission.queued, admission.queued_tokens) == (0, 0, 0)


def test_a_cap_by_default():
    admission = admission_of(max_reqs=None)
    assert admission.max_reqs == QUEUED_BATCHES * 2
    nothing_waits = admission_of(max_reqs=0)
    with nothing_waits.enter(2), pytest.raises(Overloaded):
        nothing_waits.enter(1)


def test_phases():
    admission = AdmissionControl()
    with pytest.raises(EngineClosed, match="starting"):
        admission.enter(1)
    admission.begin(batch=1, max_reqs=1)
    with admission.enter(1):
        admission.drain()
        assert admission.phase is Phase.DRAINING
        with pytest.raises(EngineClosed, match="shutting down"):
            admission.enter(1)
        assert admission.open == 1
    admission.fail(RankDied("rank 3 died"))
    admission.drain()
    assert admission.phase is Phase.FAILED
    with pytest.raises(EngineClosed, match="rank 3 died"):
        admission.enter(1)
    stopped = AdmissionControl()
    stopped.drain()
    stopped.begin(batch=1, max_reqs=1)
    assert stopped.phase is Phase.DRAINING


def refused(act) -> int:
    """The seconds of a refusal, which its message says, too."""
    with pytest.raises(Overloaded) as refusal:
        act()
    assert str(refusal.value).endswith(f"; try again in {refusal.value.retry_after} s")
    return refusal.value.retry_after


def one_each_second(admission, now, count=10):
    for _ in range(count):
        with admission.enter(1):
            now[0] += 1.0


def test_retry_after_follows_the_rate():
    now = [0.0]
    admission = admission_of(max_reqs=100, clock=lambda: now[0])
    assert admission.retry_after() == 1
    one_each_second(admission, now)
    admission.enter(102)
    assert refused(lambda: admission.enter(1)) == 1, "not until the whole queue is empty"
    assert 15 <= refused(lambda: admission.enter(20)) <= 20
    assert refused(lambda: admission.enter(90)) == 60
    assert admission.retry_after() == 1


def test_retry_after_counts_no_idle_time():
    now = [0.0]
    admission = admission_of(max_reqs=100, clock=lambda: now[0])
    one_each_second(admission, now)
    now[0] += 3600.0
    admission.enter(102)
    assert 8 <= refused(lambda: admission.enter(10)) <= 10
    now[0] += 40.0  # nothing ends
    assert refused(lambda: admission.enter(10)) > 40


def test_retry_after_of_a_queue_that_is_full_of_tokens():
    now = [0.0]
    admission = admission_of(max_reqs=100, max_tokens=100, clock=lambda: now[0])
    one_each_second(admission, now)
    admission.enter(10).prompt([10] * 10)
    with admission.enter(2) as two:
        assert 3 <= refused(lambda: two.prompt([20, 20])) <= 4
    with admission.enter(1) as long:
        assert refused(lambda: long.prompt([500])) <= 10, "an empty queue takes any prompt"


def test_emptied():
    async def wait() -> None:
        admission = admission_of()
        await admission.emptied()
        ticket = admission.enter(1)
        waits = asyncio.create_task(admission.emptied())
        await asyncio.sleep(0)
        assert not waits.done()
        ticket.__exit__(None, None, None)
        await waits

    asyncio.run(wait())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["enter", "tokens", "start", "leave"]), st.integers(0, 4)), max_size=60))
@example([("enter", 4), ("start", 0), ("start", 1), ("start", 2), ("start", 3), ("enter", 2)])
def test_counts_never_drift(acts):
    admission, inside = admission_of(batch=3, max_reqs=4, max_tokens=50), []
    for act, number in acts:
        try:
            if act == "enter":
                inside.append((admission.enter(number + 1), number + 1))
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
        assert admission.open == sum(size for _, size in inside)
        running = admission.open - admission.queued  # here more may start than an engine's batch has
        assert 0 <= admission.queued <= admission.open <= max(3, running) + 4
        assert admission.queued_tokens == sum(sum(t._waiting.values()) for t, _ in inside)
    for ticket, _ in inside:
        ticket.__exit__(None, None, None)
    assert (admission.open, admission.queued, admission.queued_tokens) == (0, 0, 0)
