# SPDX-License-Identifier: Apache-2.0
"""Whether this process may run beside its GPUs."""

from __future__ import annotations

import os

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    findings = []
    for gpu in subject.gpus_in_use:
        if gpu.cpus and allowed and not gpu.cpus & allowed:
            near = _ranges(gpu.cpus)
            findings.append(
                warning(
                    f"this process may run on cores {_ranges(allowed)}, and GPU {gpu.index} is attached to the NUMA node of cores"
                    f" {near}",
                    "allow it the cores beside its GPUs",
                    f"taskset -c {near} phalanx serve ...",
                    "docker run --cpuset-cpus ...",
                )
            )
    return findings or [ok("cores beside each GPU are allowed, or NVML does not say which they are")]


def _ranges(cpus: frozenset[int]) -> str:
    """Core numbers as taskset takes them: 0-3,8-11."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


CHECK = Check(
    name="numa",
    what="the cores that this process may use against those beside its GPUs",
    why="a rank on the other socket launches each kernel across the sockets' link: 5 to 15 percent where the host bounds a step",
    cure="allow the cores of the GPUs' NUMA nodes",
    threads=("https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",),
    examine=examine,
    needs=(Need.GPU,),
)
