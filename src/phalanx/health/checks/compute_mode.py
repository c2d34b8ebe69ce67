# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU admits the processes that a server runs on it."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, note, ok
from phalanx.health.subject import Subject

MODES = {1: "exclusive to one thread", 2: "closed to CUDA (prohibited)", 3: "exclusive to one process"}


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for gpu in subject.gpus_in_use:
        mode = MODES.get(gpu.compute_mode or 0)
        if mode is None:
            continue
        busy = bool(gpu.holders)
        command = f"nvidia-smi -i {gpu.index} -c DEFAULT"
        if gpu.compute_mode in (1, 2) or busy:
            findings.append(
                error(f"GPU {gpu.index} is {mode}" + (", and a process has it" if busy else ""), "set the default mode", command)
            )
        else:
            findings.append(
                note(f"GPU {gpu.index} is {mode}: `phalanx doctor` and tuning need it alone", "set the default mode", command)
            )
    return findings or [ok("GPUs admit several processes, or NVML does not say")]


CHECK = Check(
    name="compute_mode",
    what="the compute mode of each GPU",
    why="in an exclusive mode the second process gets 'all CUDA-capable devices are busy or unavailable'",
    cure="set the default mode",
    threads=("https://developer.nvidia.com/management-library-nvml", "https://github.com/vllm-project/vllm/issues/4940"),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"busy or unavailable", r"exclusive"),
)
