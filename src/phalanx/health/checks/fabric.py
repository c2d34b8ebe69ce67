# SPDX-License-Identifier: Apache-2.0
"""Whether the NVSwitch fabric is up."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for gpu in subject.devices.gpus:
        if gpu.fabric in (None, "not supported"):
            continue
        if gpu.fabric != "completed":
            cure = "start the fabric manager of the driver's version, and wait until it is done"
            findings.append(
                error(
                    f"GPU {gpu.index}: the fabric is {gpu.fabric}, and CUDA fails with error 802 until it is up",
                    cure,
                    "systemctl start nvidia-fabricmanager",
                    "nvidia-smi -q | grep -A3 Fabric",
                )
            )
        elif gpu.fabric_status:
            cure = "install the fabric manager of the driver's version, and restart it"
            findings.append(
                error(
                    f"GPU {gpu.index}: registration in the fabric failed with status {gpu.fabric_status}",
                    cure,
                    "systemctl restart nvidia-fabricmanager",
                )
            )
    registered = [gpu for gpu in subject.devices.gpus if gpu.fabric == "completed"]
    return findings or [
        ok(
            f"{len(registered)} GPUs are registered in the fabric"
            if registered
            else "these GPUs need no fabric manager, or NVML does not say"
        )
    ]


CHECK = Check(
    name="fabric",
    what="the state of the NVSwitch fabric",
    why="without its manager, or with one of another version, CUDA answers 'system not yet initialized' (802)",
    cure="start the fabric manager of the driver's version",
    threads=(
        "https://github.com/huggingface/huggingface_hub/issues/4128",
        "https://github.com/pytorch/pytorch/issues/35710",
        "https://github.com/gpustack/gpustack/issues/4154",
        "https://github.com/ollama/ollama/issues/12136",
    ),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"\b802\b", r"system not yet initialized", r"SystemNotReady"),
)
