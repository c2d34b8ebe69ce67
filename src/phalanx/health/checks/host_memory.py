# SPDX-License-Identifier: Apache-2.0
"""Whether the host, or its container, has the memory that loading takes."""

from __future__ import annotations

import psutil

from phalanx.health import memory
from phalanx.health.check import Check, Finding, error, ok, size
from phalanx.health.subject import Subject

SERVER_BYTES = 1500 << 20
"""API server and engine: Python, the tokenizer, and their libraries."""
RANK_BYTES = {True: 3 << 30, False: 700 << 20}
"""One rank without its weights, on a GPU (torch with CUDA's libraries, pinned buffers) and on CPU."""


def examine(subject: Subject) -> Finding:
    limit, available = subject.host.cgroup_memory(), psutil.virtual_memory().available
    room = available if limit is None else min(limit, available)
    need = SERVER_BYTES + subject.ranks_here * RANK_BYTES[subject.on_gpu]
    shape = subject.model_shape
    if shape is not None and subject.options is not None and not subject.on_gpu:
        need = need - SERVER_BYTES // 2 + subject.ranks_here * memory.budget(subject.options, shape, on_gpu=False).weights
        need += subject.ranks_here * (subject.options.kv_cache_bytes or 0)
    facts = {"limit": limit, "available": available, "need": need}
    if room < need:
        what = (
            f"the control group allows {size(room)}"
            if limit is not None and limit <= available
            else f"{size(room)} of host memory are available"
        )
        cure = (
            "raise the container's memory limit"
            if limit is not None and limit <= available
            else "end other programs, or use fewer ranks"
        )
        command = f"docker run --memory {-(-need // 2**30)}g ..." if limit is not None else "ps -eo pid,rss,args --sort=-rss | head"
        return error(f"{what}, and {subject.ranks_here} ranks with the server need about {size(need)}", cure, command, **facts)
    return ok(f"{size(room)} of host memory are available, and about {size(need)} are needed", **facts)


CHECK = Check(
    name="host_memory",
    what="host memory and the control group's limit",
    why="the kernel ends a rank with SIGKILL when the limit is reached, mostly while weights load",
    cure="raise the memory limit",
    threads=("https://github.com/vllm-project/vllm/issues/3895", "https://github.com/xorbitsai/inference/issues/1450"),
    examine=examine,
    symptoms=(r"SIGKILL", r"MemoryError", r"Cannot allocate memory", r"out-of-memory killer"),
)
