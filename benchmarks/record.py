# SPDX-License-Identifier: Apache-2.0
"""One way to keep a figure: with the machine, the versions, the commit and the command that gave it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "pyzmq", "numpy")


def write(name: str, figures: dict[str, Any], folder: Path | None = None) -> Path:
    """Write results/<name>.json and return its path."""
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about(), **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def about() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        # A machine that has the tree without its history is told the commit.
        "commit": _output("git", "rev-parse", "--short=12", "HEAD") or os.environ.get("BENCH_COMMIT", "unknown"),
        "command": shlex.join([Path(sys.executable).name, os.path.relpath(sys.argv[0], ROOT), *map(_local, sys.argv[1:])]),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "gpus": _output("nvidia-smi", "-L").splitlines()},
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _local(argument: str) -> str:
    """An absolute path says something about one machine only: keep its name."""
    return Path(argument).name if os.path.isabs(argument) else argument


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    # GPU serial numbers are nobody's business.
    return "\n".join(line.split(" (UUID")[0] for line in done.stdout.strip().splitlines()) if done.returncode == 0 else ""
