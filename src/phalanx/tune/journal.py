# SPDX-License-Identifier: Apache-2.0
"""The journal of a run: a line for each result as it comes, so that a broken run resumes. One process writes it.

The first line says what the run is of; each other line is a task and its samples, or why it was skipped, or which tasks are to be
measured again, or who sat down to measure, and when, or that the CSV beside it is to be replaced. A last line that was cut short is
dropped: its task is measured again.
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
    """samples: microseconds by task; skips: reasons by task; both as of before this run and from it. pending: tasks of these that
    are to be measured again and have not been yet. sittings: who measured, and when, oldest first. anew: whether the results are to
    replace a CSV that was there before."""

    def __init__(self, path: Path, head: dict[str, Any], *, restart: bool = False) -> None:
        """Open or begin a journal at `path`. head: what must be equal for results to belong together.
        A version that one of the two heads does not tell is no difference.

        Raises OptionError where another run's journal is there, TableError where the file is none.
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
        whole = self._read(head) if path.exists() else 0
        self._file = path.open("r+b" if whole else "wb")
        self._file.seek(whole)
        self._file.truncate()
        if not whole:
            self._write({"head": head})

    @property
    def resumed(self) -> int:
        return len(self.samples) + len(self.skips)

    def mark_csv_replaced(self) -> None:
        """Note that the CSV is to be replaced, so that a broken run may go on without being told again."""
        self.replaces_csv = True
        self._write({"anew": True})

    def keep_csv(self) -> None:
        """Note that the CSV is to be kept, whatever was asked for before."""
        if self.replaces_csv:
            self.replaces_csv = False
            self._write({"anew": False})

    def begin_session(self, facts: dict[str, str]) -> None:
        """Note who measures what comes now."""
        self.sessions.append(facts)
        self._write({"sitting": facts})

    def again(self, tasks: Iterable[Task]) -> int:
        """Have these measured again; what is known of them stands until then. How many are new to that: a task is measured again
        once in the life of a journal, so that a broken run goes on instead of beginning anew."""
        new = [task for task in tasks if task not in self._remeasured]
        if new:
            self._add_pending(new)
            self._write({"again": [str(task) for task in new]})
        return len(new)

    def done(self, task: Task, samples: list[float]) -> None:
        self._take(task, samples)
        self._write({"task": str(task), "samples": samples})

    def skip(self, task: Task, reason: str) -> None:
        self._take(task, reason)
        self._write({"task": str(task), "skip": reason})

    def _add_pending(self, tasks: list[Task]) -> None:
        self._remeasured.update(tasks)
        self.pending.update(tasks)

    def _take(self, task: Task, result: list[float] | str) -> None:
        """The last word on a task."""
        self.pending.discard(task)
        self.samples.pop(task, None)
        self.skips.pop(task, None)
        if isinstance(result, str):
            self.skips[task] = result
        else:
            self.samples[task] = result

    def finish(self) -> None:
        """The results are in their CSV: the journal has done its work."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """May be called again."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _read(self, head: dict[str, Any]) -> int:
        """Take what is there; gives how many bytes of it are whole lines."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, text in enumerate(data[:whole].splitlines(), 1):
            try:
                line = json.loads(text)
                if number == 1:
                    held = line["head"]
                elif "samples" in line:
                    self._take(Task.parse(line["task"]), [float(us) for us in line["samples"]])
                elif "again" in line:
                    self._add_pending([Task.parse(task) for task in line["again"]])
                elif "anew" in line:
                    self.replaces_csv = bool(line["anew"])
                elif "sitting" in line:
                    self.sessions.append({str(key): str(value) for key, value in line["sitting"].items()})
                else:
                    self._take(Task.parse(line["task"]), str(line["skip"]))
            except (ValueError, KeyError, TypeError, AttributeError, OptionError) as error:
                raise TableError(
                    f"{self.path.name} line {number} is no line of a journal",
                    why=f"{type(error).__name__}: {error}",
                    next=f"give --restart to begin anew{_KEEP}, or another --save_csv_dir",
                ) from None
        if whole and (differs := differences(held, head)):
            raise OptionError(
                f"{self.path} holds a broken run of something else",
                why=f"it differs in {', '.join(differs)}",
                next=f"give --restart to drop it and begin anew{_KEEP}, or another --save_csv_dir",
            )
        return whole


def differences(held: dict[str, Any], head: dict[str, Any]) -> list[str]:
    """The keys that both have, with different values."""
    return sorted(key for key in held.keys() & head.keys() if held[key] != head[key])
