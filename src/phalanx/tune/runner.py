# SPDX-License-Identifier: Apache-2.0
"""Run a benchmark: start a group of ranks, follow them, and bring every candidate to a time or to a recorded skip.

A candidate that hangs or kills a rank costs one restart of the group: it is skipped with the reason, and the rest is measured.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.comm import launch
from phalanx.errors import EngineError, OptionError
from phalanx.hardware import provenance
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.log import get_logger
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Strategy
from phalanx.tune import preflight, records
from phalanx.tune.journal import Journal, differences, journal_path
from phalanx.tune.options import TuneOptions
from phalanx.tune.records import Benchmark
from phalanx.tune.sweep import Sweep, Task

_log = get_logger(__name__)
_POLL_S = 0.02
_LAST_EVENTS_S = 0.5  # for the ranks that fail after the first one, so that the cause is among what they report
_GIVE_UP_AFTER = 3  # faults of one choice in one fusion, after which the rest of its kind is skipped
_MODULE = "phalanx.tune.ranks.rank_process"

OnProgress = Callable[[int, int, str], None]
"""Called with (done, of, what comes next)."""


@dataclass(frozen=True)
class BenchmarkRun:
    """A benchmark at one TP size.

    sweep: the plan for the machine that the ranks report. remeasured: strategies whose times, in the journal or in the CSV, are
    measured again; the rest of the CSV is kept, as with `extend`. max_bytes: the longest message without chunks. module: of the
    ranks.
    """

    world: int
    device: str
    sweep: Callable[[Fingerprint], Sweep]
    options: TuneOptions
    remeasured: frozenset[Strategy] = frozenset()
    max_bytes: int = 256 << 20
    module: str = _MODULE

    @property
    def folder(self) -> Path:
        return self.options.save_csv_dir

    @property
    def method(self) -> dict[str, Any]:
        """Fields of `ranks.measure.Method`."""
        return {"calls": self.options.calls, "replays": self.options.replays}

    @property
    def keeps_csv(self) -> bool:
        """Whether what the CSV in the folder holds stays in it."""
        return self.options.extend or bool(self.remeasured)


def require_no_lost_times(run: BenchmarkRun, sm: int) -> None:
    """Raise OptionError, as far as it can be known without ranks, where the run would replace a CSV that belongs to no interrupted
    run."""
    if not (run.keeps_csv or run.options.restart or journal_path(run.folder, run.world, sm).exists()):
        preflight.require_no_lost_times(records.csv_path(run.folder, run.world, sm))


def run_benchmark(run: BenchmarkRun, on_progress: OnProgress | None = None) -> Benchmark:
    """Measure all that `run` plans, and write CSV and sidecar. Results of an interrupted run are taken from its journal.

    A run that its time limit ends writes what it has, keeps the journal and says so in facts["complete"].
    Raises EngineError when the ranks cannot start, or when no candidate got a time; OptionError when the folder holds the journal
    of another run, or a CSV whose times would be lost, or when the plan leaves nothing to measure.
    """
    end = time.monotonic() + run.options.time_limit if run.options.time_limit else float("inf")
    state: RunState | None = None
    try:
        while True:
            with _ranks(run) as ranks:
                fingerprint, facts = ranks.hello()
                if state is None:
                    state = RunState(run, fingerprint, facts, on_progress)
                state.report()
                ranks.send_tasks(state.remaining())
                at_fault, why = _follow(ranks, state, run.options.deadline, end)
            if why is None or why == _TIME_IS_UP:
                return state.write(complete=why is None)
            if at_fault is None:
                message = f"the benchmark's ranks at tp {run.world} failed before their first task"
                raise EngineError(message, why=why, next="see the ranks' messages above")
            _log.warning("%s is skipped: %s; the group starts again", at_fault, why)
            state.record_fault(at_fault, why)
    finally:
        if state is not None:
            state.journal.close()


_TIME_IS_UP = "the time limit"


def _follow(ranks: _Ranks, state: RunState, deadline: float, end: float) -> tuple[Task | None, str | None]:
    """Take results until the last: (None, None); or (the task that was running, why the group cannot go on)."""
    running: Task | None = None
    since = time.monotonic()
    while True:
        for event in ranks.events():
            since = time.monotonic()
            if "begin" in event:
                running = Task.parse(event["begin"])
            elif "task" in event:
                state.record_result(event)
            elif event.get("end"):
                return None, None
        error = ranks.error()
        if error is not None:
            return running, error
        now = time.monotonic()
        if now > end:
            return running, _TIME_IS_UP
        if now - since > deadline:
            return running, f"no answer within the deadline of {deadline:g} s"
        time.sleep(_POLL_S)


class RunState:
    """What is known of one run: its plan, its journal, and the CSV that was there before."""

    def __init__(
        self, run: BenchmarkRun, fingerprint: Fingerprint, facts: dict[str, str], on_progress: OnProgress | None
    ) -> None:  # fmt: skip
        self.fingerprint, self.on_progress = fingerprint, on_progress
        self.facts = facts | provenance.collect(run.options.commit).run_facts()
        self.folder, self.sweep = run.folder, run.sweep(fingerprint)
        self.tasks, self.refused = self.sweep.plan()
        preflight.require_tasks(run.world, self.tasks, self.refused)
        self.resume_advice = "run the same command again" + (", without --restart" if run.options.restart else "")
        self.before: Benchmark | None = None
        path = records.csv_path(run.folder, fingerprint.world, fingerprint.sm)
        versions = {key: facts[key] for key in _VERSIONS if key in facts}
        if run.keeps_csv and path.exists():
            self.before = _require_same_versions(records.read(path), versions, path)
        self.journal = _journal(run, fingerprint, {"fingerprint": str(fingerprint), "method": run.method} | versions)
        if self.journal.resumed:
            _log.info("%d results of an interrupted run are taken from %s", self.journal.resumed, self.journal.path)
            if not self.journal.sessions and path.exists():  # a journal without sessions: the sidecar names the earlier one
                self.journal.begin_session(_session_facts(records.read(path).facts))
        self.journal.begin_session(_session_facts(self.facts))
        known = self._known()
        again = self.journal.remeasure(task for task in self.tasks if task.choice.strategy in run.remeasured and task in known)
        if run.remeasured:
            _log.info("%d times are to be measured again, %d of them newly marked", len(self.journal.pending), again)
        self.faults: Counter[tuple[Any, ...]] = Counter()

    def _known(self) -> set[Task]:
        return set(self.journal.samples) | set(self.journal.skips) | set(self.before.times if self.before else ())

    def remaining(self) -> list[Task]:
        done = self._known() - self.journal.pending
        return [task for task in self.tasks if task not in done]

    def report(self, what: str = "") -> None:
        if self.on_progress is not None:
            self.on_progress(len(self.tasks) - len(self.remaining()), len(self.tasks), what)

    def record_result(self, event: dict[str, Any]) -> None:
        task = Task.parse(event["task"])
        if "skip" in event:
            _log.warning("%s is skipped: %s", task, event["skip"])
            self.journal.skip(task, event["skip"])
        else:
            self.journal.record(task, event["samples"])
        self.report(str(task))

    def record_fault(self, task: Task, why: str) -> None:
        """Skip a task that broke the group; and the rest of its kind once that has happened too often."""
        self.journal.skip(task, why)
        kind = (task.choice, task.fusion)
        self.faults[kind] += 1
        if self.faults[kind] >= _GIVE_UP_AFTER:
            for other in self.remaining():
                if (other.choice, other.fusion) == kind:
                    self.journal.skip(other, f"not tried after {self.faults[kind]} faults of its kind, the last: {why}")

    def write(self, *, complete: bool) -> Benchmark:
        """Write CSV and sidecar of all that is known. The journal is removed when the run is complete and no wider run left it."""
        left, old = len(self.remaining()), len(self.journal.pending)
        wider = {*self.journal.samples, *self.journal.skips, *self.journal.pending}.difference(self.tasks)
        if complete and not wider:
            self.facts["complete"] = "yes"
        elif complete:
            self.facts["complete"] = f"no: a wider run, with {len(wider)} more results here, has not ended; run its command again"
        else:
            kept = f", {old} of them with their old times until then" if old else ""
            self.facts["complete"] = f"no: {left} of {len(self.tasks)} are left{kept}; {self.resume_advice}"
        earlier = [" at ".join(session.values()) for session in self.journal.sessions[:-1]]
        if earlier:
            self.facts["earlier"] = "; ".join(dict.fromkeys(earlier))
        bench = Benchmark(
            self.fingerprint.sm,
            self.fingerprint.world,
            times={task: statistics.median(samples) for task, samples in self.journal.samples.items()},
            samples=dict(self.journal.samples),
            skips=self.refused | self.journal.skips,
            facts=self.facts,
            grid=_widened(self.sweep.grid(), self.journal.samples),
            link=self.fingerprint.link,
        )
        if self.before is not None:
            bench = _joined(self.before, bench)
        if bench.times:
            records.write(bench, self.folder)
        if complete and not wider:
            self.journal.finish()
        if not bench.times:
            reasons = preflight.summarize_skips(self.journal.skips) + ([] if complete else [f"{_TIME_IS_UP} was over"])
            raise EngineError(
                f"not one of {len(self.tasks)} candidates at tp {self.fingerprint.world} got a time",
                why="; ".join(reasons),
                next="see the ranks' messages above" if complete else f"{self.resume_advice}, with a longer --time_limit",
            )
        return bench


def _journal(run: BenchmarkRun, fingerprint: Fingerprint, head: dict[str, Any]) -> Journal:
    """The run's journal. Refuses a run that would drop times of the CSV in the folder."""
    require_no_lost_times(run, fingerprint.sm)
    journal = Journal(journal_path(run.folder, fingerprint.world, fingerprint.sm), head, restart=run.options.restart)
    try:
        if run.options.restart and not run.keeps_csv:
            journal.mark_csv_replaced()
        elif run.keeps_csv:
            journal.keep_csv()
        elif not journal.replaces_csv:
            known = {*journal.samples, *journal.skips}
            preflight.require_no_lost_times(records.csv_path(run.folder, fingerprint.world, fingerprint.sm), known)
    except BaseException:
        journal.close()
        raise
    return journal


