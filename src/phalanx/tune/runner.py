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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx import launch
from phalanx.errors import EngineError, OptionError, file_named
from phalanx.hardware import provenance
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.log import get_logger
from phalanx.progress import OnProgress
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


@dataclass(frozen=True)
class BenchmarkRun:
    """A benchmark at one TP size.

    sweep: the plan for the machine that the ranks report. remeasured: strategies whose times are measured again. max_bytes: the
    longest message without chunks. module: of the ranks.
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


def run_benchmark(run: BenchmarkRun, on_progress: OnProgress | None = None) -> Benchmark:
    """Measure what the journal lacks of all that `run` plans, and print the journal as CSV and sidecar.

    A run that its time limit ends writes what it has, and says so in facts["complete"].
    Raises EngineError when the ranks cannot start, or when no candidate got a time; OptionError when the folder's journal, or a CSV
    without one, was measured with other versions or another method, or when the plan leaves nothing to measure.
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
                state.record(Task.parse(event["task"]), event["skip"] if "skip" in event else event["samples"])
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
    """What is known of one run: its plan and its journal."""

    def __init__(
        self, run: BenchmarkRun, fingerprint: Fingerprint, facts: dict[str, str], on_progress: OnProgress | None
    ) -> None:  # fmt: skip
        self.fingerprint, self.on_progress = fingerprint, on_progress
        self.facts = facts | provenance.collect(run.options.commit).run_facts()
        self.folder, self.sweep = run.folder, run.sweep(fingerprint)
        self.tasks, self.refused = self.sweep.plan()
        preflight.require_tasks(run.world, self.tasks, self.refused)
        self.resume_advice = "run the same command again" + (", without --restart" if run.options.restart else "")
        versions = {key: facts[key] for key in _VERSIONS if key in facts}
        self.journal = _journal(run, fingerprint, {"fingerprint": str(fingerprint), "method": run.method} | versions)
        if self.journal.resumed:
            _log.info("%d results are taken from %s; --restart measures all again", self.journal.resumed, self.journal.path)
        self.journal.begin_session(_session_facts(self.facts))
        known = self._known()
        again = self.journal.remeasure(task for task in self.tasks if task.choice.strategy in run.remeasured and task in known)
        if run.remeasured:
            _log.info("%d times are to be measured again, %d of them newly marked", len(self.journal.pending), again)
        self.faults: Counter[tuple[Any, ...]] = Counter()

    def _known(self) -> set[Task]:
        return {*self.journal.samples, *self.journal.skips}

    def remaining(self) -> list[Task]:
        done = self._known() - self.journal.pending
        return [task for task in self.tasks if task not in done]

    def report(self, what: str = "") -> None:
        if self.on_progress is not None:
            self.on_progress(len(self.tasks) - len(self.remaining()), len(self.tasks), what)

    def record(self, task: Task, result: list[float] | str) -> None:
        """result: samples, or why there are none."""
        if isinstance(result, str):
            _log.warning("%s is skipped: %s", task, result)
            self.journal.skip(task, result)
        else:
            self.journal.record(task, result)
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
        """Print the journal as CSV and sidecar."""
        left, old = len(self.remaining()), len(self.journal.pending.intersection(self.tasks))
        kept = f", {old} of them with their old times until then" if old else ""
        self.facts["complete"] = "yes" if complete else f"no: {left} of {len(self.tasks)} are left{kept}; {self.resume_advice}"
        earlier = [" at ".join(session.values()) for session in self.journal.sessions[:-1]]
        if earlier:
            self.facts["earlier"] = "; ".join(dict.fromkeys(earlier))
        samples = self.journal.samples
        bench = Benchmark(
            self.fingerprint.sm,
            self.fingerprint.world,
            times={task: statistics.median(values) for task, values in samples.items()},
            samples=dict(samples),
            skips={task: why for task, why in (self.refused | self.journal.skips).items() if task not in samples},
            facts=self.facts,
            grid=_widened(self.sweep.grid(), samples),
            link=self.fingerprint.link,
        )
        if bench.times:
            records.write(bench, self.folder)
            return bench
        reasons = preflight.summarize_skips(self.journal.skips) + ([] if complete else [f"{_TIME_IS_UP} was over"])
        if complete:
            self.journal.remove()
        raise EngineError(
            f"not one of {len(self.tasks)} candidates at tp {self.fingerprint.world} got a time",
            why="; ".join(reasons),
            next="see the ranks' messages above" if complete else f"{self.resume_advice}, with a longer --time_limit",
        )


def _journal(run: BenchmarkRun, fingerprint: Fingerprint, head: dict[str, Any]) -> Journal:
    """The journal of this machine and TP size. A CSV without one is its beginning."""
    path = journal_path(run.folder, fingerprint.world, fingerprint.sm)
    csv = records.csv_path(run.folder, fingerprint.world, fingerprint.sm)
    before = records.read(csv) if csv.exists() and not path.exists() and not run.options.restart else None
    if before is not None:
        _require_same_versions(before, head, csv)
    journal = Journal(path, head, restart=run.options.restart)
    if before is not None:
        journal.begin_session(_session_facts(before.facts))
        for task, us in before.times.items():
            journal.record(task, before.samples.get(task, [us]))
    return journal


_VERSIONS = ("torch", "triton", "nccl", "gpu", "driver", "cpu", "phalanx")
"""Facts in which results of one CSV must agree."""


def _session_facts(facts: dict[str, str]) -> dict[str, str]:
    return {key: facts[key] for key in ("date", "commit") if key in facts}


def _require_same_versions(old: Benchmark, head: dict[str, Any], path: Path) -> None:
    """Raise OptionError for a CSV that names other versions than this run's."""
    if differs := differences(old.facts, head):
        raise OptionError(
            f"{path} cannot be extended",
            why="it was measured with another " + ", ".join(f"{key} ({old.facts[key]}, not {head[key]})" for key in differs),
            next="measure into another --save_csv_dir, or give --restart to replace it",
        )


def _widened(grid: dict[str, Any], tasks: Collection[Task]) -> dict[str, Any]:
    """The grid, extended by the sizes and fusions of these tasks."""
    tokens = {*grid["tokens"], *(task.tokens for task in tasks)}
    hidden = {*grid["hidden"], *(task.hidden for task in tasks)}
    fusions = {*grid["fusions"], *(task.fusion.name for task in tasks)}
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
        with file_named(part):
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
