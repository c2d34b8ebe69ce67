# SPDX-License-Identifier: Apache-2.0
"""Whatever one candidate does, the others get their times, and nothing is measured twice. Processes are real; some are fakes."""

from __future__ import annotations

import json
import os

import pytest

from phalanx.errors import EngineError, OptionError, TableError
from phalanx.tables.strategy import Strategy
from phalanx.tune import records
from phalanx.tune.options import TuneOptions
from phalanx.tune.runner import BenchmarkRun, run_benchmark
from phalanx.tune.sweep import Sweep, Task
from tests.architecture.sources import ROOT

pytestmark = pytest.mark.usefixtures("forked_python")

ONESHOT, TWOSHOT = "bf16 NONE {}x128 ONESHOT", "bf16 NONE {}x128 TWOSHOT"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(faults, **fields of TuneOptions or BenchmarkRun) -> (Benchmark, tasks that were measured now)."""
    monkeypatch.setenv("PHALANX_TEST_FAULTS", str(tmp_path / "faults.json"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"))))

    def go(faults=None, *, tokens="1,16", hidden="128", strategies="GLOO,ONESHOT", stop_after=None, samples=None, **fields):
        monkeypatch.setenv("PHALANX_TEST_SAMPLES", json.dumps(samples or [5.0, 6.0, 7.0]))
        (tmp_path / "faults.json").write_text(json.dumps(faults or {}), encoding="utf-8")
        own = {"module": "tests.support.tune_fake_rank"}
        own |= {name: fields.pop(name) for name in ("module", "remeasured") if name in fields}
        options = TuneOptions(**{"save_csv_dir": tmp_path / "data", "calls": 2, "replays": 3} | fields)
        reported: list[str] = []

        def on_progress(done, of, what):
            reported.append(what)
            if stop_after is not None and len(reported) > stop_after:
                raise KeyboardInterrupt

        def sweep(fingerprint):
            return Sweep.from_text(fingerprint, tokens=tokens, hidden=hidden, fusions="NONE", strategies=strategies)

        bench = run_benchmark(BenchmarkRun(2, "cpu", sweep, options, **own), on_progress)
        return bench, [Task.parse(what) for what in reported if what]

    go.folder = tmp_path / "data"
    return go


ALL_FILES = ["benchmark.tp2.sm0.csv", "benchmark.tp2.sm0.journal", "benchmark.tp2.sm0.json"]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_times_of_real_ranks_and_wrong_candidates(run):
    faults = {TWOSHOT.format(1): "wrong", TWOSHOT.format(2): "unwritten", TWOSHOT.format(4): "refuse", TWOSHOT.format(8): "raise"}
    result, _ = run(faults, tokens="1,2,4,8,16", strategies="GLOO,TWOSHOT", module="tests.support.tune_faulty_rank")
    assert {str(task): reason for task, reason in result.skips.items()} == {
        TWOSHOT.format(1): "wrong on another rank",
        TWOSHOT.format(2): "wrong on another rank",
        TWOSHOT.format(4): "another rank cannot run it",
        TWOSHOT.format(8): "rank 1: ArithmeticError: a kernel said no",
    }
    assert len(result.times) == 6
    assert all(us > 1 for us in result.times.values())
    assert all(len(samples) == 3 for samples in result.samples.values())
    assert result.facts["complete"] == "yes"
    assert {"torch", "cpu", "date", "command"} <= set(result.facts)
    assert files(run.folder) == ALL_FILES
    assert records.read(run.folder / "benchmark.tp2.sm0.csv").skips == result.skips


def test_a_hang_and_a_death_cost_one_candidate_each(run):
    faults = {ONESHOT.format(1): "hang", ONESHOT.format(2): "die"}
    result, _ = run(faults, tokens="1,2,4", deadline=2.0)
    assert {str(task): reason for task, reason in result.skips.items()} == {
        ONESHOT.format(1): "no answer within the deadline of 2 s",
        ONESHOT.format(2): "rank 0 was killed by SIGKILL",
    }
    assert len(result.times) == 4


def test_a_kind_that_keeps_failing_is_given_up(run):
    faults = {ONESHOT.format(tokens): "raise" for tokens in (1, 2, 4, 8, 16)}
    result, _ = run(faults, tokens="1,2,4,8,16")
    reasons = [result.skips[Task.parse(ONESHOT.format(tokens))] for tokens in (1, 2, 4, 8, 16)]
    assert all("a kernel said no" in reason for reason in reasons)
    assert [reason.startswith("not tried after 3 faults") for reason in reasons] == [False, False, False, True, True]
    assert {task.choice.strategy for task in result.times} == {Strategy.NCCL}


def test_a_broken_run_resumes_and_a_finished_one_extends(run):
    with pytest.raises(KeyboardInterrupt):
        run(stop_after=2)
    assert files(run.folder) == ["benchmark.tp2.sm0.journal"]
    with pytest.raises(OptionError, match="differs in method"):
        run(calls=1)
    part, measured = run({ONESHOT.format(16): "hang"}, time_limit=1.5)
    assert len(measured) == 1
    assert part.facts["complete"].startswith("no: 1 of 4 are left")
    assert files(run.folder) == ALL_FILES
    assert len(records.read(run.folder / "benchmark.tp2.sm0.csv").times) == 3
    complete, measured = run()
    assert [str(task) for task in measured] == [ONESHOT.format(16)]
    assert complete.facts["complete"] == "yes"
    more, measured = run(tokens="16,32", strategies="GLOO,ONESHOT,TWOSHOT")
    assert len(measured) == 4
    assert more.times.items() >= complete.times.items()
    assert len(records.read(run.folder / "benchmark.tp2.sm0.csv").times) == 8


def test_a_finished_record_loses_nothing(run):
    """The same command measures nothing, and prints the same times; narrower and wider ones add to them."""
    complete, measured = run()
    assert len(measured) == 4
    path = run.folder / "benchmark.tp2.sm0.csv"
    text = path.read_bytes()
    for fields in ({}, {"tokens": "1"}, {"strategies": "ONESHOT"}):
        result, measured = run(**fields, samples=[8.0, 9.0, 10.0])
        assert (measured, result.times, result.facts["complete"]) == ([], complete.times, "yes")
        assert path.read_bytes() == text
    path.unlink()
    path.with_suffix(".json").unlink()
    run()
    assert path.read_bytes() == text  # the CSV is printed from the journal
    with pytest.raises(KeyboardInterrupt):
        run(tokens="1,16,32", stop_after=1)
    assert path.read_bytes() == text
    result, measured = run(tokens="1,16,32")
    assert (len(result.times), len(measured)) == (6, 1)
    assert records.read(path).times == result.times


@pytest.mark.parametrize("sidecar", [True, False])
def test_a_csv_without_a_journal_is_the_beginning_of_one(run, sidecar):
    """As one of TensorRT-LLM's tools, or one that was copied here alone."""
    complete, _ = run()
    (run.folder / "benchmark.tp2.sm0.journal").unlink()
    if not sidecar:
        (run.folder / "benchmark.tp2.sm0.json").unlink()
    result, measured = run(tokens="1,16,32", samples=[8.0, 9.0, 10.0])
    assert len(measured) == 2
    assert result.times.items() >= complete.times.items()
    samples = [result.samples[task] for task in complete.times]
    assert samples == ([complete.samples[task] for task in complete.times] if sidecar else [[6.0]] * 4)