_VERSIONS = ("torch", "triton", "nccl", "gpu", "driver", "cpu", "phalanx")
"""Facts in which results of one CSV must agree."""


def _session_facts(facts: dict[str, str]) -> dict[str, str]:
    return {key: facts[key] for key in ("date", "commit") if key in facts}


def _require_same_versions(old: Benchmark, versions: dict[str, str], path: Path) -> Benchmark:
    """Return a CSV that is to be extended. Raise OptionError where it names other versions than this run's."""
    differs = differences(old.facts, versions)
    if differs:
        raise OptionError(
            f"{path} cannot be extended",
            why="it was measured with another " + ", ".join(f"{key} ({old.facts[key]}, not {versions[key]})" for key in differs),
            next="measure into another --save_csv_dir, or give --restart alone to replace it",
        )
    return old


def _joined(old: Benchmark, new: Benchmark) -> Benchmark:
    """Both; where both have a cell, the new one."""
    times = {task: us for task, us in old.times.items() if task not in new.skips} | new.times
    samples = {task: values for task, values in (old.samples | new.samples).items() if task in times}
    skips = {task: why for task, why in (old.skips | new.skips).items() if task not in times}
    facts = new.facts | ({"extends": old.facts["date"]} if "date" in old.facts else {})
    grid = _widened(new.grid or {}, old.times, old.grid)
    return Benchmark(new.sm, new.world, times, samples, skips, facts, grid, new.link)


