# SPDX-License-Identifier: Apache-2.0
"""The simulator: committed throughput figures, an independent count of prefix hits, its speed, and what any queue must obey."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace

import pytest

from benchmarks import harness
from benchmarks.planner import accuracy, served, traces
from benchmarks.planner.throughput import batch_rows
from phalanx.engine.limits import SchedulerOptions, depth_of
from phalanx.engine.messages import BlockCopy, Step, StepBatch
from phalanx.errors import EngineError
from phalanx.layout import Layout
from phalanx.planner import arrivals, scenario, simulate, subject
from phalanx.planner.arrivals import Arrival
from phalanx.planner.cost import Costs, Work
from phalanx.planner.scenario import ReplicaSpec
from phalanx.planner.search import PlanRequest
from phalanx.planner.simulate import CopySeconds, engine_scheduler

MACHINE, _ = subject.machine_for("H200")
SHAPE = subject.shape_for("llama-3-70b")


def costs(tp=4, pp=1):
    return Costs(SHAPE, "fp8", "fp8", Layout(tp=tp, pp=pp), MACHINE)


def options(**changes):
    return SchedulerOptions(
        **{"num_blocks": 20_000, "block_size": 16, "max_batch_size": 64, "max_num_tokens": 8192, "max_seq_len": 16384, **changes}
    )


def test_throughput_rows_are_predicted_within_the_gates():
    """All that are committed, as `python -m benchmarks.planner.accuracy --write` kept them, which are those that there are."""
    lines = accuracy.kept_throughput()
    assert [(line.what, line.file, line.measured) for line in lines] == [
        (row.name, row.file, row.measured) for row in batch_rows()
    ], "run `python -m benchmarks.planner.accuracy --write`"  # fmt: skip
    assert len(lines) >= 40
    assert sum(abs(line.error) for line in lines) / len(lines) <= accuracy.GATES["throughput rows, mean"]
    for line in lines:
        assert abs(line.error) <= accuracy.GATES["throughput rows, worst"], line


def test_kept_throughput_is_what_the_scheduler_makes_of_the_present_costs():
    """One row of twenty: a change of the costs or of the scheduler changes all of them."""
    kept = accuracy.kept_throughput()[::20]
    for line, again in zip(kept, accuracy.throughput(every=20), strict=True):
        assert again.predicted == pytest.approx(line.predicted, rel=1e-6), "run `python -m benchmarks.planner.accuracy --write`"


@pytest.mark.parametrize("path", accuracy.served_traces(), ids=lambda path: path.stem)
def test_a_served_trace_is_simulated_within_the_goals(path):
    """p50 and p90 within 10 percent, p99 within 20, of what clients of the real server measured."""
    document = served.again(path)
    assert len(document["requests"].split()) >= 200
    assert {row["what"] for row in document["figures"]} == {"ttft_ms", "tpot_ms"}
    assert not served.missed(document["figures"]), document["figures"]


def test_a_frontend_delays_first_tokens_and_spreads_the_events_of_a_step():
    rows = arrivals.of("burst", isl=100, osl=20, requests=8)
    bare = simulate.run(costs(), options(), rows).served
    through = simulate.run(costs(), options(), rows, frontend=simulate.Frontend(path=0.004, event=0.0001)).served
    later = [through[number].first - bare[number].first for number in range(8)]
    assert later == pytest.approx([0.004 + 0.0001 * (number + 1) for number in range(8)])
    assert [each.tpot for each in through] == pytest.approx([each.tpot for each in bare])


def test_a_server_slower_than_its_engine_falls_behind():
    rows = arrivals.of("burst", isl=100, osl=20, requests=8)
    bare = simulate.run(costs(), options(), rows).served[0]
    slow = simulate.run(costs(), options(), rows, frontend=simulate.Frontend(event=bare.tpot)).served
    assert min(each.tpot for each in slow) > 7 * bare.tpot


def test_prefix_hits_are_those_of_an_independent_count(tmp_path):
    draw, rows, fresh = random.Random(3), [], 0
    for number in range(60):
        ids = list(draw.choice(rows)["hash_ids"][: draw.randint(0, 6)]) if rows and draw.random() < 0.7 else []
        while len(ids) < 1 + draw.randint(0, 6):
            ids.append(fresh)
            fresh += 1
        length = (len(ids) - 1) * 512 + (512 if draw.random() < 0.3 else draw.randint(1, 511))
        if rows and length % 512 and any(ids[-1] in row["hash_ids"] for row in rows):
            ids[-1], fresh = fresh, fresh + 1  # an id of a part of 512 tokens is of that part alone
        rows.append({"timestamp": number, "input_length": length, "output_length": 1 + number % 4, "hash_ids": ids})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hits, prompt_tokens = traces.counted(path)
    result = simulate.run(costs(), options(), arrivals.of(str(path), isl=0, osl=0, requests=0), concurrency=1)
    assert hits > 5000
    assert (result.hits, result.queries) == (hits, prompt_tokens)


def test_host_memory_finds_what_the_device_has_lost_and_requests_wait_for_their_copies():
    """Eight prompts of 2,048 tokens come again and again, and the device holds three."""
    rows = [Arrival(0.0, 2048, 2, (number % 8 * 4, *range(number % 8 * 4 + 1, number % 8 * 4 + 4))) for number in range(40)]
    few = options(num_blocks=3 * 2048 // 16 + 12, max_batch_size=1)
    without = simulate.run(costs(), few, rows, concurrency=1)
    host = replace(few, host_blocks=8 * 128, copied_blocks=128)
    free = simulate.run(costs(), host, rows, concurrency=1)
    slow = simulate.run(costs(), host, rows, concurrency=1, copies=CopySeconds(1e-4))
    assert (without.hits, without.host_hits) == (0, 0)
    assert free.host_hits == free.hits == slow.hits == 32 * 2032, "all but the last block of each, which has the token to compute"
    assert slow.seconds - free.seconds == pytest.approx(32 * 127 * 1e-4), "nothing runs beside them"
    assert free.seconds < 0.5 * without.seconds


def test_copies_from_host_memory_run_beside_the_steps_of_other_requests():
    """Seven requests decode while an eighth, whose prompt of 8,192 tokens has left the device, loads it in parts of 64 blocks. A
    part takes less than a step, so that these steps are no longer; and more than one where the bus is slow."""
    prompt = tuple(range(17))
    rows = [
        Arrival(0.0, 16 * 512, 2, prompt),
        *(Arrival(5.0 + n, 16 * 512, 2, (100 * n, *range(100 * n + 1, 100 * n + 17))) for n in range(1, 8)),
    ]
    rows += [Arrival(20.0, 64, 200) for _ in range(7)] + [Arrival(20.5, 16 * 512, 2, prompt)]
    host = options(num_blocks=8192 * 3 // 16, host_blocks=20_000, copied_blocks=64)
    quiet, fast, slow = (
        simulate.run(costs(), host, rows[: -1 if seconds is None else None], copies=CopySeconds(seconds or 0.0)).served
        for seconds in (None, 5e-5, 1e-3)
    )
    step = quiet[8].tpot
    assert 64 * 5e-5 < step < 64 * 1e-3
    parts = 511 // 64
    assert fast[8].tpot == pytest.approx(quiet[8].tpot, rel=0.03), "with one step that computes the last tokens of the prompt"
    assert parts * step < fast[-1].ttft < (parts + 4) * step
    assert slow[8].tpot > 1.3 * quiet[8].tpot
    assert 511 * 1e-3 < slow[-1].ttft < 1.2 * 511 * 1e-3


def test_a_state_takes_the_bus_as_blocks_do():
    copies, host = CopySeconds(1e-3, 0.5), options(host_blocks=8, host_states=2, copied_blocks=4, state_snapshots=1)
    replica = simulate.SimulatedReplica(engine_scheduler(host, 1), costs(), {}, copies=copies)

    def ready(now, **batch):
        return replica._copied(Step(1, [StepBatch(**batch)]), now)

    assert ready(0.0) == 0.0
    block, state = [BlockCopy(1, 1, 1)], [BlockCopy(2, 1, 1)]
    assert ready(1.0, loaded=block * 4, loaded_states=state) == pytest.approx(1.504)
    assert ready(1.0, loaded_states=state) == pytest.approx(2.004), "behind those of the step before"
    replica.free = [9.0]
    assert ready(3.0, loaded_states=state * 3) == pytest.approx(9.496), (
        "what the buffers do not take begins behind the steps before"
    )
    assert ready(20.0, saved_states=state) < 20.0, "the buffers take it"
    assert ready(20.0, saved_states=state * 3) == pytest.approx(20.0 + 4 * 0.5 - 1.004)


def test_hits_of_70b_from_host_memory_are_predicted_as_they_were_measured():
    """`benchmarks/results/host_memory_hits_70b_tp2.json`: with nothing beside them, and beside 16 streams."""
    measured = json.loads((harness.RESULTS / "host_memory_hits_70b_tp2.json").read_text())
    sizes, tokens = measured["asked"], measured["asked"]["prompt"]
    request = PlanRequest(
        "fp8", "fp8", isl=tokens, osl=400, max_batch_size=64, max_seq_len=tokens + 1000, kv_host_memory=sizes["kv_host_memory"]
    )  # fmt: skip
    spec = ReplicaSpec.of(
        subject.shape_for("llama-3-70b"), MACHINE, request, Layout(tp=2), frontend=scenario.frontend_of(MACHINE)[0]
    )
    spec = replace(spec, options=replace(spec.options, num_blocks=sizes["kv_cache_bytes"] // (16 * 81_920)))
    texts = [tuple(range(200 * n, 200 * n + tokens // 512 + 1)) for n in range(4)]
    rows = [Arrival(20.0 * n, tokens, 2, text) for n, text in enumerate([*texts, *texts])]
    served = spec.run(rows).served
    computed, copied = ([one.ttft for one in part] for part in (served[:4], served[4:]))
    assert max(copied) < 0.1 * min(computed)
    assert 0.5 * min(measured["found"]) < min(copied) <= max(copied) < 1.1 * max(measured["found"])
    streams = [Arrival(100.0, 64, 400) for _ in range(sizes["streams"])]
    alone, beside = (spec.run([*rows[:4], *streams, *more]).served for more in ([], [Arrival(101.0, tokens, 2, texts[0])]))
    measured_gaps = [part["during"]["p50_ms"] / part["quiet"]["p50_ms"] for part in measured["beside"]]
    first_tokens = [part["first_token_s"] for part in measured["beside"]]
    gaps = statistics.median(one.tpot for one in beside[4:-1]) / statistics.median(one.tpot for one in alone[4:])
    assert 1.0 <= gaps < max(1.03, *measured_gaps)
    assert 0.5 * min(first_tokens) < beside[-1].ttft < 1.1 * max(first_tokens)


def test_it_is_fast():
    result = simulate.run(costs(), options(prefix_caching=False), arrivals.of("burst", isl=500, osl=300, requests=128))
    assert result.tokens_per_core_second >= 200_000


def test_one_request_takes_its_steps_one_after_the_other():
    step_costs = costs()
    served = simulate.run(step_costs, options(), [Arrival(5.0, 100, 3)]).served[0]
    prompt = step_costs.without_power_limit.seconds(Work(128, 1, 0.0, 100 * 50.0))  # in a graph of 128, on a GPU that rested
    assert (served.arrival, served.queued) == (5.0, 0.0)
    assert served.ttft == pytest.approx(prompt)
    tokens = [step_costs.seconds(Work(1, 1, 100 + n)) for n in range(2)]
    assert served.e2e == pytest.approx(prompt + sum(tokens))
    assert served.tpot == pytest.approx(sum(tokens) / 2)


def test_who_comes_while_steps_are_in_flight_waits():
    rows = [Arrival(0.0, 8000, 50), Arrival(0.001, 100, 5)]
    first, second = simulate.run(costs(), options(), rows).served
    assert second.queued > 0
    assert second.first > first.first
    alone = simulate.run(costs(), options(), rows[1:]).served[0]
    assert second.ttft > 5 * alone.ttft


@pytest.mark.parametrize("replicas", [2, 7])
def test_more_replicas_are_never_slower(replicas):
    rows = arrivals.of("poisson:30", isl=800, osl=80, requests=200, seed=2)
    one, many = (simulate.run(costs(), options(), rows, count) for count in (1, replicas))
    mean = [sum(each.e2e for each in result.served) / len(rows) for result in (one, many)]
    assert mean[1] < mean[0]
    assert many.generated == one.generated == 200 * 80


@pytest.mark.parametrize(("stages", "part"), [(2, 0.9), (4, 0.83)])
def test_the_stages_of_a_pipeline_are_busy_all_the_time(stages, part):
    """Also while prompts of two chunks and more keep coming, of which all last ones were in the steps of one stage."""
    rows = arrivals.of("burst", isl=1000, osl=100, requests=128)
    result = simulate.run(costs(1, stages), options(depth=stages, pipeline_stages=stages), rows)
    assert result.generated == 128 * 100
    assert result.busy > part * result.seconds


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("filled", [False, True])
def test_tokens_that_return_on_the_device_are_awaited_by_the_first_stage(stages, filled):
    """A step that takes tokens begins when the step that samples them has ended: one request passes all stages for each token, also
    where its next steps are in flight. Nobody gains here, as a simulated engine knows each token at once."""
    requests = stages if filled else 1
    rows, known = arrivals.of("burst", isl=64, osl=100, requests=requests), costs(1, stages)
    waits, returns = (
        simulate.run(known, options(pipeline_stages=stages, depth=depth_of(stages, returns_tokens=each), returns_tokens=each), rows)
        for each in (False, True)
    )
    assert waits.generated == returns.generated == requests * 100
    assert returns.seconds == pytest.approx(waits.seconds, rel=1e-3)


def test_a_closed_loop_keeps_as_many_open():
    rows = arrivals.of("burst", isl=300, osl=30, requests=40)
    served = simulate.run(costs(), options(), rows, concurrency=4).served
    for each in served:
        overlapping = sum(other.arrival < each.last and each.arrival < other.last for other in served)
        assert overlapping <= 2 * 4
    assert max(each.arrival for each in served) > 0


def test_a_refused_request_is_told_and_the_others_go_on():
    result = simulate.run(costs(), options(max_seq_len=512), [Arrival(0.0, 600, 5), Arrival(0.0, 100, 5)])
    assert "a prompt of 600 tokens" in result.served[0].refused
    assert result.served[1].last > 0


def test_a_scheduler_that_stands_still_is_an_error(monkeypatch):
    monkeypatch.setattr(simulate.SimulatedReplica, "submit", lambda self, now: None)
    with pytest.raises(EngineError, match="stands still"):
        simulate.run(costs(), options(), [Arrival(0.0, 10, 2)])


def test_data_parallel_indices_take_as_long_as_the_fullest():
    """Two groups of four ranks: two requests that come together run on one each, and a third one waits for no slot of the other."""
    shape, split = subject.shape_for("mixtral-8x22b"), Layout(tp=4, dp=2)
    both = Costs(shape, "fp8", "fp8", split, MACHINE)
    limits = options(max_batch_size=2, num_blocks=400)
    pair = [Arrival(0.0, 100, 50), Arrival(0.0, 100, 50)]
    result = simulate.run(both, limits, pair)
    assert [(served.output_len, served.refused) for served in result.served] == [(50, ""), (50, "")]
    assert result.served[0].last == result.served[1].last
    alone = simulate.run(both, limits, pair[:1])
    assert alone.seconds == pytest.approx(result.seconds)  # an index without a request waits for the other
    third = simulate.run(both, limits, [*pair, Arrival(0.0, 100, 50)])
    assert third.served[2].queued == pytest.approx(result.seconds)
    assert third.generated == 150
