# SPDX-License-Identifier: Apache-2.0
"""Runs checks over a subject. Nothing here changes the machine: a cure is text, and `--fix` prints its commands."""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.errors import PhalanxError
from phalanx.hardware.provenance import installed
from phalanx.health.check import Check, Finding, Level
from phalanx.health.registry import every
from phalanx.health.subject import Subject
from phalanx.version import __version__

FORMAT = 1
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "flashinfer-python",
    "pyzmq",
)
_ORDER = [Level.ERROR, Level.WARNING, Level.NOTE, Level.SKIPPED, Level.OK]
_COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@dataclass(frozen=True)
class CheckResult:
    """The findings of one check, and how long it took."""

    check: Check
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def level(self) -> Level:
        return min((finding.level for finding in self.findings), key=_ORDER.index)


@dataclass(frozen=True)
class Report:
    """The results of one examination. `host`: facts that the reports of several hosts are compared by."""

    results: tuple[CheckResult, ...]
    host: dict[str, Any]
    seconds: float

    @property
    def healthy(self) -> bool:
        return not any(result.level.alarm for result in self.results)

    @property
    def status(self) -> int:
        """The exit status: 0 where all is well, 1 otherwise."""
        return 0 if self.healthy else 1

    def document(self) -> dict[str, Any]:
        """For scripts: `checks` is a list with an entry for each check."""
        return {
            "format": FORMAT,
            "healthy": self.healthy,
            "seconds": round(self.seconds, 3),
            "host": self.host,
            "checks": [
                {
                    "name": result.check.name,
                    "what": result.check.what,
                    "why": result.check.why,
                    "cure": result.check.cure,
                    "threads": list(result.check.threads),
                    "level": str(result.level),
                    "seconds": round(result.seconds, 3),
                    "findings": [asdict(finding) for finding in result.findings],
                }
                for result in self.results
            ],
        }

    def commands(self) -> list[str]:
        """The commands of every alarm's cure, without repeats."""
        return list(dict.fromkeys(command for finding in self.alarms() for command in finding.commands))

    def alarms(self) -> list[Finding]:
        findings = [finding for result in self.results for finding in result.findings if finding.level.alarm]
        return sorted(findings, key=lambda finding: _ORDER.index(finding.level))


def examine(subject: Subject, checks: Sequence[Check] | None = None) -> Report:
    """Run checks, all of them by default, one after the other. A check that a file or a device refuses is skipped with
    its error; one that fails otherwise does not know what the rest of the program would meet there, which is a warning."""
    started = time.monotonic()
    results = tuple(_run(check, subject) for check in (every() if checks is None else checks))
    return Report(results, about(subject), time.monotonic() - started)


def _run(check: Check, subject: Subject) -> CheckResult:
    started = time.monotonic()
    lacking = next((need for need in check.needs if subject.lacks(need)), None)
    if lacking is not None:
        return CheckResult(check, (Finding(Level.SKIPPED, str(lacking)),), 0.0)
    try:
        findings = check.findings(subject)
    except Exception as error:
        level = Level.SKIPPED if isinstance(error, PhalanxError | OSError) else Level.WARNING
        findings = (Finding(level, f"the check could not run: {type(error).__name__}: {error}"),)
    return CheckResult(check, findings, time.monotonic() - started)


def about(subject: Subject) -> dict[str, Any]:
    """Facts of this host for `--peer` on another one: versions, driver, GPUs, variables, options, and the time."""
    environment = {
        name: value for name, value in subject.host.environment.items() if name.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_"))
    }
    return {
        "name": subject.host.name,
        "time": datetime.datetime.now(datetime.UTC).isoformat(),
        "phalanx": __version__,
        "python": platform.python_version(),
        "driver": subject.devices.driver,
        "gpus": [gpu.name for gpu in subject.devices.gpus],
        "packages": {name: text for name in PACKAGES if (text := installed(name))},
        "environment": {name: value for name, value in environment.items() if name != "CUDA_HOME"},
        "options": _options(subject),
    }


def _options(subject: Subject) -> dict[str, Any]:
    """Those that must be equal on every host."""
    return {} if subject.options is None else subject.options.model_dump(mode="json", exclude={"node_rank", "kernel_cache_dir"})


def show(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print a report: alarms with their cures first, then notes, then one line for the rest. verbose: every check."""
    for result in sorted(report.results, key=lambda result: _ORDER.index(result.level)):
        for finding in result.findings:
            if finding.level.alarm or finding.level is Level.NOTE or verbose:
                _show_finding(result.check, finding, console)
    counts = {level: sum(result.level is level for result in report.results) for level in _ORDER}
    summary = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    verdict = Text("well", "bold green") if report.healthy else Text("not well", "bold red")
    console.print(Text.assemble(verdict, f": {len(report.results)} checks in {report.seconds:.1f} s: {summary}"))


def _show_finding(check: Check, finding: Finding, console: Console) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=8)
    table.add_column(overflow="fold")
    table.add_row(Text(str(finding.level), _COLOURS[finding.level]), Text.assemble((check.name, "bold"), f": {finding.summary}"))
    if finding.level.alarm:
        table.add_row("", Text(f"why: {check.why}", "dim"))
    if finding.cure:
        table.add_row("", Text(f"cure: {finding.cure}"))
    for command in finding.commands:
        table.add_row("", Text(f"$ {command}", "cyan"))
    if finding.level.alarm:
        table.add_row("", Text("see " + " ".join(check.threads), "dim"))
    console.print(table)


def dumps(report: Report) -> str:
    return json.dumps(report.document(), indent=2, default=str)


def listing(checks: Iterable[Check]) -> Table:
    """Every check and what it examines."""
    table = Table("check", "what it examines", "when", box=None)
    for check in checks:
        table.add_row(check.name, check.what, ", ".join(f"not when {need}" for need in check.needs) or "always")
    return table
