# SPDX-License-Identifier: Apache-2.0
"""What a benchmark ran on: the facts that its sidecar keeps."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from phalanx.version import __version__


def facts(device: torch.device) -> dict[str, str]:
    """Machine and versions, as one rank sees them."""
    found = {
        "phalanx": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "host": platform.platform(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpus"] = str(torch.cuda.device_count())
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["driver"] = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    else:
        found["cpu"] = _cpu_name()
    return {name: value for name, value in found.items() if value}


def run_facts(commit: str | None = None) -> dict[str, str]:
    """Commit, date and command of this run, as the process that a person started sees them. commit: where git cannot say."""
    here = Path(__file__).resolve().parent
    commit = commit or _first_line(["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--match="])
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    # An absolute path says something about one machine only: its name stays.
    command = " ".join([Path(sys.argv[0]).name, *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])
    return {name: value for name, value in (("commit", commit), ("date", when), ("command", command)) if value}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _first_line(command: list[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.splitlines()[0].strip() if ran.returncode == 0 and ran.stdout else ""