def test_a_record_is_replaced_on_demand_and_a_broken_replacement_goes_on(run):
    run(tokens="1,16,32")
    with pytest.raises(KeyboardInterrupt):
        run(restart=True, stop_after=2, samples=[8.0, 9.0, 10.0])
    assert len(records.read(run.folder / "benchmark.tp2.sm0.csv").times) == 6
    part, measured = run({ONESHOT.format(16): "hang"}, time_limit=1.5, samples=[8.0, 9.0, 10.0])
    assert len(measured) + 1 == len(part.times) - 1
    result, measured = run()
    assert [str(task) for task in measured] == [ONESHOT.format(16)]
    assert sorted(result.times.values()) == [6.0, 9.0, 9.0, 9.0]
    assert records.read(run.folder / "benchmark.tp2.sm0.csv").times == result.times
    part, _ = run({ONESHOT.format(16): "hang"}, time_limit=1.5, restart=True)
    assert part.facts["complete"].endswith("run the same command again, without --restart")


def test_an_unreadable_csv_is_not_replaced_unasked(run):
    run.folder.mkdir()
    (run.folder / "benchmark.tp2.sm0.csv").write_text("something,else\n", encoding="utf-8")
    with pytest.raises(TableError, match="the column 'something' is unknown"):
        run()
    assert files(run.folder) == ["benchmark.tp2.sm0.csv"]
    result, _ = run(restart=True)
    assert records.read(run.folder / "benchmark.tp2.sm0.csv").times == result.times


def test_no_time_is_no_success(run):
    """Every candidate fails, or the limit is over before the first: an error with the reasons, and no CSV."""
    faults = {"bf16 NONE 1x128 NCCL": "die", ONESHOT.format(1): "raise"}
    with pytest.raises(EngineError, match=r"not one of 2 candidates at tp 2.*SIGKILL; .*ONESHOT: rank 0: Arith.*a kernel said no"):
        run(faults, tokens="1")
    assert files(run.folder) == []
    with pytest.raises(EngineError, match="the time limit was over; run the same command again, with a longer --time_limit"):
        run({"bf16 NONE 1x128 NCCL": "hang"}, tokens="1", time_limit=1.0)
    assert files(run.folder) == ["benchmark.tp2.sm0.journal"]
    result, measured = run(tokens="1")
    assert len(measured) == len(result.times) == 2


