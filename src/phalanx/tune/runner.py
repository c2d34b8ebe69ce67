# SPDX-License-Identifier: Apache-2.0
"""Run a benchmark: start a group of ranks, follow them, and bring every candidate to a time or to a recorded skip.

A candidate that hangs or kills a rank costs one restart of the group: it is skipped, with the reason, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.comm import launch
from phalanx.errors import EngineError, OptionError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.log import get_logger
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Strategy
from phalanx.tune import preflight, records
from phalanx.tune.journal import Journal, differences, journal_path
from phalanx.tune.records import Benchmark
from phalanx.tune.sweep import Sweep, Task

_log = get_logger(__name__)
_POLL_S = 0.02
_LAST_WORDS_S = 0.5  # for the ranks that follow a failed one, so that the cause is found among what they say
_GIVE_UP_AFTER = 3  # hangs of one choice in one fusion, after which the rest of its kind is skipped
_MODULE = "phalanx.tune.ranks.rank_process"

Progress = Callable[[int, int, str], None]
"""Told (done, of, what is next)."""


@dataclass(frozen=True)
class Run:
    """How to run.

    sweep: the plan for the machine that the ranks find themselves on. Seconds: deadline of one candidate, start of the group, and
    limit of the whole run (None: none). restart: drop a broken run's journal and, unless it is to be extended, replace the CSV.
    extend: measure only what the CSV there lacks. again: strategies whose times, in the journal or in the CSV, are to be measured
    again; the rest of the CSV is kept, as with extend. method: fields of `ranks.measure.Method`. max_bytes: the longest message
    without chunks. module: of the ranks. commit: where git cannot say.
    """

    world: int
    device: str
    folder: Path
    sweep: Callable[[Fingerprint], Sweep]
    deadline: float = 60.0
    start_timeout: float = 180.0
    time_limit: float | None = None
    restart: bool = False
    extend: bool = False
    again: frozenset[Strategy] = frozenset()
    method: dict[str, Any] = field(default_factory=dict)
    max_bytes: int = 256 << 20
    module: str = _MODULE
    commit: str | None = None

    @property
    def keeps(self) -> bool:
        """Whether what the CSV there holds stays in it."""
        return self.extend or bool(self.again)


def check(run: Run, sm: int) -> None:
    """Refuse what can be seen without ranks: a CSV that no broken run belongs to, and that the run would replace."""
    if not (run.keeps or run.restart or journal_path(run.folder, run.world, sm).exists()):
        preflight.lost_times(records.csv_path(run.folder, run.world, sm))


def bench(run: Run, progress: Progress | None = None) -> Benchmark:
    """Measure all that `run` plans, and write CSV and sidecar. What a broken run has measured already is taken from its journal.

    A run that its time limit ends writes what it has, keeps the journal and says so in facts["complete"].
    Raises EngineError when the ranks cannot start, or not one candidate got a time; OptionError when the folder holds another run's
    journal, or a CSV whose times would be lost, or when the plan leaves nothing to measure.
    """
    end = time.monotonic() + run.time_limit if run.time_limit else float("inf")
    state: State | None = None
    try:
        while True:
            with _ranks(run) as ranks:
                fingerprint, facts = ranks.hello()
                if state is None:
                    state = State(run, fingerprint, facts, progress)
                state.told()
                ranks.work(state.left())
                at_fault, why = _follow(ranks, state, run.deadline, end)
            if why is None or why == _TIME_IS_UP:
                return state.write(complete=why is None)
            if at_fault is None:
                message = f"the benchmark's ranks at tp {run.world} were at no task"
                raise EngineError(message, why=why, next="see the ranks' messages above")
            _log.warning("%s is skipped: %s; the group starts again", at_fault, why)
            state.fault(at_fault, why)
    finally:
        if state is not None:
            state.journal.close()


_TIME_IS_UP = "the time limit"


def _follow(ranks: _Ranks, state: State, deadline: float, end: float) -> tuple[Task | None, str | None]:
    """Take results until the last: (None, None); or (the task that was running, why the group cannot go on)."""
    running: Task | None = None
    since = time.monotonic()
    while True:
        for event in ranks.events():
            since = time.monotonic()
            if "begin" in event:
                running = Task.parse(event["begin"])
            elif "task" in event:
                state.result(event)
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


class State:
    """What is known of one run: its plan, its journal, and what was there before."""

    def __init__(self, run: Run, fingerprint: Fingerprint, facts: dict[str, str], progress: Progress | None) -> None:
        from phalanx.tune.ranks.machine import run_facts

        self.fingerprint, self.facts, self.progress = fingerprint, facts | run_facts(run.commit), progress
        self.folder, self.sweep = run.folder, run.sweep(fingerprint)
        self.tasks, self.refused = self.sweep.plan()
        preflight.empty_plan(run.world, self.tasks, self.refused)
        self.once_more = "run the same command again" + (", without --restart" if run.restart else "")
        self.before: Benchmark | None = None
        path = records.csv_path(run.folder, fingerprint.world, fingerprint.sm)
        same = {key: facts[key] for key in _VERSIONS if key in facts}
        if run.keeps and path.exists():
            self.before = _of_the_same(records.read(path), same, path)
        head = {"fingerprint": str(fingerprint), "method": run.method} | same
        self.journal = _journal(run, fingerprint, head)
        if self.journal.resumed:
            _log.info("%d results of a broken run are taken from %s", self.journal.resumed, self.journal.path)
            if not self.journal.sessions and path.exists():  # an older journal: what it has measured, the sidecar tells of
                self.journal.begin_session(_session_facts(records.read(path).facts))
        self.journal.begin_session(_session_facts(self.facts))
        known = self._known()
        again = self.journal.again(task for task in self.tasks if task.choice.strategy in run.again and task in known)
        if run.again:
            _log.info("%d times are measured again, %d of them from now on", len(self.journal.pending), again)
        self.hangs: Counter[tuple[Any, ...]] = Counter()

    def _known(self) -> set[Task]:
        return set(self.journal.samples) | set(self.journal.skips) | set(self.before.times if self.before else ())

    def left(self) -> list[Task]:
        held = self._known() - self.journal.pending
        return [task for task in self.tasks if task not in held]

    def told(self, what: str = "") -> None:
        if self.progress is not None:
            self.progress(len(self.tasks) - len(self.left()), len(self.tasks), what)

    def result(self, event: dict[str, Any]) -> None:
        task = Task.parse(event["task"])
        if "skip" in event:
            _log.warning("%s is skipped: %s", task, event["skip"])
            self.journal.skip(task, event["skip"])
        else:
            self.journal.done(task, event["samples"])
        self.told(str(task))

    def fault(self, task: Task, why: str) -> None:
        """Skip a task that broke the group; and the rest of its kind once that has happened too often."""
        self.journal.skip(task, why)
        kind = (task.choice, task.fusion)
        self.hangs[kind] += 1
        if self.hangs[kind] >= _GIVE_UP_AFTER:
            for other in self.left():
                if (other.choice, other.fusion) == kind:
                    self.journal.skip(other, f"not tried after {self.hangs[kind]} faults of its kind, the last: {why}")

    def write(self, *, complete: bool) -> Benchmark:
        """CSV and sidecar of all that is known; the journal goes when the run is complete, and no wider one has left it."""
        left, old = len(self.left()), len(self.journal.pending)
        wider = {*self.journal.samples, *self.journal.skips, *self.journal.pending}.difference(self.tasks)
        if complete and not wider:
            self.facts["complete"] = "yes"
        elif complete:
            self.facts["complete"] = f"no: a wider run, with {len(wider)} more results here, has not ended; run its command again"
        else:
            stand = f", {old} of them with their old times until then" if old else ""
            self.facts["complete"] = f"no: {left} of {len(self.tasks)} are left{stand}; {self.once_more}"
        earlier = [" at ".join(sitting.values()) for sitting in self.journal.sessions[:-1]]
        if earlier:
            self.facts["earlier"] = "; ".join(dict.fromkeys(earlier))
        found = Benchmark(
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
            found = _joined(self.before, found)
        if found.times:
            records.write(found, self.folder)
        if complete and not wider:
            self.journal.finish()
        if not found.times:
            reasons = preflight.left_out(self.journal.skips) + ([] if complete else [f"{_TIME_IS_UP} was over"])
            raise EngineError(
                f"not one of {len(self.tasks)} candidates at tp {self.fingerprint.world} got a time",
                why="; ".join(reasons),
                next="see the ranks' messages above" if complete else f"{self.once_more}, with a longer --time_limit",
            )
        return found


def _journal(run: Run, fingerprint: Fingerprint, head: dict[str, Any]) -> Journal:
    """The run's journal; refuses a run that would drop times of a CSV that is there."""
    check(run, fingerprint.sm)
    journal = Journal(journal_path(run.folder, fingerprint.world, fingerprint.sm), head, restart=run.restart)
    try:
        if run.restart and not run.keeps:
            journal.mark_csv_replaced()
        elif run.keeps:
            journal.keep_csv()
        elif not journal.replaces_csv:
            known = {*journal.samples, *journal.skips}
            preflight.lost_times(records.csv_path(run.folder, fingerprint.world, fingerprint.sm), known)
    except BaseException:
        journal.close()
        raise
    return journal


