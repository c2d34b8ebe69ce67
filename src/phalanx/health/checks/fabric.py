# SPDX-License-Identifier: Apache-2.0
"""Whether the NVSwitch fabric is up."""

from __future__ import annotations

import ctypes

from phalanx.health.check import Check, Finding, Need, error, note, ok
from phalanx.health.subject import Subject

SYSTEM_NOT_READY = 802


def examine(subject: Subject) -> list[Finding]:
    """By NVML's state, and by what CUDA itself answers: a guest may show a state that its host manages, and work."""
    states = {gpu.index: gpu.fabric for gpu in subject.devices.gpus if gpu.fabric not in (None, "not supported")}
    failed = [gpu for gpu in subject.devices.gpus if gpu.fabric == "completed" and gpu.fabric_status]
    status = cuda_status()
    waiting = {index: state for index, state in states.items() if state != "completed"}
    if status == SYSTEM_NOT_READY or (waiting and status is None):
        named = ", ".join(f"GPU {index} {state}" for index, state in (waiting or states).items()) or "NVML does not say its state"
        return [
            error(
                f"the fabric is not up ({named}), and CUDA fails with error 802 until it is",
                "start the fabric manager of the driver's version, and wait until it is done",
                "systemctl start nvidia-fabricmanager",
                "nvidia-smi -q | grep -A3 Fabric",
            )
        ]
    if failed:
        named = ", ".join(f"GPU {gpu.index} status {gpu.fabric_status}" for gpu in failed)
        cure = "install the fabric manager of the driver's version, and restart it"
        return [error(f"registration in the fabric failed: {named}", cure, "systemctl restart nvidia-fabricmanager")]
    if waiting:
        return [note(f"NVML shows the fabric as {next(iter(waiting.values()))}, and CUDA works: the host manages it")]
    return [
        ok(
            f"{len(states)} GPUs are registered in the fabric"
            if states
            else "these GPUs need no fabric manager, or NVML does not say"
        )
    ]


def cuda_status() -> int | None:
    """What cuInit answers (0: success), which makes no context; None without the driver's library."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        return None


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
