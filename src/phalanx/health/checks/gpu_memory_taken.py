# SPDX-License-Identifier: Apache-2.0
"""Whether other processes have memory on the GPUs that the ranks take."""

from __future__ import annotations

import contextlib

import psutil

from phalanx.health.check import Check, Finding, Need, error, ok, size, skipped, warning
from phalanx.health.host import title_of
from phalanx.health.subject import Subject

WORTH = 1 << 30
"""Below it are contexts of monitoring programs, and what the driver keeps for itself."""


def examine(subject: Subject) -> list[Finding]:
    if subject.servers:
        return [skipped("a running server's own memory cannot be told from others' over HTTP")]
    findings = []
    for gpu in subject.gpus_in_use:
        holders = sorted(
            (holder for holder in gpu.holders or () if (holder.bytes or 0) >= WORTH), key=lambda holder: -(holder.bytes or 0)
        )
        for holder in holders:
            owner = _owner(holder.pid)
            kill = (
                (f"kill {holder.pid}",)
                if owner is not None
                else (f"ps -fp {holder.pid}  # on the host: this container does not show it",)
            )
            summary = (
                f"GPU {gpu.index}: {owner or 'a process outside this container'} (pid {holder.pid}) has {size(holder.bytes or 0)}"
                f" of {size(gpu.total)}"
            )
            findings.append(
                error(summary, "end it, or leave it this GPU and use others", *kill, pid=holder.pid, bytes=holder.bytes)
            )
        named = sum(holder.bytes or 0 for holder in gpu.holders or ())
        if not holders and gpu.used - named > WORTH + gpu.total // 50:
            findings.append(
                warning(
                    f"GPU {gpu.index}: {size(gpu.used)} of {size(gpu.total)} are in use, by processes that are not visible here",
                    "look for them on the host",
                    "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv",
                    used=gpu.used,
                )
            )
    return findings or [ok("the GPUs are free")]


def _owner(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return title_of(process)[:60]
    return None


CHECK = Check(
    name="gpu_memory_taken",
    what="memory that other processes have on the GPUs",
    why="an orphan or another job leaves too little for weights and KV cache: out of memory at the start",
    cure="end the process",
    threads=(
        "https://github.com/vllm-project/vllm/issues/20305",
        "https://github.com/vllm-project/vllm/issues/50135",
        "https://github.com/vllm-project/vllm/issues/55510",
        "https://github.com/PrimeIntellect-ai/verifiers/issues/85",
    ),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"out of memory", r"OutOfMemory", r"not a single KV block fits", r"CUDA error", r"memory left"),
)
