# SPDX-License-Identifier: Apache-2.0
"""One way to keep a figure: with the machine, the versions, the commit and the command that gave it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from phalanx.bench import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def write(name: str, figures: dict[str, Any], folder: Path | None = None) -> Path:
    """Write results/<name>.json and return its path."""
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about(), **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def about() -> dict[str, Any]:
    """As `phalanx bench` tells it. A machine that has the tree without its history is told the commit by BENCH_COMMIT."""
    command = [Path(sys.executable).name, os.path.relpath(sys.argv[0], ROOT), *map(_local, sys.argv[1:])]
    return {**report.about(os.environ.get("BENCH_COMMIT")), "command": shlex.join(command)}


def _local(argument: str) -> str:
    """An absolute path says something about one machine only: keep its name."""
    return Path(argument).name if os.path.isabs(argument) else argument