def _widened(grid: dict[str, Any], tasks: Iterable[Task], other: dict[str, Any] | None = None) -> dict[str, Any]:
    """The grid, extended by the sizes and fusions of these tasks and by another grid."""
    cells, axes = list(tasks), other or {}
    tokens = {*grid["tokens"], *axes.get("tokens", ()), *(task.tokens for task in cells)}
    hidden = {*grid["hidden"], *axes.get("hidden", ()), *(task.hidden for task in cells)}
    fusions = {*grid["fusions"], *axes.get("fusions", ()), *(task.fusion.name for task in cells)}
    in_order = [fusion.name for fusion in Fusion if fusion.name in fusions]
    return grid | {"tokens": sorted(tokens), "hidden": sorted(hidden), "fusions": in_order}


class _Ranks:
    """The rank processes of one start, and the folder through which they communicate."""

    def __init__(self, run: BenchmarkRun, folder: Path) -> None:
        self.folder, self.run = folder, run
        self.since = time.monotonic()
        config = {
            "folder": str(folder), "world": run.world, "device": run.device, "method": run.method, "max_bytes": run.max_bytes,
            "timeout": run.options.start_timeout,
        }  # fmt: skip
        self.children = [
            launch.start(run.module, config | {"rank": rank}, f"phalanx bench rank {rank} of {run.world}")
            for rank in range(run.world)
        ]
        self._offsets = [0] * run.world

    def hello(self) -> tuple[Fingerprint, dict[str, str]]:
        """What rank 0 reports of the machine, once all ranks have met."""
        timeout = self.run.options.start_timeout
        while time.monotonic() - self.since < timeout:
            for event in self.events():
                if "hello" in event:
                    return Fingerprint.parse(event["hello"]), event["facts"]
            error = self.error()
            if error is not None:
                raise EngineError(
                    f"a benchmark of {self.run.world} ranks did not start", why=error, next="see the ranks' messages above"
                )
            time.sleep(_POLL_S)
        raise EngineError(
            f"a benchmark of {self.run.world} ranks did not start",
            why=f"the ranks have not met within {timeout:g} s",
            next="see the ranks' messages above, or give a longer --start_timeout",
        )

    def send_tasks(self, tasks: list[Task]) -> None:
        part = self.folder / "work.part"
        part.write_text(json.dumps([str(task) for task in tasks]), encoding="utf-8")
        part.replace(self.folder / "work")

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """The events of a rank since the last call."""
        path = self.folder / f"events.{rank}"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets[rank])
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1]
        self._offsets[rank] += len(lines)
        return [json.loads(line) for line in lines.splitlines()]

    def error(self) -> str | None:
        """Why a rank has ended too early, by its last event or its exit status; None while none has. A rank that only lost its
        peers is named last."""
        if not any(child.process.poll() for child in self.children):
            return None
        launch.wait(self.children, _LAST_EVENTS_S)
        causes: list[str] = []
        consequences: list[str] = []
        for rank, child in enumerate(self.children):
            code = child.process.poll()
            if not code:
                continue
            errors = [event for event in self._all_events(rank) if "error" in event]
            text = f"rank {rank}: {errors[-1]['error']}" if errors else f"rank {rank} {launch.exit_words(code)}"
            (consequences if errors and errors[-1]["lost_peer"] else causes).append(text)
        return (causes or consequences)[0]

    def _all_events(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"events.{rank}"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"}")]


@contextlib.contextmanager
def _ranks(run: BenchmarkRun) -> Iterator[_Ranks]:
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        ranks = _Ranks(run, Path(folder))
        try:
            yield ranks
        finally:
            # Ranks that have sent their last event end by themselves; a hung one ends by SIGKILL only.
            launch.wait(ranks.children, 0.5)
            launch.stop(ranks.children, grace=0)
