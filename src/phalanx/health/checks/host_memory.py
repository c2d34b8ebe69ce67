# SPDX-License-Identifier: Apache-2.0
"""Whether the host, its container and the limits of a process have the memory that a start takes."""

from __future__ import annotations

from typing import NamedTuple

import psutil

from phalanx.errors import PhalanxError
from phalanx.health import memory
from phalanx.health.check import Check, Finding, error, ok, size
from phalanx.health.subject import Subject

SERVER_BYTES = 1500 << 20
"""API server and engine: Python, the tokenizer, and their libraries."""
RANK_BYTES = {True: 3 << 30, False: 700 << 20}
"""One rank without its weights, on a GPU (torch with CUDA's libraries, pinned buffers) and on CPU."""
PROCESS_BYTES = {"as": 2 << 30, "data": 1 << 30}
"""What a rank on CPU takes of `ulimit -v` and of `ulimit -d` beside weights, activations and KV cache: libraries, stacks of threads
and the allocator's reserve."""
FLAGS = {"as": "-v", "data": "-d"}


class MemoryLimit(NamedTuple):
    """Bytes for one rank, what it takes of them beside the model, who allows them, and the command that raises it. shared: it is a
    part of what all ranks of the host have together, so that more ranks do not help."""

    room: int
    own: int
    what: str
    cure: str
    command: str
    shared: bool


def examine(subject: Subject) -> Finding:
    group, available = subject.host.cgroup_memory(), psutil.virtual_memory().available
    total = available if group is None else min(group, available)
    ranks, on_gpu = subject.ranks_here, subject.on_gpu
    need = _cpu_need(subject)
    each = RANK_BYTES[on_gpu] + (need.total if need is not None else 0)
    server = SERVER_BYTES if need is None else SERVER_BYTES // 2
    facts = {"limit": group, "available": available, "need": server + ranks * each}
    limits = [_host_limit(group, available, (total - server) // ranks, RANK_BYTES[on_gpu], server + ranks * each)]
    limits += _process_limits(subject) if need is not None else []
    limit = min(limits, key=lambda one: one.room - one.own)
    model = need.total if need is not None else 0
    if limit.room >= limit.own + model:
        return ok(f"{size(total)} of host memory are available, and about {size(server + ranks * each)} are needed", **facts)
    if limit is not limits[0]:
        assert need is not None
        summary = f"{limit.what}, and a rank needs about {size(limit.own + model)} ({need.text()})"
    else:
        summary = f"{limit.what}, and {ranks} ranks with the server need about {size(server + ranks * each)}"
    entries = _remedies(subject, limit)
    lines = [f"{entry.flags} frees {entry.freed / 1e9:.2f} GB of each rank" for entry in entries]
    model_name = subject.options.model if subject.options is not None else ""
    commands = [f"phalanx serve {model_name} {entry.flags}" for entry in entries[:1]]
    return error(summary, "; ".join([*lines, limit.cure]), *commands, limit.command, **facts)


def _cpu_need(subject: Subject) -> memory.CpuBudget | None:
    """Of each rank on CPU; None on GPUs, and where the model is not known here or its layout is refused."""
    shape, options = subject.model_shape, subject.options
    if shape is None or options is None or subject.on_gpu:
        return None
    try:
        return memory.cpu_budget(options, shape)
    except PhalanxError:
        return None


def _host_limit(group: int | None, available: int, room: int, own: int, need: int) -> MemoryLimit:
    if group is not None and group <= available:
        cure = "raise the container's memory limit"
        command = f"docker run --memory {-(-need // 2**30)}g ..."
        return MemoryLimit(room, own, f"the control group allows {size(group)}", cure, command, shared=True)
    command = "ps -eo pid,rss,args --sort=-rss | head"
    what = f"{size(available)} of host memory are available"
    return MemoryLimit(room, own, what, "end other programs, or use fewer ranks", command, shared=True)


def _process_limits(subject: Subject) -> list[MemoryLimit]:
    """`ulimit -v` and `ulimit -d`, where they are set."""
    limits = []
    for name, own in PROCESS_BYTES.items():
        allowed = subject.host.limit(name).soft
        if allowed is not None:
            what = f"`ulimit {FLAGS[name]}` allows each process {size(allowed)}"
            cure, command = f"raise `ulimit {FLAGS[name]}`", f"ulimit {FLAGS[name]} unlimited"
            limits.append(MemoryLimit(allowed, own, what, cure, command, shared=False))
    return limits


def _remedies(subject: Subject, limit: MemoryLimit) -> list[memory.Remedy]:
    """Changes of options with which the start has room, the best first."""
    if subject.options is None or subject.model_shape is None or _cpu_need(subject) is None:
        return []
    entries = memory.cpu_remedies(subject.options, subject.model_shape, limit.room - limit.own)
    if limit.shared:
        entries = [entry for entry in entries if not {"tensor_parallel_size", "pipeline_parallel_size"} & entry.options.keys()]
    return [entry for entry in entries if entry.fits][:3]


CHECK = Check(
    name="host_memory",
    what="host memory, the control group's limit and those of a process",
    why="at a control group's limit the kernel ends a rank with SIGKILL; beyond a limit of a process it refuses memory",
    cure="a smaller KV cache, or a higher limit",
    threads=("https://github.com/vllm-project/vllm/issues/3895", "https://github.com/xorbitsai/inference/issues/1450"),
    examine=examine,
    symptoms=(r"SIGKILL", r"MemoryError", r"[Cc]an(no|')t allocate memory", r"bad_alloc", r"out-of-memory killer"),
)
