# SPDX-License-Identifier: Apache-2.0
"""Whether application clocks are set below their default."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for gpu in subject.devices.gpus:
        current, default = gpu.application_clock, gpu.default_application_clock
        if current is not None and default is not None and current < default:
            findings.append(
                warning(
                    f"GPU {gpu.index}: application clocks are set to {current} MHz, and their default is {default} MHz",
                    "restore the default",
                    f"nvidia-smi -i {gpu.index} -rac",
                    current=current,
                    default=default,
                )
            )
    return findings or [ok("application clocks are the defaults, or NVML does not say")]


CHECK = Check(
    name="clocks",
    what="application clocks against their defaults",
    why="clocks that were pinned for a benchmark or to save power stay until a restart",
    cure="restore the default clocks",
    threads=("https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",),
    examine=examine,
    needs=(Need.GPU,),
)
