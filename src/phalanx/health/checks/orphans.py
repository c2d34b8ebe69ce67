# SPDX-License-Identifier: Apache-2.0
"""Whether processes of an engine that has ended still run."""

from __future__ import annotations

import contextlib

import psutil

from phalanx.health.check import Check, Finding, error, ok
from phalanx.health.host import is_orphan, title_of
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    orphans = {}
    for process in subject.host.processes():
        with contextlib.suppress(psutil.Error):
            if is_orphan(process):
                orphans[process.pid] = title_of(process)
    if orphans:
        named = ", ".join(f"{title} (pid {pid})" for pid, title in orphans.items())
        pids = " ".join(str(pid) for pid in orphans)
        return error(
            f"{len(orphans)} processes of an ended engine still run: {named}", "end them", f"kill -9 {pids}", pids=sorted(orphans)
        )
    return ok("every process of Phalanx has its parent")


CHECK = Check(
    name="orphans",
    what="processes of Phalanx without a parent",
    why="an engine's rank that outlives it keeps its GPU memory and its ports",
    cure="end the processes",
    threads=(
        "https://github.com/vllm-project/vllm/issues/55510",
        "https://github.com/vllm-project/vllm/issues/34643",
        "https://github.com/vllm-project/vllm/issues/20305",
    ),
    examine=examine,
    symptoms=(r"out of memory", r"OutOfMemory", r"already in use", r"not a single block fits"),
)
