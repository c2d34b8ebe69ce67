# SPDX-License-Identifier: Apache-2.0
"""Whether RDMA may lock memory."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, error, ok, size, skipped
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    devices = subject.host.rdma_devices
    if not devices:
        return skipped("this host has no RDMA device, and nothing else locks memory")
    soft, hard = subject.host.limit("memlock")
    if soft is None:
        return ok(f"memory may be locked without limit, as {', '.join(devices)} need")
    container = subject.host.in_container
    return error(
        f"{size(soft)} of memory may be locked, and RDMA over {', '.join(devices)} locks every buffer",
        "lift the limit of locked memory",
        "docker run --ulimit memlock=-1 --cap-add IPC_LOCK ..." if container else "ulimit -l unlimited",
        soft=soft,
        hard=hard,
    )


CHECK = Check(
    name="locked_memory",
    what="the limit of locked memory where there are RDMA devices",
    why="InfiniBand registers its buffers by locking them: ibv_reg_mr fails below",
    cure="lift the limit of locked memory (memlock)",
    threads=("https://github.com/NVIDIA/nccl-tests/issues/206", "https://github.com/NVIDIA/nccl/issues/1191"),
    examine=examine,
    symptoms=(r"ibv_reg_mr", r"ibv_create_", r"Cannot allocate memory"),
)
