# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is measured: an empty plan, a folder that cannot be written. And a summary of skipped candidates."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from phalanx.errors import OptionError
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