_VERSIONS = ("torch", "triton", "nccl", "gpu", "driver", "cpu", "phalanx")
"""Facts in which results that stand beside each other must agree."""


def _session_facts(facts: dict[str, str]) -> dict[str, str]:
    return {key: facts[key] for key in ("date", "commit") if key in facts}


def _of_the_same(old: Benchmark, versions: dict[str, str], path: Path) -> Benchmark:
    """A CSV that is to be extended, if it was measured with the same versions as far as it tells."""
    differs = differences(old.facts, versions)
    if differs:
        raise OptionError(
            f"{path} was to be extended",
            why="it was measured with another " + ", ".join(f"{key} ({old.facts[key]}, not {versions[key]})" for key in differs),
            next="measure into another --save_csv_dir, or give --restart alone to replace it",
        )
    return old


def _joined(old: Benchmark, new: Benchmark) -> Benchmark:
    """Both; where both have a cell, the new one."""
    times = {task: us for task, us in old.times.items() if task not in new.skips} | new.times
    samples = {task: held for task, held in (old.samples | new.samples).items() if task in times}
    skips = {task: why for task, why in (old.skips | new.skips).items() if task not in times}
    facts = new.facts | ({"extends": old.facts["date"]} if "date" in old.facts else {})
    grid = _widened(new.grid or {}, old.times, old.grid)
    return Benchmark(new.sm, new.world, times, samples, skips, facts, grid, new.link)


