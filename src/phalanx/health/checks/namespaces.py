# SPDX-License-Identifier: Apache-2.0
"""Whether a container hides processes or shared memory of the other ranks."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, note, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    if not subject.host.in_container:
        return ok("this is no container")
    first = (subject.host.read("/proc/1/comm") or "").strip()
    private_pids = first not in ("systemd", "init")
    multiple = subject.options is not None and subject.options.nnodes > 1
    if private_pids and subject.devices.gpus:
        holders = {holder.pid for gpu in subject.devices.gpus for holder in gpu.holders or ()}
        hidden = sorted(pid for pid in holders if not subject.host.path(f"/proc/{pid}").exists())
        if hidden:
            return note(
                f"{len(hidden)} processes on the GPUs run outside this container (pids {', '.join(map(str, hidden[:4]))} of the"
                " host)",
                "look for them on the host, or share its process namespace",
                "docker run --pid=host ...",
                hidden=hidden,
            )
    if multiple:
        return note(
            "hosts of one world in containers need an address of their own",
            "share the host's network, or name GLOO_SOCKET_IFNAME",
            "docker run --network host ...",
        )
    return ok("the container shows what the ranks need")


CHECK = Check(
    name="namespaces",
    what="the container's process and network namespaces",
    why="ranks in separate containers of one host share no /dev/shm, and memory of GPUs is taken by processes "
    "that the container does not show",
    cure="share the host's namespaces",
    threads=("https://github.com/vllm-project/vllm/issues/1710", "https://github.com/vllm-project/production-stack/issues/899"),
    examine=examine,
    symptoms=(r"shared memory", r"out of memory"),
)
