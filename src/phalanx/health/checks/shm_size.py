# SPDX-License-Identifier: Apache-2.0
"""Whether /dev/shm holds what NCCL and the CPU ranks put there."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, error, ok, size
from phalanx.health.subject import Subject

GPU_BYTES_PER_RANK = 128 << 20
"""NCCL's buffers between two ranks without peer access, and its proxies' queues; Docker's default of 64 MiB is below one rank's."""
CPU_BYTES_PER_RANK = 16 << 20
"""`comm.shared_memory`: two halves of one 2 MiB chunk per rank, and those of a fusion's outputs."""


def examine(subject: Subject) -> Finding:
    try:
        space = subject.host.space("/dev/shm")
    except OSError as failure:
        return error(
            f"/dev/shm cannot be used: {failure.strerror}", "mount a tmpfs there", "mount -t tmpfs -o size=1g tmpfs /dev/shm"
        )
    ranks = max(subject.ranks_here, 1)
    need = ranks * (GPU_BYTES_PER_RANK if subject.on_gpu else CPU_BYTES_PER_RANK)
    facts = {"total": space.total, "free": space.free, "need": need}
    if ranks > 1 and space.free < need:
        cure = (
            "give the container at least 1 GiB of shared memory" if space.total < need else "remove what other programs left in it"
        )
        commands = ["docker run --shm-size 1g ...", "docker run --ipc=host ..."] if subject.host.in_container else []
        if space.total >= need:
            commands = ["ls -lS /dev/shm | head"]
        elif not commands:
            commands = ["mount -o remount,size=1g /dev/shm"]
        return error(
            f"/dev/shm has {size(space.free)} free of {size(space.total)}, and {ranks} ranks may need {size(need)}",
            cure,
            *commands,
            **facts,
        )
    return ok(f"/dev/shm has {size(space.free)} free of {size(space.total)}", **facts)


CHECK = Check(
    name="shm_size",
    what="free bytes of /dev/shm",
    why="ranks of one host exchange data there: a small one ends a start with ncclShmOpen or a bus error",
    cure="raise the size of /dev/shm, or share the host's",
    threads=(
        "https://github.com/NVIDIA/nccl/issues/290",
        "https://github.com/NVIDIA/nccl/issues/342",
        "https://github.com/NVIDIA/nccl/issues/525",
        "https://github.com/vllm-project/vllm/issues/1710",
    ),
    examine=examine,
    symptoms=(r"SIGBUS", r"shm", r"shared memory", r"unhandled system error", r"[Bb]us error"),
)
