# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is measured: an empty plan, a folder that cannot be written, results that would be lost. And a summary of
skipped candidates.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from phalanx.errors import OptionError, TableError
from phalanx.tables.message import Fusion
from phalanx.tune import records
from phalanx.tune.records import Benchmark
from phalanx.tune.sweep import Task

_NUMBER = re.compile(r"\d+(\.\d+)?")


def summarize_skips(skips: Mapping[Task, str]) -> list[str]:
    """Each reason once, with the first task that it holds for and how many more. Reasons that differ only in their numbers count as
    one."""
    kinds: dict[str, list[tuple[Task, str]]] = {}
    for task, why in skips.items():
        kinds.setdefault(_NUMBER.sub("#", why), []).append((task, why))
    lines = []
    for members in kinds.values():
        task, why = members[0]
        more = f" and {len(members) - 1} more like it" if len(members) > 1 else ""
        lines.append(f"{task}{more}: {why}")
    return lines


def require_tasks(world: int, tasks: Collection[Task], skips: Mapping[Task, str]) -> None:
    """Raise OptionError for a plan that leaves nothing to measure."""
    if tasks:
        return
    reasons = summarize_skips(skips)
    raise OptionError(
        f"nothing is left to measure at tp {world}",
        held=f"all {len(skips)} candidates are skipped",
        why="; ".join(reasons),
        next="give a larger --max_mib, or smaller --tokens or --hidden"
        if all("--max_mib" in reason for reason in reasons)
        else "give other --strategies, --fusions, --tokens or --hidden",
    )


def require_no_lost_times(path: Path, kept: Collection[Task] = ()) -> None:
    """Raise OptionError where the run would replace a CSV at `path` that holds times of tasks outside `kept`."""
    if not path.exists():
        return
    try:
        old = records.read(path)
    except TableError as error:
        raise OptionError(
            f"{path} would be replaced, and cannot be read",
            why=error.failure + (f": {error.why}" if error.why else ""),
            next="give --restart to replace it, or another --save_csv_dir",
        ) from None
    lost = old.times.keys() - set(kept)
    if lost:
        raise OptionError(
            f"{path} would lose times",
            held=f"it holds {_summary(old)}",
            why=f"this run would drop {'all' if len(lost) == len(old.times) else len(lost)} of them",
            next="give --extend to keep them and measure what is missing, --remeasure STRATEGY to measure one strategy again, "
            "--restart to drop and replace them, or another --save_csv_dir",
        )


def require_writable_folder(folder: Path) -> None:
    """Make the folder. Raise OptionError where it cannot be made, or cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if os.path.isfile(path)), None)
        raise OptionError(
            f"--save_csv_dir {folder} cannot be written",
            held="" if file is None else f"{file} is a file",
            why="" if file is not None else str(error.strerror),
            next="give a folder that can be written",
        ) from None


def _summary(bench: Benchmark) -> str:
    """ "228 times (bf16, tokens 1 to 16, hidden 128, 6 fusions, GLOO, ONESHOT) of 2026-11-22 08:00 UTC"."""
    dtypes = sorted({task.dtype for task in bench.times})
    fusions = [fusion.name for fusion in Fusion if any(task.fusion is fusion for task in bench.times)]
    names = [choice.name(bench.sm) for choice in sorted({task.choice for task in bench.times}) if not choice.unfused]
    parts = [*dtypes, _range("tokens", {task.tokens for task in bench.times})]
    parts += [_range("hidden", {task.hidden for task in bench.times})]
    parts += [f"{len(fusions)} fusions" if len(fusions) > 1 else fusions[0], *names]
    when = f" of {bench.facts['date']}" if "date" in bench.facts else ""
    return f"{len(bench.times)} times ({', '.join(parts)}){when}"


def _range(name: str, sizes: Collection[int]) -> str:
    return f"{name} {min(sizes)}" + (f" to {max(sizes)}" if len(sizes) > 1 else "")
