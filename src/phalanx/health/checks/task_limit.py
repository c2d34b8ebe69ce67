# SPDX-License-Identifier: Apache-2.0
"""Whether the control group and the user may have enough threads."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, error, ok
from phalanx.health.subject import Subject

TASKS_PER_RANK = 192
TASKS_OF_SERVER = 128


def examine(subject: Subject) -> Finding:
    need = TASKS_OF_SERVER + TASKS_PER_RANK * subject.ranks_here
    limits = {"control group (pids.max)": subject.host.cgroup_tasks(), "user (ulimit -u)": subject.host.limit("nproc").soft}
    for name, limit in limits.items():
        if limit is not None and limit < need:
            return error(
                f"the {name} allows {limit} processes and threads, and {subject.ranks_here} ranks need about {need}",
                f"raise the limit of the {name}",
                "docker run --pids-limit -1 ..." if "group" in name else "ulimit -u 32768",
                limit=limit,
                need=need,
            )
    return ok(f"{need} processes and threads are allowed", need=need)


CHECK = Check(
    name="task_limit",
    what="limits of processes and threads",
    why="ranks start dozens of threads each: 'can't start new thread' or 'Resource temporarily unavailable'",
    cure="raise pids.max or nproc",
    threads=("https://github.com/vllm-project/vllm/issues/13354", "https://github.com/vllm-project/vllm/issues/6295"),
    examine=examine,
    symptoms=(r"can't start new thread", r"Resource temporarily unavailable", r"pthread_create"),
)