def test_a_plan_with_nothing_in_it_is_refused(run):
    with pytest.raises(
        OptionError, match=r"all 1 candidates are skipped; .*1x12 ONESHOT: ONESHOT moves 8 .*; give other --strategies"
    ):
        run(hidden="12", tokens="1", strategies="ONESHOT")
    assert not run.folder.exists()


def test_a_journal_can_be_dropped(run):
    with pytest.raises(KeyboardInterrupt):
        run(stop_after=2)
    _, measured = run(restart=True)
    assert len(measured) == 4


def test_ranks_that_cannot_start(run):
    with pytest.raises(EngineError, match="exited with status 1"):
        run(module="phalanx.tune.no_such_module")
    assert not run.folder.exists()


def test_one_strategy_is_measured_again(run):
    """In a whole CSV: broken off, gone on with, and all else as it was."""
    complete, _ = run()
    old = {task: us for task, us in complete.times.items() if task.choice.strategy is Strategy.NCCL}
    with pytest.raises(KeyboardInterrupt):
        run(remeasured=frozenset({Strategy.NCCL}), stop_after=1, samples=[8.0, 9.0, 10.0])
    assert records.read(run.folder / "benchmark.tp2.sm0.csv").times == complete.times
    part, measured = run({"bf16 NONE 16x128 NCCL": "hang"}, remeasured=frozenset({Strategy.NCCL}), time_limit=1.5)
    assert measured == []
    assert part.times.keys() == complete.times.keys()
    assert sorted(part.times[task] for task in old) == [6.0, 9.0]
    assert part.facts["complete"].startswith("no: 1 of 4 are left, 1 of them with their old times until then")
    result, measured = run(remeasured=frozenset({Strategy.NCCL}), samples=[8.0, 9.0, 10.0])
    assert [str(task) for task in measured] == ["bf16 NONE 16x128 NCCL"]
    assert result.times == complete.times | dict.fromkeys(old, 9.0)
    assert result.facts["complete"] == "yes"
    assert result.facts["earlier"]
    _, measured = run(remeasured=frozenset({Strategy.NCCL}), strategies="GLOO", tokens="16")
    assert [str(task) for task in measured] == ["bf16 NONE 16x128 NCCL"]
    assert records.read(run.folder / "benchmark.tp2.sm0.csv").times.keys() == complete.times.keys()


def test_a_narrow_run_beside_a_wider_one_that_broke(run):
    with pytest.raises(KeyboardInterrupt):
        run(stop_after=3)
    result, measured = run(remeasured=frozenset({Strategy.NCCL}), strategies="GLOO", tokens="1")
    assert [str(task) for task in measured] == ["bf16 NONE 1x128 NCCL"]
    assert len(result.times) == 3
    complete, measured = run()
    assert [str(task) for task in measured] == [ONESHOT.format(16)]
    assert complete.facts["complete"] == "yes"
    assert complete.facts["earlier"]


def test_a_narrow_run_leaves_what_a_wider_one_still_has_to_measure_again(run):
    run()
    with pytest.raises(KeyboardInterrupt):
        run(remeasured=frozenset({Strategy.NCCL}), stop_after=1)
    lines = [json.loads(line) for line in (run.folder / "benchmark.tp2.sm0.journal").read_text().splitlines()]
    (done,) = [
        Task.parse(line["task"]).tokens
        for line in lines[lines.index(next(one for one in lines if "again" in one)) :]
        if "samples" in line
    ]
    _, measured = run(remeasured=frozenset({Strategy.NCCL}), strategies="GLOO", tokens=str(done))
    assert measured == []
    complete, measured = run(remeasured=frozenset({Strategy.NCCL}))
    assert [task.tokens for task in measured] == [17 - done]
    assert complete.facts["complete"] == "yes"


def test_other_versions_do_not_extend(run):
    run()
    journal, path = run.folder / "benchmark.tp2.sm0.journal", run.folder / "benchmark.tp2.sm0.json"
    journal.write_text(journal.read_text().replace("a fake one", "another one"))
    with pytest.raises(OptionError, match=r"differs in cpu \(another one, not a fake one\); give --restart"):
        run()
    journal.unlink()
    path.write_text(path.read_text().replace("a fake one", "another one"))
    for fields in ({}, {"remeasured": frozenset({Strategy.NCCL})}):
        with pytest.raises(OptionError, match=r"measured with another cpu \(another one, not a fake one\)"):
            run(**fields)
        assert not journal.exists()
