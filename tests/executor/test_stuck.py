# SPDX-License-Identifier: Apache-2.0
"""Who holds up a step: by what the ranks tell of their places. And 24 hours of busy machines on which nobody does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phalanx.engine.loop import STALLED_PART
from phalanx.engine.step_times import StepLoad, StepTimes
from phalanx.engine.watch_clock import WatchClock
from phalanx.executor.heartbeat import HeartbeatMonitor
from phalanx.executor.protocol import RankPlace, StepDone
from phalanx.executor.rank_executor import RankExecutor
from phalanx.executor.stuck import RankState, find
from phalanx.layout.layout import Layout
from phalanx.layout.rank_progress import BEHIND_LAYERS, Call
from tests.support.engine_drive import options


def reduces(layers: int, each: int = 2) -> list[Call]:
    """What a rank of a tensor-parallel group calls in a step."""
    calls = [Call(layer + 1, "tp", "all_reduce") for layer in range(layers) for _ in range(each)]
    return [Call(0, "tp", "all_reduce"), *calls, Call(BEHIND_LAYERS, "tp", "all_gather")]


def inside(rank: int, calls: list[Call], step: int = 7) -> RankState:
    return RankState(rank, f"pid {rank}", step, step - 1, calls[-1].layer, True, False, calls)


def computing(rank: int, calls: list[Call], layer: int, step: int = 7) -> RankState:
    return RankState(rank, f"pid {rank}", step, step - 1, layer, False, False, calls)


def ended(rank: int, calls: list[Call] | None, step: int = 7) -> RankState:
    return RankState(rank, f"pid {rank}", step, step, BEHIND_LAYERS, False, True, calls)


def culprit_of(layout: Layout, *views: RankState) -> tuple[str, str]:
    culprit = find(7, {view.rank: view for view in views}, layout)
    return culprit.failure, culprit.evidence


def test_a_rank_that_computes_while_others_wait_is_named_with_collective_and_layer() -> None:
    calls = reduces(4)
    views = [inside(rank, calls[:4]) for rank in (0, 1, 3)] + [computing(2, calls[:3], 2)]
    failure, evidence = culprit_of(Layout(tp=4), *views)
    assert failure == "rank 2 has not come to all_reduce of the tensor-parallel group in layer 1, number 4 of step 7"
    assert evidence == "rank 2 (pid 2) computes in layer 1; ranks 0, 1 and 3 wait"


def test_a_rank_that_has_not_begun_the_step_is_named() -> None:
    failure, evidence = culprit_of(Layout(tp=2), inside(0, reduces(2)[:1]), RankState(1, "pid 1", 6, 6))
    assert "has not come to all_reduce of the tensor-parallel group before the layers" in failure
    assert "has not begun step 7" in evidence


def test_who_waits_for_one_that_waits_is_not_to_blame() -> None:
    """Stage 1 waits for stage 0, of which rank 0 waits for rank 1."""
    calls, receive = reduces(2), Call(0, "pp", "receive")
    views = [inside(0, calls[:3]), computing(1, calls[:2], 1), inside(2, [receive]), inside(3, [receive])]
    failure, _ = culprit_of(Layout(pp=2, tp=2), *views)
    assert "all_reduce of the tensor-parallel group in layer 0" in failure


def test_a_result_that_was_lost_on_its_way_blames_no_rank() -> None:
    failure, evidence = culprit_of(Layout(tp=2), ended(0, reduces(2)), ended(1, reduces(2)))
    assert failure == "all ranks have finished step 7, and no result of it has come to the engine"
    assert evidence == "rank 0 (pid 0) has finished step 7; rank 1 (pid 1) has finished step 7"


def test_a_stage_that_has_not_sent_is_named() -> None:
    failure, evidence = culprit_of(Layout(pp=2), computing(0, [], 2), inside(1, [Call(0, "pp", "receive")]))
    assert failure.startswith("rank 0 has not come to send of the pipeline, for which rank 1 is in receive of the pipeline before")
    assert evidence == "rank 0 (pid 0) computes in layer 1; rank 1 waits"


def test_a_message_that_was_sent_and_does_not_arrive_is_the_links() -> None:
    failure, evidence = culprit_of(
        Layout(pp=2), ended(0, [Call(BEHIND_LAYERS, "pp", "send")]), inside(1, [Call(0, "pp", "receive")])
    )  # fmt: skip
    assert failure.startswith("receive of the pipeline before the layers")
    assert "the link between them stands still" in evidence


def test_a_collective_to_which_all_have_come_is_the_links_also_where_others_wait_for_it() -> None:
    calls, receive = reduces(2), Call(0, "pp", "receive")
    views = [inside(0, calls[:3]), inside(1, calls[:3]), inside(2, [receive]), inside(3, [receive])]
    failure, evidence = culprit_of(Layout(pp=2, tp=2), *views)
    assert failure == "all_reduce of the tensor-parallel group in layer 0, number 3 of step 7, does not end"
    assert evidence.startswith("ranks 0 and 1 have all come to it")


@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_skipped_call_is_named_wherever_it_is(at: int, victim: int) -> None:
    """Also where the rank that skipped it has ended the step, and where it has begun the next one."""
    calls = reduces(4)
    without = calls[:at] + calls[at + 1 :]
    own = ended(victim, without)
    for other in (inside(1 - victim, calls), ended(1 - victim, calls)):
        failure, _ = culprit_of(Layout(tp=2), own, other)
        assert failure == f"rank {victim} (pid {victim}) skipped {calls[at].words} in step 7"


@pytest.mark.parametrize("victim", [0, 1])
def test_of_two_ranks_that_have_made_one_call_the_step_before_tells_which_skipped(victim: int) -> None:
    usual = [Call(layer, "dp", operation) for layer in (1, 2) for operation in ("all_gather", "reduce_scatter")]
    states = [
        RankState(0, "pid 0", 7, 6, 1, True, False, [usual[1 if victim == 0 else 0]], 0.0, usual),
        RankState(1, "pid 1", 7, 6, 1, True, False, [usual[1 if victim == 1 else 0]], 0.0, usual),
    ]
    failure, _ = culprit_of(Layout(dp=2), *states)
    assert failure == f"rank {victim} (pid {victim}) skipped all_gather of the data-parallel group in layer 0 in step 7"


def on_device(rank: int, calls: list[Call], step: int = 7) -> RankState:
    """Of a GPU, which says to which call it came last."""
    layer = calls[-1].layer if calls else 0
    return RankState(rank, f"pid {rank}", step, step - 1, layer, bool(calls), True, calls, on_device=True)


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_gpu_that_has_not_come_to_a_collective_is_named(at: int, victim: int) -> None:
    """As where a kernel spins in a graph."""
    calls = reduces(4)
    failure, evidence = culprit_of(Layout(tp=2), on_device(victim, calls[:at]), on_device(1 - victim, calls[: at + 1]))
    assert failure == f"rank {victim} has not come to {calls[at].words}, number {at + 1} of step 7"
    last = f"rank {victim} (pid {victim}) came last to {calls[at - 1].words}, and is in it or computes behind it"
    assert evidence == f"{last}; rank {1 - victim} waits"


def test_a_gpu_that_has_come_to_no_collective_is_named() -> None:
    failure, evidence = culprit_of(Layout(tp=2), on_device(0, reduces(2)[:1]), on_device(1, []))
    assert failure.startswith("rank 1 has not come to all_reduce of the tensor-parallel group before the layers, number 1 of")
    assert evidence == "rank 1 (pid 1) has come to no collective of the step; rank 0 waits"


@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_gpu_that_skips_a_collective_is_named(at: int, victim: int) -> None:
    calls = reduces(4)
    without = calls[:at] + calls[at + 1 :]
    failure, _ = culprit_of(Layout(tp=2), on_device(victim, without), on_device(1 - victim, calls))
    if at < len(calls) - 1:
        assert failure == f"rank {victim} (pid {victim}) skipped {calls[at].words} in step 7"
    else:
        assert failure.startswith(f"rank {victim} has not come to {calls[at].words}")


def test_a_collective_of_gpus_to_which_all_have_come_is_the_links() -> None:
    calls, receive = reduces(2), Call(0, "pp", "receive")
    failure, evidence = culprit_of(Layout(tp=2), on_device(0, calls[:3]), on_device(1, calls[:3]))
    assert failure == "all_reduce of the tensor-parallel group in layer 0, number 3 of step 7, does not end"
    assert evidence.endswith("the link between them stands still, or each of them computes behind it")
    views = [on_device(0, calls[:3]), on_device(1, calls[:3]), on_device(2, [receive]), on_device(3, [receive])]
    assert culprit_of(Layout(pp=2, tp=2), *views)[0] == failure


def test_a_gpu_behind_its_last_collective_does_not_finish_the_step() -> None:
    calls = reduces(2)
    failure, evidence = culprit_of(Layout(tp=2), ended(0, calls), on_device(1, calls))
    assert failure == "rank 1 does not finish step 7"
    assert f"came last to {calls[-1].words}" in evidence


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("victim", [0, 1])
def test_in_the_first_step_the_order_of_calls_tells_which_of_two_ranks_skipped(at: int, victim: int) -> None:
    calls = [Call(layer, "dp", operation) for layer in (1, 2, 3) for operation in ("all_gather", "reduce_scatter")]
    calls.append(Call(BEHIND_LAYERS, "dp", "all_gather"))
    failure, _ = culprit_of(
        Layout(dp=2), inside(victim, [*calls[:at], calls[at + 1]]), inside(1 - victim, calls[: at + 1])
    )  # fmt: skip
    assert failure == f"rank {victim} (pid {victim}) skipped {calls[at].words} in step 7"


@pytest.mark.parametrize("world", [3, 4])
def test_of_many_ranks_the_odd_one_skipped(world: int) -> None:
    calls = reduces(4)
    for victim in range(world):
        views = [inside(rank, calls[:8]) for rank in range(world) if rank != victim]
        failure, _ = culprit_of(Layout(tp=world), *views, inside(victim, calls[:4] + calls[5:9]))
        assert "all_reduce of the tensor-parallel group in layer 1" in failure


def test_a_rank_without_heartbeats_stands_still() -> None:
    calls = reduces(2)
    stopped = RankState(1, "pid 1", 7, 6, 2, False, False, calls[:2], silent=6.0)
    failure, evidence = culprit_of(Layout(tp=2), inside(0, calls[:4]), stopped)
    assert failure == "rank 1 stands still"
    assert "last heartbeat 6 s ago; it was in step 7, in layer 1; rank 0 is in all_reduce" in evidence


def test_gpus_that_do_not_finish_are_named_where_nothing_tells_more() -> None:
    views = [RankState(0, "pid 0", 8, 7), RankState(1, "pid 1", 8, 6, queued=True)]
    failure, evidence = culprit_of(Layout(tp=2), *views)
    assert failure == "rank 1 does not finish step 7"
    assert "has queued all of step 7, and its device has not finished it" in evidence


@pytest.mark.parametrize("trouble", ["busy", "clocks", "stopped"])
def test_no_alarm_in_24_hours_of_a_busy_machine(trouble: str) -> None:
    """busy: steps take up to 8 times as long, and heartbeats come seconds late. clocks: they fall to a third for minutes. stopped:
    the virtual machine stands still for up to ten minutes, in the middle of a step. Nor does /ready say that work stalls."""
    chance, times = random.Random(7), StepTimes(300.0)
    executor = RankExecutor(options(Path("x"), tensor_parallel_size=2))
    flight, heartbeats = executor._in_flight, executor._heartbeats
    now, number, slow_until, alarms, stalls = 0.0, 0, 0.0, 0, 0
    watch = WatchClock(lambda: now)
    beats = {0: 0.0, 1: 0.0}
    while now < 24 * 3600:
        number += 1
        load = StepLoad(chance.choice((64, 64, 512)), 64_000, chance.choice((0, 40_000)))
        seconds = 0.3 + load.tokens * 2e-3
        if trouble == "busy":
            seconds *= 1 + 7 * chance.random() ** 4
        elif trouble == "clocks":
            slow_until = now + chance.uniform(60, 600) if chance.random() < 0.001 else slow_until
            seconds *= 3 if now < slow_until else 1
        flight.submitted(number, b"d", watch.look(), limit=times.limit(load))
        times.submitted(number, load, watch.look())
        end, layer = now + seconds, 0
        while now < end:
            now = min(now + 0.5, end)
            if trouble == "stopped" and chance.random() < 0.002:
                stop = chance.uniform(1, 600)
                now, end, beats = now + stop, end + stop, {rank: at + stop for rank, at in beats.items()}
            layer, looked = layer + 1, watch.look()
            for rank, due in beats.items():
                if now >= due:
                    beats[rank] = now + 1.0 + (3 * chance.random() ** 3 if trouble == "busy" else 0.0)
                    heartbeats.rank_heartbeat(rank, looked, RankPlace(number, number - 1, layer))
            alarms += heartbeats.first_silent(looked) is not None
            oldest, running = flight.oldest(looked), times.oldest(looked)
            alarms += oldest is not None and executor._stuck(oldest, looked) is not None
            stalls += running is not None and running[1] >= STALLED_PART * running[2]
        times.ended(number, watch.look())
        for rank in (0, 1):
            flight.record(StepDone(rank, number, b"d", 5, [] if rank == 0 else None), watch.look())
        flight.completed()
    assert number > 20_000
    assert alarms == 0
    assert trouble == "busy" or stalls == 0


def test_a_rank_that_stood_at_its_place_before_the_step_is_not_still_in_it() -> None:
    """It had nothing to do, and was stopped as soon as the step came: only its silence tells, later."""
    monitor = HeartbeatMonitor(20.0)
    for now in range(10):
        for rank in (0, 1):
            monitor.rank_heartbeat(rank, float(now), RankPlace(2, 2))
    for now in (10.5, 11.5, 12.5, 13.5):
        monitor.rank_heartbeat(0, now, RankPlace(3, 2))
    assert not monitor.stand_still(9.5, 13.5, seconds=2.0, silent=5.0)
    assert monitor.stand_still(9.5, 14.0, seconds=2.0, silent=5.0)


@pytest.mark.parametrize("layer_moves", [True, False])
def test_the_same_watch_finds_a_step_that_does_not_end(layer_moves: bool) -> None:
    """Within 10 seconds, unless a rank moves: then at step_timeout."""
    executor = RankExecutor(options(Path("x"), tensor_parallel_size=2, step_timeout=60.0))
    executor._in_flight.submitted(1, b"d", 0.0, limit=5.0)
    now = 0.0
    while now < 100.0:
        now += 0.5
        for rank in (0, 1):
            executor._heartbeats.rank_heartbeat(rank, now, RankPlace(1, 0, int(now) if layer_moves else 3))
        executor._heartbeats.first_silent(now)
        oldest = executor._in_flight.oldest(now)
        assert oldest is not None
        if executor._stuck(oldest, now) is not None:
            break
    assert (60 <= now < 62) if layer_moves else (5 <= now < 10)


@pytest.mark.parametrize(("queued", "named"), [(False, False), (True, True)])
def test_a_gpu_rank_that_still_queues_its_step_may_compile(monkeypatch: pytest.MonkeyPatch, queued: bool, named: bool) -> None:
    executor = RankExecutor(options(Path("x")))
    monkeypatch.setattr(executor, "_options", executor._options.model_copy(update={"device": "cuda"}))
    executor._in_flight.submitted(1, b"d", 0.0, limit=5.0)
    for now in range(9):
        executor._heartbeats.rank_heartbeat(0, float(now), RankPlace(1, 0, 3, queued=queued))
    oldest = executor._in_flight.oldest(8.0)
    assert oldest is not None
    error = executor._stuck(oldest, 8.0)
    assert (error is not None) is named
    assert error is None or str(error).startswith(
        "rank 0 does not finish step 1; rank 0 (not heard of yet) has queued all of step 1"
    )
