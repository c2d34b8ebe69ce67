# SPDX-License-Identifier: Apache-2.0
"""Whether ranks and server have cores to run on."""

from __future__ import annotations

from phalanx.hardware.probe import cores
from phalanx.health.check import Check, Finding, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    usable: float = cores(subject.host.path("/sys/fs/cgroup"))
    quota = subject.host.cgroup_cores()
    if quota is not None:
        usable = min(usable, quota)
    ranks = subject.ranks_here
    need = ranks + 1 if subject.on_gpu else 1
    facts = {"cores": usable, "quota": quota, "need": need}
    if usable < need:
        reason = (
            f"the control group allows {quota:g}" if quota is not None and quota <= usable else f"this process may use {usable:g}"
        )
        return warning(
            f"{reason} cores, and {ranks} ranks with the server keep {need} busy",
            "raise the quota of cores" if quota is not None else "use fewer ranks",
            f"docker run --cpus {need + 1} ...",
            **facts,
        )
    return ok(f"{usable:g} cores for {ranks} ranks and the server", **facts)


CHECK = Check(
    name="cpu_cores",
    what="cores and the control group's quota",
    why="each GPU rank keeps a core busy with launches, and the server another: with fewer, every step waits "
    "for the scheduler of the kernel",
    cure="give a core to each rank and one to the server",
    threads=("https://github.com/vllm-project/vllm/issues/14538", "https://github.com/vllm-project/vllm/issues/4806"),
    examine=examine,
)
