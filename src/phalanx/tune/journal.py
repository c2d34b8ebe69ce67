# SPDX-License-Identifier: Apache-2.0
"""The journal of a run: a line for each result as it comes, so that an interrupted run resumes. One process writes it.

The first line is the head: what the run measures, and with which versions. Each other line is a task with its samples, or with the
reason why it was skipped; or tasks that are to be measured again; or a session (date and commit of one start); or a note that the
CSV beside the journal is to be replaced. A last line that was cut short is dropped: its task is measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError, TableError
from phalanx.tune.sweep import Task

_KEEP = " (with --extend, if a CSV beside it is to be kept)"


def journal_path(folder: Path, world: int, sm: int) -> Path:
    return folder / f"benchmark.tp{world}.sm{sm}.journal"


class Journal:
    """samples: microseconds by task. skips: reasons by task. Both hold earlier results and those of this run. pending: tasks among
    these that are still to be measured again. sessions: date and commit of each start, oldest first. replaces_csv: whether the
    results are to replace a CSV that was there before."""

    def __init__(self, path: Path, head: dict[str, Any], *, restart: bool = False) -> None:
        """Open or begin a journal at `path`. head: what must be equal for results to belong together; a key that only one of
        the two heads has is no difference.

        Raises OptionError where the file is the journal of another run, TableError where it is not a journal.
        """
        self.path = path
        self.samples: dict[Task, list[float]] = {}
        self.skips: dict[Task, str] = {}
        self.pending: set[Task] = set()
        self.sessions: list[dict[str, str]] = []
        self.replaces_csv = False
        self._remeasured: set[Task] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if restart:
            path.unlink(missing_ok=True)
        complete = self._read(head) if path.exists() else 0
        self._file = path.open("r+b" if complete else "wb")
        self._file.seek(complete)
        self._file.truncate()
        if not complete:
            self._write({"head": head})

    @property
    def resumed(self) -> int:
        return len(self.samples) + len(self.skips)

    def mark_csv_replaced(self) -> None:
        """Note that the CSV is to be replaced, so that an interrupted run continues without --restart."""
        self.replaces_csv = True
        self._write({"anew": True})

    def keep_csv(self) -> None:
        """Note that the CSV is to be kept, whatever an earlier start noted."""
        if self.replaces_csv:
            self.replaces_csv = False
            self._write({"anew": False})

    def begin_session(self, facts: dict[str, str]) -> None:
        """Note the date and commit of what is measured from here on."""
        self.sessions.append(facts)
        self._write({"session": facts})

    def remeasure(self, tasks: Iterable[Task]) -> int:
        """Mark these to be measured again; their results stay until then. Returns how many were not marked before: a task is
        measured again once in the life of a journal, so that an interrupted run continues instead of starting over."""
        new = [task for task in tasks if task not in self._remeasured]
        if new:
            self._add_pending(new)
            self._write({"again": [str(task) for task in new]})
        return len(new)

    def record(self, task: Task, samples: list[float]) -> None:
        self._set_result(task, samples)
        self._write({"task": str(task), "samples": samples})

    def skip(self, task: Task, reason: str) -> None:
        self._set_result(task, reason)
        self._write({"task": str(task), "skip": reason})

    def _add_pending(self, tasks: list[Task]) -> None:
        self._remeasured.update(tasks)
        self.pending.update(tasks)

    def _set_result(self, task: Task, result: list[float] | str) -> None:
        """Replace what is known of a task."""
        self.pending.discard(task)
        self.samples.pop(task, None)
        self.skips.pop(task, None)
        if isinstance(result, str):
            self.skips[task] = result
        else:
            self.samples[task] = result

    def finish(self) -> None:
        """Remove the journal: its results are in the CSV."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """May be called more than once."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _read(self, head: dict[str, Any]) -> int:
        """Take what the file holds; returns how many bytes of it are complete lines."""
        data = self.path.read_bytes()
        complete = data.rfind(b"\n") + 1
        for number, text in enumerate(data[:complete].splitlines(), 1):
            try:
                line = json.loads(text)
                if number == 1:
                    first = line["head"]
                elif "samples" in line:
                    self._set_result(Task.parse(line["task"]), [float(us) for us in line["samples"]])
                elif "again" in line:
                    self._add_pending([Task.parse(task) for task in line["again"]])
                elif "anew" in line:
                    self.replaces_csv = bool(line["anew"])
                elif "session" in line or "sitting" in line:  # "sitting": the key in older journals
                    facts = line["session"] if "session" in line else line["sitting"]
                    self.sessions.append({str(key): str(value) for key, value in facts.items()})
                else:
                    self._set_result(Task.parse(line["task"]), str(line["skip"]))
            except (ValueError, KeyError, TypeError, AttributeError, OptionError) as error:
                raise TableError(
                    f"{self.path.name} line {number} is not a line of a journal",
                    why=f"{type(error).__name__}: {error}",
                    next=f"give --restart to start over{_KEEP}, or another --save_csv_dir",
                ) from None
        if complete and (differs := differences(first, head)):
            raise OptionError(
                f"{self.path} belongs to an interrupted run of something else",
                why=f"it differs in {', '.join(differs)}",
                next=f"give --restart to drop it and start over{_KEEP}, or another --save_csv_dir",
            )
        return complete


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The keys that both have, with different values."""
    return sorted(key for key in first.keys() & second.keys() if first[key] != second[key])
