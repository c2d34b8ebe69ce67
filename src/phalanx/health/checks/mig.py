# SPDX-License-Identifier: Apache-2.0
"""Whether GPUs are cut into MIG instances."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, note, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    cut = [gpu for gpu in subject.gpus_in_use if gpu.mig]
    if not cut:
        return [ok("MIG is off, or not supported")]
    several = subject.ranks_here > 1
    named = ", ".join(str(gpu.index) for gpu in cut)
    commands = [f"nvidia-smi -i {gpu.index} -mig 0" for gpu in cut]
    if several:
        return [
            error(
                f"MIG is on for GPU {named}, and instances have no peer access: {subject.ranks_here} ranks cannot share tensors",
                "turn MIG off, or use one rank",
                *commands,
            )
        ]
    return [
        note(
            f"MIG is on for GPU {named}: the ranks get a part of its multiprocessors and memory",
            "turn MIG off for the full GPU",
            *commands,
        )
    ]


CHECK = Check(
    name="mig",
    what="MIG mode",
    why="an instance has no NVLink and no peer access: TP fails, or goes through host memory",
    cure="turn MIG off, or use one rank an instance",
    threads=("https://github.com/NVIDIA/nccl/issues/1716", "https://github.com/vllm-project/vllm/issues/7211"),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"MIG", r"invalid usage", r"invalid device ordinal"),
)
