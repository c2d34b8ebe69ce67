# SPDX-License-Identifier: Apache-2.0
"""Where a figure comes from: machine, versions, commit, date and command. Every report, table and result file takes it from here.

One record has two forms: nested JSON for reports and benchmark results (`as_json`), and flat text for the sidecars and tables of
the all-reduce tuner, whose format holds text only (`machine_facts`, `run_facts`). What cannot be found out is left out. No folder
of this machine appears in a command. No torch here: what only torch knows comes from the caller.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.hardware.probe import Machine, detect_machine
from phalanx.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "numpy",
    "pyzmq",
)
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Provenance:
    """What was found out about this host, these sources and this process. date: UTC. commit, driver: "" where unknown."""

    date: datetime.datetime
    commit: str
    command: str
    machine: Machine
    cpu: str
    driver: str
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """The nested form."""
        return {
            "date": self.date.astimezone().date().isoformat(),
            "commit": self.commit or "unknown",
            "command": self.command,
            "machine": {
                "cpu": self.cpu, "cores": self.machine.cores, "gpus": [gpu.name for gpu in self.machine.gpus],
                "driver": self.driver,
            },
            "python": platform.python_version(),
            "versions": self.versions,
        }  # fmt: skip

    def run_facts(self) -> dict[str, str]:
        """Commit, date and command in the flat form."""
        facts = {"commit": self.commit, "date": self.date.strftime("%Y-%m-%d %H:%M UTC"), "command": self.command}
        return {name: text for name, text in facts.items() if text}


def collect(commit: str | None = None) -> Provenance:
    """commit: recorded where the sources are not a git checkout."""
    return Provenance(
        datetime.datetime.now(datetime.UTC), _checkout() or commit or "", _command(), detect_machine(), _cpu_model(), _driver(),
        {"phalanx": __version__} | {name: text for name in _PACKAGES if (text := installed(name))},
    )  # fmt: skip


def machine_facts(runtime: Mapping[str, str]) -> dict[str, str]:
    """Machine and versions in the flat form, as one rank sees them.

    runtime: what the rank knows from torch ("torch", and on GPUs "gpu", "gpus", "cuda", "nccl"). Its keys decide whether the GPU's
    driver or the CPU is named.
    """
    facts = {
        "phalanx": __version__,
        "python": platform.python_version(),
        "triton": installed("triton"),
        "host": platform.platform(),
        **runtime,
        **({"driver": _driver()} if "gpu" in runtime else {"cpu": _cpu_count_and_model()}),
    }
    return {name: text for name, text in facts.items() if text}


def _checkout() -> str:
    """The commit of these sources, with a mark where they differ from it; "" where git does not track them."""
    if not _output("git", "ls-files", Path(__file__).name):
        return ""
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", "..")
    return _output("git", "rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def _command() -> str:
    """The command line. A path is shown relative to the working folder, or by its last part."""
    program, here = Path(sys.argv[0]), Path.cwd()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if program.stem in ("phalanx", "__main__"):
        words = ["phalanx"]
    elif spec is not None:
        words = ["python", "-m", spec.name]
    else:
        words = [*(["python"] if program.suffix == ".py" else []), _shown(str(program), here)]
    for word in sys.argv[1:]:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(flag + equals + _shown(value, here))
    return shlex.join(words)


def _shown(value: str, here: Path) -> str:
    path = Path(value)
    if not path.is_absolute():
        return value
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _cpu_names() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]


def _cpu_model() -> str:
    return next(iter(_cpu_names()), platform.processor() or platform.machine())


def _cpu_count_and_model() -> str:
    names = _cpu_names()
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def installed(name: str) -> str:
    """The version of an installed package; "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_HERE, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
