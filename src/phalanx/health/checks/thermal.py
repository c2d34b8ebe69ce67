# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU is slowed down by heat."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for gpu in subject.devices.gpus:
        reasons = gpu.reasons or frozenset()
        hot = reasons & {"thermal", "hardware_thermal"}
        near = gpu.temperature is not None and gpu.slowdown_temperature is not None and gpu.temperature >= gpu.slowdown_temperature
        if hot or near:
            findings.append(
                warning(
                    f"GPU {gpu.index} is slowed down by heat: {gpu.temperature} degrees, {gpu.sm_clock} of {gpu.max_sm_clock} MHz",
                    "look at fans, air flow and filters",
                    f"nvidia-smi -i {gpu.index} -q -d TEMPERATURE,PERFORMANCE",
                    temperature=gpu.temperature,
                )
            )
        elif "power_brake" in reasons:
            findings.append(
                warning(
                    f"GPU {gpu.index} is slowed down by the power brake: the supply asks for less",
                    "look at the power supplies of the machine",
                    f"nvidia-smi -i {gpu.index} -q -d POWER,PERFORMANCE",
                )
            )
    return findings or [ok("no GPU is slowed down by heat or by its supply")]


CHECK = Check(
    name="thermal",
    what="temperatures and the reasons for lower clocks",
    why="a GPU that is too hot, or whose supply fails, runs at a fraction of its clock, and all ranks with it",
    cure="mend cooling or supply",
    threads=(
        "https://github.com/Azure/azurehpc/pull/595",
        "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
    ),
    examine=examine,
    needs=(Need.GPU,),
)
