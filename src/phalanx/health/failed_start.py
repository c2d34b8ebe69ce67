# SPDX-License-Identifier: Apache-2.0
"""What the engine adds to the error of a failed start: the findings of the checks whose symptoms the error shows.

The engine calls `explain` by its dotted path (`engine.process.DIAGNOSIS`), so that it imports nothing from here. The checks run
in a thread that is given up after a few seconds: an error is never late, and never lost, because of its explanation.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.errors import PhalanxError
from phalanx.health.check import Check, Finding, Level
from phalanx.health.doctor import examine
from phalanx.health.registry import every
from phalanx.health.subject import Subject

SECONDS = 15.0
MOST_FINDINGS = 2


def explain(error: PhalanxError, options: dict[str, Any]) -> PhalanxError:
    """The error with what the doctor finds behind it in its `next`; the very error where that is nothing.

    options: fields of EngineOptions. Raises OptionError for what is none.
    """
    findings: list[Finding] = []
    subject = Subject(options=EngineOptions.of(**options), serving=ServeOptions.of(port=0))

    def run() -> None:
        findings.extend(find(str(error), subject))

    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return with_findings(error, findings) if findings and not thread.is_alive() else error


def fitting(text: str) -> list[Check]:
    """The quick checks of which a symptom is in the text, the ones with the most symptoms in it first."""
    counts = {check.name: sum(bool(re.search(pattern, text)) for pattern in check.symptoms) for check in every()}
    checks = [check for check in every() if counts[check.name] and not check.slow]
    return sorted(checks, key=lambda check: -counts[check.name])


def find(text: str, subject: Subject) -> list[Finding]:
    """The gravest findings of the checks that fit a failure's text, and that say more than it does. The first finding of each check
    comes before the second of any: several processes on a GPU do not take the place of a remedy."""
    results = examine(subject, fitting(text)).results
    # What begins as the error does is the error itself: the check asked the same code.
    alarms = [
        (number, finding)
        for result in results
        for number, finding in enumerate(each for each in result.findings if each.level.alarm)
        if finding.summary.split(";")[0] not in text
    ]
    alarms.sort(key=lambda alarm: (alarm[1].level is not Level.ERROR, alarm[0]))
    return [finding for _, finding in alarms[:MOST_FINDINGS]]


def with_findings(error: PhalanxError, findings: Sequence[Finding]) -> PhalanxError:
    """An error of the same kind, with the findings behind its own advice."""
    wire = error.to_wire()
    wire["next"] = "; ".join(filter(None, [wire["next"], *(sentence(finding) for finding in findings)]))
    return PhalanxError.from_wire(wire)


def sentence(finding: Finding) -> str:
    """One finding in one clause."""
    command = f" (`{finding.commands[0]}`)" if finding.commands else ""
    return f"the doctor finds: {finding.summary}: {finding.cure}{command}"
