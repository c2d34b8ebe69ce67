# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is refused for before anything is measured; and what was left out of one, in words."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from phalanx.errors import OptionError, TableError
from phalanx.tables.message import Fusion
from phalanx.tune import records
from phalanx.tune.records import Bench
from phalanx.tune.sweep import Task

_NUMBER = re.compile(r"\d+(\.\d+)?")


def left_out(skips: Mapping[Task, str]) -> list[str]:
    """Each reason once, with the first that it holds for and how many more. Reasons that differ in their numbers only are one."""
    kinds: dict[str, list[tuple[Task, str]]] = {}
    for task, why in skips.items():
        kinds.setdefault(_NUMBER.sub("#", why), []).append((task, why))
    found = []
    for held in kinds.values():
        task, why = held[0]
        more = f" and {len(held) - 1} more like it" if len(held) > 1 else ""
        found.append(f"{task}{more}: {why}")
    return found


def empty_plan(world: int, tasks: Collection[Task], skips: Mapping[Task, str]) -> None:
    """A plan that leaves nothing to measure."""
    if tasks:
        return
    reasons = left_out(skips)
    raise OptionError(
        f"a benchmark at tp {world} was asked for",
        held=f"all of its {len(skips)} candidates are left out",
        why="; ".join(reasons),
        next="give a larger --max_mib, or smaller --tokens or --hidden"
        if all("--max_mib" in reason for reason in reasons)
        else "name other --strategies, --fusions, --tokens or --hidden",
    )


def lost_times(path: Path, kept: Collection[Task] = ()) -> None:
    """A CSV at `path` that the run would replace, unless all of its times are `kept`."""
    if not path.exists():
        return
    try:
        old = records.read(path)
    except TableError as error:
        raise OptionError(
            f"a benchmark was to be written to {path}",
            held="a file of that name is there that cannot be read",
            why=error.failure + (f": {error.why}" if error.why else ""),
            next="give --restart to replace it, or another --save_csv_dir",
        ) from None
    lost = old.times.keys() - set(kept)
    if lost:
        raise OptionError(
            f"a benchmark was to be written to {path}",
            held=f"it holds {_summary(old)}",
            why=f"this run would drop {'all' if len(lost) == len(old.times) else len(lost)} of them",
            next="give --extend to keep them and measure what is missing, --remeasure STRATEGY to measure one of them again, "
            "--restart to begin anew and replace them, or another --save_csv_dir",
        )


def unwritable_folder(folder: Path) -> None:
    """A folder that cannot be made, or not be written to. Makes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if os.path.isfile(path)), None)
        raise OptionError(
            f"--save_csv_dir {folder} was asked for",
            held="" if file is None else f"{file} is a file",
            why="" if file is not None else f"nothing can be written there: {error.strerror}",
            next="give a folder that can be written",
        ) from None


def _summary(bench: Bench) -> str:
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
