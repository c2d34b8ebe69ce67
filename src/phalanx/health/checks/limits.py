# SPDX-License-Identifier: Apache-2.0
"""Limits of the control group and of processes, and what a container hides."""

from __future__ import annotations

import contextlib

import psutil

from phalanx.hardware.probe import cores
from phalanx.health.check import Finding, Level, check, error, note, ok, size, skipped, warning
from phalanx.health.host import is_orphan, title_of
from phalanx.health.subject import Subject


@check(
    why="each GPU rank keeps a core busy with launches, and the server another: with fewer, every step waits "
    "for the scheduler of the kernel",
    cure="give a core to each rank and one to the server",
    threads=("vllm-project/vllm/issues/14538", "vllm-project/vllm/issues/4806"),
)
def cpu_cores(subject: Subject) -> Finding:
    """cores and the control group's quota"""
    limit = subject.host.limits().cores
    quota = None if limit is None else limit.amount
    usable = min(cores(subject.host.root), cores() if quota is None else quota)
    ranks = subject.ranks_here
    need = ranks + 1 if subject.on_gpu else 1
    facts = {"cores": usable, "quota": quota, "need": need}
    if usable < need:
        reason = f"{limit} allows {quota:g}" if quota is not None and quota <= usable else f"this process may use {usable:g}"
        return warning(
            f"{reason} cores, and {ranks} ranks with the server keep {need} busy",
            "raise the quota of cores" if quota is not None else "use fewer ranks",
            f"docker run --cpus {need + 1} ...",
            **facts,
        )
    return ok(f"{usable:g} cores for {ranks} ranks and the server", **facts)


TASKS_PER_RANK = 192
TASKS_OF_SERVER = 128


@check(
    why="ranks start dozens of threads each: 'can't start new thread' or 'Resource temporarily unavailable'",
    cure="raise pids.max or nproc",
    threads=("vllm-project/vllm/issues/13354", "vllm-project/vllm/issues/6295"),
    symptoms=(r"can't start new thread", r"Resource temporarily unavailable", r"pthread_create"),
)
def task_limit(subject: Subject) -> Finding:
    """limits of processes and threads"""
    need = TASKS_OF_SERVER + TASKS_PER_RANK * subject.ranks_here
    group = subject.host.limits().tasks
    limits = {
        "control group (pids.max)": None if group is None else int(group.amount),
        "user (ulimit -u)": subject.host.limit("nproc").soft,
    }
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


RESERVED_FILES = 512
"""Libraries, model files, the ranks' pipes and sockets, and the log."""


@check(
    why="a limit of a group above this one holds, too: the kernel ends a rank at it, though this group's own says 'max'",
    cure="raise the limit of the group that is named",
    threads=("https://docs.kernel.org/admin-guide/cgroup-v2.html", "xorbitsai/inference/issues/1450"),
    symptoms=(r"SIGKILL", r"out-of-memory killer"),
)
def control_group(subject: Subject) -> list[Finding]:
    """the smallest limits of the control group and of those above it"""
    limits = subject.host.limits()
    kinds = {"memory": limits.memory, "cores": limits.cores, "tasks": limits.tasks}
    named = {kind: f"{limit} allows {size(limit.amount) if kind == 'memory' else f'{limit.amount:g} {kind}'}"
             for kind, limit in kinds.items() if limit is not None}  # fmt: skip
    findings = [note(text, "ask who looks after that group for more where it is too little") for text in limits.unread]
    findings += [note(text) for kind, text in named.items() if (limit := kinds[kind]) is not None and not limit.own]
    return findings or [ok("; ".join(named.values()) or "no limit is set")]


@check(
    why="each open request takes a descriptor: past the limit connections are refused with 'Too many open files'",
    cure="raise the limit of open files (nofile)",
    threads=("vllm-project/vllm/issues/7920", "vllm-project/vllm/pull/11530"),
    symptoms=(r"Too many open files", r"EMFILE"),
)
def open_files(subject: Subject) -> Finding:
    """the limit of open files against the streams that the server admits"""
    soft, hard = subject.host.limit("nofile")
    need = subject.streams + RESERVED_FILES
    limit = hard if hard is None or soft is None else max(soft, hard)
    facts = {"soft": soft, "hard": hard, "need": need}
    if limit is not None and limit < need:
        return error(
            f"{limit} open files are allowed, and {subject.streams} streams need {need}",
            "raise the hard limit, or lower the queue",
            f"ulimit -Hn {max(65536, need)}",
            f"docker run --ulimit nofile={max(65536, need)} ...",
            f"phalanx serve ... --max_num_queued_reqs {max(limit - RESERVED_FILES - (subject.streams // 9 or 1), 0)}",
            **facts,
        )
    if soft is not None and soft < need:
        return Finding(Level.NOTE, f"the soft limit is {soft} open files; the server raises it at its start", facts=dict(facts))
    return ok(f"{soft or 'unlimited'} open files are allowed, and {need} may be needed", **facts)


@check(
    why="InfiniBand registers its buffers by locking them: ibv_reg_mr fails below",
    cure="lift the limit of locked memory (memlock)",
    threads=("NVIDIA/nccl-tests/issues/206", "NVIDIA/nccl/issues/1191"),
    symptoms=(r"ibv_reg_mr", r"ibv_create_", r"Cannot allocate memory"),
)
def locked_memory(subject: Subject) -> Finding:
    """the limit of locked memory where there are RDMA devices"""
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


@check(
    why="ranks in separate containers of one host share no /dev/shm, and memory of GPUs is taken by processes "
    "that the container does not show",
    cure="share the host's namespaces",
    threads=("vllm-project/vllm/issues/1710", "vllm-project/production-stack/issues/899"),
    symptoms=(r"shared memory", r"out of memory"),
)
def namespaces(subject: Subject) -> Finding:
    """the container's process and network namespaces"""
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


@check(
    why="an engine's rank that outlives it keeps its GPU memory and its ports",
    cure="end the processes",
    threads=("vllm-project/vllm/issues/55510", "vllm-project/vllm/issues/34643", "vllm-project/vllm/issues/20305"),
    symptoms=(r"out of memory", r"OutOfMemory", r"already in use", r"not a single KV block fits"),
)
def orphans(subject: Subject) -> Finding:
    """processes of Phalanx without a parent"""
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
