# SPDX-License-Identifier: Apache-2.0
"""The journal of a machine and TP size: the one record of what was measured there, from which its CSV is printed.

The first line is the head: how it is measured, and with which versions. Each other line is a task with its samples, or with the
reason why it was skipped; or tasks that are to be measured again; or a session (date and commit of one start). Later lines win.

A result is a line as soon as it comes: an interrupted run resumes, and another grid adds to the record. One process writes it. A
last line that was cut short is dropped: its task is measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError, TableError
from phalanx.tune.sweep import Task


def journal_path(folder: Path, world: int, sm: int) -> Path:
    return folder / f"benchmark.tp{world}.sm{sm}.journal"


class Journal:
    """samples: microseconds by task. skips: reasons by task. Both hold earlier results and those of this run. pending: tasks among
    these that are still to be measured again. sessions: date and commit of each start, oldest first."""

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

    def begin_session(self, facts: dict[str, str]) -> None:
        """Note the date and commit of what is measured from here on."""
        self.sessions.append(facts)
        self._write({"session": facts})

    def remeasure(self, tasks: Iterable[Task]) -> int:
        """Mark these to be measured again; their results stay until then. Returns how many were not marked before: until all that
        are marked are measured, each is measured once, so that an interrupted run continues instead of starting over."""
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
        if not self.pending:
            self._remeasured.clear()
        self.samples.pop(task, None)
        self.skips.pop(task, None)
        if isinstance(result, str):
            self.skips[task] = result
        else:
            self.samples[task] = result

    def remove(self) -> None:
        """Of a run that gave no time, so that the next one tries all again."""
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
                elif "session" in line:
                    self.sessions.append({str(key): str(value) for key, value in line["session"].items()})
                else:
                    self._set_result(Task.parse(line["task"]), str(line["skip"]))
            except (ValueError, KeyError, TypeError, AttributeError, OptionError) as error:
                raise TableError(
                    f"{self.path.name} line {number} is not a line of a journal",
                    why=f"{type(error).__name__}: {error}",
                    next="give --restart to start over, or another --save_csv_dir",
                ) from None
        if complete and (differs := differences(first, head)):
            raise OptionError(
                f"{self.path} is of something else",
                why=f"it differs in {', '.join(f'{key} ({first[key]}, not {head[key]})' for key in differs)}",
                next="give --restart to drop its results and start over, or another --save_csv_dir",
            )
        return complete


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The keys that both have, with different values."""
    return sorted(key for key in first.keys() & second.keys() if first[key] != second[key])
