# SPDX-License-Identifier: Apache-2.0
"""Whether the driver stays loaded between processes."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, note, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    off = [str(gpu.index) for gpu in subject.devices.gpus if gpu.persistence is False]
    if off:
        return note(
            f"persistence mode is off for GPU {', '.join(off)}: the first program after an idle time waits seconds for the driver",
            "keep the driver loaded; on a virtual machine this may be the host's to decide",
            "systemctl enable --now nvidia-persistenced",
        )
    return ok("the driver stays loaded, or NVML does not say")


CHECK = Check(
    name="persistence",
    what="persistence mode",
    why="without it the driver initializes the GPU at each first use, 5 to 20 s",
    cure="run nvidia-persistenced",
    threads=("https://docs.nvidia.com/deploy/driver-persistence/index.html",),
    examine=examine,
    needs=(Need.GPU,),
)