def _widened(grid: dict[str, Any], tasks: Iterable[Task], other: dict[str, Any] | None = None) -> dict[str, Any]:
    """The grid with what these tasks are on, and with another grid."""
    held, axes = list(tasks), other or {}
    tokens = {*grid["tokens"], *axes.get("tokens", ()), *(task.tokens for task in held)}
    hidden = {*grid["hidden"], *axes.get("hidden", ()), *(task.hidden for task in held)}
    fusions = {*grid["fusions"], *axes.get("fusions", ()), *(task.fusion.name for task in held)}
    in_order = [fusion.name for fusion in Fusion if fusion.name in fusions]
    return grid | {"tokens": sorted(tokens), "hidden": sorted(hidden), "fusions": in_order}


class _Ranks:
    """The rank processes of one start, and the folder through which they talk."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.folder, self.run = folder, run
        self.since = time.monotonic()
        config = {
            "folder": str(folder), "world": run.world, "device": run.device, "method": run.method, "max_bytes": run.max_bytes,
            "timeout": run.start_timeout,
        }  # fmt: skip
        self.children = [
            launch.start(run.module, config | {"rank": rank}, f"phalanx bench rank {rank} of {run.world}")
            for rank in range(run.world)
        ]
        self._read = [0] * run.world

    def hello(self) -> tuple[Fingerprint, dict[str, str]]:
        """What rank 0 says of the machine, once all ranks are there."""
        while time.monotonic() - self.since < self.run.start_timeout:
            for event in self.events():
                if "hello" in event:
                    return Fingerprint.parse(event["hello"]), event["facts"]
            error = self.error()
            if error is not None:
                raise EngineError(
                    f"a benchmark of {self.run.world} ranks was to start", why=error, next="see the ranks' messages above"
                )
            time.sleep(_POLL_S)
        raise EngineError(
            f"a benchmark of {self.run.world} ranks was to start",
            why=f"they have not met within {self.run.start_timeout:g} s",
            next="see the ranks' messages above, or give a longer --start_timeout",
        )

    def work(self, tasks: list[Task]) -> None:
        part = self.folder / "work.part"
        part.write_text(json.dumps([str(task) for task in tasks]), encoding="utf-8")
        part.replace(self.folder / "work")

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has told since the last call."""
        path = self.folder / f"events.{rank}"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[rank])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[rank] += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def error(self) -> str | None:
        """Why a rank has ended before its time, by what it said or how it ended; None while none has. A rank that only lost its
        peers is the last to be named."""
        if not any(child.process.poll() for child in self.children):
            return None
        launch.wait(self.children, _LAST_WORDS_S)
        causes: list[str] = []
        consequences: list[str] = []
        for rank, child in enumerate(self.children):
            code = child.process.poll()
            if not code:
                continue
            said = [event for event in self._all(rank) if "error" in event]
            text = f"rank {rank}: {said[-1]['error']}" if said else f"rank {rank} {launch.exit_words(code)}"
            (consequences if said and said[-1]["lost_peer"] else causes).append(text)
        return (causes or consequences)[0]

    def _all(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"events.{rank}"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"}")]


@contextlib.contextmanager
def _ranks(run: Run) -> Iterator[_Ranks]:
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        ranks = _Ranks(run, Path(folder))
        try:
            yield ranks
        finally:
            # Those that have told their last end by themselves; a hung one hears nothing but SIGKILL.
            launch.wait(ranks.children, 0.5)
            launch.stop(ranks.children, grace=0)
