# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs and of the host, /dev/shm and disks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from phalanx.errors import PhalanxError
from phalanx.hardware.cgroup import Limit
from phalanx.health import memory
from phalanx.health.check import Finding, Need, check, error, ok, size, skipped, warning
from phalanx.health.host import title_of
from phalanx.health.subject import Subject
from phalanx.layout import Layout
from phalanx.layout.weights import weight_bytes

ESTIMATE = "weights and KV cache are exact, the rest at most"


@check(
    why="weights, activations, graphs and one KV block must fit: otherwise the start ends out of memory, minutes after it began",
    cure="larger TP, a smaller batch, FP8, PP, or shorter sequences",
    threads=(
        "vllm-project/vllm/issues/11251",
        "vllm-project/vllm/issues/15598",
        "vllm-project/vllm/issues/19186",
        "vllm-project/vllm/issues/16118",
    ),
    needs=(Need.MODEL,),
    symptoms=(r"out of memory", r"OutOfMemory", r"not a single KV block fits", r"CapacityError"),
)
def memory_budget(subject: Subject) -> Finding:
    """bytes that the model takes on each GPU against those that are free"""
    options, shape = subject.options, subject.model_shape
    assert options is not None
    if shape is None:
        return skipped("the model's shape is not known on this host")
    try:
        if not subject.on_gpu:
            return _on_cpu(subject)
        gpus = subject.gpus_in_use
        if not gpus:
            return skipped("no GPU is visible")
        smallest = min(gpus, key=lambda gpu: gpu.total - gpu.used)
        free = smallest.total - smallest.used if not subject.servers else smallest.total
        need = memory.budget(options, shape, free, on_gpu=True)
    except PhalanxError as failure:
        return skipped(f"the layout is refused: {failure}")
    rank = need.rank
    facts = {"need": need.least, "free": free, "weights": rank.weights, "beside": rank.beside, "graphs": rank.graphs}
    if rank.blocks == 0:
        return _too_large(subject, need, free, smallest.index, facts)
    shorter = memory.sequence_remedy(options, shape, need)
    if shorter is not None and options.max_seq_len is not None:
        divided = memory.divided_remedy(options, shape, free)
        return warning(
            f"the KV cache has room for {shorter.options['max_seq_len']:,} tokens, and max_seq_len={options.max_seq_len:,}",
            "use a shorter max_seq_len, or more GPUs" + (", or divide the tokens of latents over the ranks" if divided else ""),
            *(f"phalanx serve {options.model} {_others(subject)}{each.flags}" for each in (divided, shorter) if each is not None),
            **facts,
        )
    return ok(
        f"{size(need.least)} of {size(free)} are needed on GPU {smallest.index} ({ESTIMATE}); {rank.kv_tokens:,} tokens of KV"
        " cache fit beside",
        **facts,
        kv_tokens=rank.kv_tokens,
    )


def _too_large(subject: Subject, need: memory.MemoryBudget, free: int, index: int, facts: dict[str, int]) -> Finding:
    options, shape = subject.options, subject.model_shape
    assert options is not None
    assert shape is not None
    entries = memory.remedies(options, shape, free, len(subject.devices.gpus))
    fitting = [entry for entry in entries if entry.fits]
    shown = fitting[:4] or entries[:3]
    lines = [
        f"{entry.flags} frees {entry.freed / 1e9:.2f} GB" + (f" and needs {entry.gpus} GPUs" if entry.gpus > 1 else "")
        for entry in shown
    ]
    if not fitting:
        lines.append("none of them alone suffices")
    return error(
        f"{need.least / 1e9:.2f} GB are needed on GPU {index} ({need.text()}), and {free / 1e9:.2f} GB are free",
        "; ".join(lines),
        *(f"phalanx serve {options.model} {_others(subject)}{entry.flags}" for entry in shown[:2]),
        **facts,
        remedies=[{"options": entry.options, "freed": entry.freed, "fits": entry.fits, "gpus": entry.gpus} for entry in entries],
    )


def _others(subject: Subject) -> str:
    """The layout that stays as it is."""
    assert subject.options is not None
    options = subject.options
    sizes = {
        "tp": options.tensor_parallel_size, "pp": options.pipeline_parallel_size, "ep": options.expert_parallel_size,
        "moe_ep": options.moe_expert_parallel_size, "dcp": options.decode_context_parallel_size,
    }  # fmt: skip
    return "".join(f"--{name}_size {size} " for name, size in sizes.items() if size > 1)


def _on_cpu(subject: Subject) -> Finding:
    options, shape = subject.options, subject.model_shape
    assert options is not None
    assert shape is not None
    need = memory.budget(options, shape, on_gpu=False)
    if options.kv_cache_bytes is not None and options.kv_cache_bytes < need.rank.block:
        return error(
            f"kv_cache_bytes={options.kv_cache_bytes:,} is less than one KV block of {need.rank.block:,} bytes",
            "give the KV cache at least one request of full length",
            f"phalanx serve {options.model} --kv_cache_bytes {need.sequence}",
            block=need.rank.block,
            sequence=need.sequence,
        )
    return ok(
        f"{size(need.rank.weights)} of weights on each rank; one request of full length takes {size(need.sequence)} of KV cache",
        weights=need.rank.weights,
    )


WORTH = 1 << 30
"""Below it are contexts of monitoring programs, and what the driver keeps for itself."""


@check(
    why="an orphan or another job leaves too little for weights and KV cache: out of memory at the start",
    cure="end the process",
    threads=(
        "vllm-project/vllm/issues/20305",
        "vllm-project/vllm/issues/50135",
        "vllm-project/vllm/issues/55510",
        "PrimeIntellect-ai/verifiers/issues/85",
    ),
    needs=(Need.GPU,),
    symptoms=(r"out of memory", r"OutOfMemory", r"not a single KV block fits", r"CUDA error", r"memory left"),
    fine="the GPUs are free",
)
def gpu_memory_taken(subject: Subject) -> Iterator[Finding]:
    """memory that other processes have on the GPUs"""
    if subject.servers:
        yield skipped("a running server's own memory cannot be told from others' over HTTP")
        return
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
            yield error(summary, "end it, or leave it this GPU and use others", *kill, pid=holder.pid, bytes=holder.bytes)
        named = sum(holder.bytes or 0 for holder in gpu.holders or ())
        if not holders and gpu.used - named > WORTH + gpu.total // 50:
            yield warning(
                f"GPU {gpu.index}: {size(gpu.used)} of {size(gpu.total)} are in use, by processes that are not visible here",
                "look for them on the host",
                "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv",
                used=gpu.used,
            )


def _owner(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return title_of(process)[:60]
    return None


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


@check(
    why="at a control group's limit the kernel ends a rank with SIGKILL; beyond a limit of a process it refuses memory",
    cure="a smaller KV cache, or a higher limit",
    threads=("vllm-project/vllm/issues/3895", "xorbitsai/inference/issues/1450"),
    symptoms=(r"SIGKILL", r"MemoryError", r"[Cc]an(no|')t allocate memory", r"bad_alloc", r"out-of-memory killer"),
)
def host_memory(subject: Subject) -> Finding:
    """host memory, the control group's limit and those of a process"""
    limits, available = subject.host.limits(), psutil.virtual_memory().available
    kept = 0 if subject.options is None or subject.options.kv_host_memory == "auto" else subject.options.kv_host_memory
    group = limits.memory
    total = available if limits.free_memory is None else min(limits.free_memory, available)
    ranks, on_gpu = subject.ranks_here, subject.on_gpu
    need = _cpu_need(subject)
    each = RANK_BYTES[on_gpu] + (need.total if need is not None else 0)
    server = kept + (SERVER_BYTES if need is None else SERVER_BYTES // 2)
    facts = {"limit": None if group is None else int(group.amount), "available": available, "need": server + ranks * each}
    bounds = [_host_limit(group, available, (total - server) // ranks, RANK_BYTES[on_gpu], server + ranks * each)]
    bounds += _process_limits(subject) if need is not None else []
    limit = min(bounds, key=lambda one: one.room - one.own)
    model = need.total if need is not None else 0
    if limit.room >= limit.own + model:
        return ok(f"{size(total)} of host memory are available, and about {size(server + ranks * each)} are needed", **facts)
    if limit is not bounds[0]:
        assert need is not None
        summary = f"{limit.what}, and a rank needs about {size(limit.own + model)} ({need.text()})"
    else:
        summary = f"{limit.what}, and {ranks} ranks with the server need about {size(server + ranks * each)}"
    entries = _host_remedies(subject, limit)
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


def _host_limit(group: Limit | None, available: int, room: int, own: int, need: int) -> MemoryLimit:
    if group is not None and group.amount <= available:
        cure = "raise the container's memory limit"
        command = f"docker run --memory {-(-need // 2**30)}g ..."
        return MemoryLimit(room, own, f"{group} allows {size(group.amount)}", cure, command, shared=True)
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


def _host_remedies(subject: Subject, limit: MemoryLimit) -> list[memory.Remedy]:
    """Changes of options with which the start has room, the best first."""
    if subject.options is None or subject.model_shape is None or _cpu_need(subject) is None:
        return []
    entries = memory.cpu_remedies(subject.options, subject.model_shape, limit.room - limit.own)
    if limit.shared:
        entries = [entry for entry in entries if not {"tensor_parallel_size", "pipeline_parallel_size"} & entry.options.keys()]
    return [entry for entry in entries if entry.fits][:3]


GPU_BYTES_PER_RANK = 128 << 20
"""NCCL's buffers between two ranks without peer access, and its proxies' queues; Docker's default of 64 MiB is below one rank's."""
CPU_BYTES_PER_RANK = 16 << 20
"""`comm.shared_memory`: two halves of one 2 MiB chunk per rank, and those of a fusion's outputs."""


@check(
    why="ranks of one host exchange data there: a small one ends a start with ncclShmOpen or a bus error",
    cure="raise the size of /dev/shm, or share the host's",
    threads=("NVIDIA/nccl/issues/290", "NVIDIA/nccl/issues/342", "NVIDIA/nccl/issues/525", "vllm-project/vllm/issues/1710"),
    symptoms=(r"SIGBUS", r"shm", r"shared memory", r"unhandled system error", r"[Bb]us error"),
)
def shm_size(subject: Subject) -> Finding:
    """free bytes of /dev/shm"""
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


PREFIXES = ("phalanx-", "nccl-", "torch_", "sem.mp-", "psm_")
LEFTOVERS = 256 << 20


@check(
    why="a killed process leaves its shared memory, which counts as used until a restart",
    cure="remove the files that no process maps",
    threads=("NVIDIA/nccl/issues/342", "vllm-project/vllm/issues/5458"),
    symptoms=(r"No space left", r"shared memory"),
)
def shm_leftovers(subject: Subject) -> Finding:
    """files of ended programs in /dev/shm"""
    folder = subject.host.path("/dev/shm")
    sizes = {}
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                if entry.is_file() and entry.name.startswith(PREFIXES):
                    sizes[entry.name] = entry.stat().st_blocks * 512
    if sum(sizes.values()) < LEFTOVERS:
        return ok(f"{len(sizes)} files of inference programs in /dev/shm, {size(sum(sizes.values()))}")
    unused = {name: count for name, count in sizes.items() if name not in _mapped_names()}
    total = sum(unused.values())
    if total < LEFTOVERS:
        return ok(f"{size(sum(sizes.values()))} of files in /dev/shm, and processes use them")
    names = sorted(unused, key=unused.__getitem__, reverse=True)[:5]
    return warning(
        f"/dev/shm holds {size(total)} in {len(unused)} files that no process uses: {', '.join(names)}",
        "remove them",
        "rm " + " ".join(f"/dev/shm/{name}" for name in names),
        bytes=total,
    )


def _mapped_names() -> set[str]:
    """Names of files in /dev/shm that some process has mapped or open, as far as this user may see."""
    names: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths = [entry.path for entry in process.memory_maps()] + [entry.path for entry in process.open_files()]
            names.update(path.rpartition("/")[2].removesuffix(" (deleted)") for path in paths if "/shm/" in path)
    return names


LEAST_SPACE = 512 << 20
"""Kernels, sockets, and a log."""


@check(
    why="a download or a compiled kernel ends with 'No space left on device'",
    cure="free space, or move HF_HOME or TMPDIR",
    threads=("huggingface/huggingface_hub/issues/4304",),
    symptoms=(r"No space left", r"ENOSPC", r"[Dd]isk quota"),
)
def disk_space(subject: Subject) -> list[Finding]:
    """free bytes of the model cache and of the folder of temporary files"""
    findings = []
    cache = _existing(subject.hub_cache)
    need = LEAST_SPACE
    if subject.options is not None and subject.config is None and subject.folder is None and subject.model_shape is not None:
        need += sum(weight_bytes(subject.model_shape, "bf16", Layout()))
    places = {"the model cache": (cache, need), "the folder of temporary files": (Path(tempfile.gettempdir()), 64 << 20)}
    for what, (folder, wanted) in places.items():
        space = subject.host.space(folder)
        if space.free < wanted:
            cure = (
                "free space, or name a larger disk as HF_HOME"
                if "cache" in what
                else "free space, or name another folder as TMPDIR"
            )
            command = "export HF_HOME=/path/on/a/larger/disk" if "cache" in what else "export TMPDIR=/path/on/a/larger/disk"
            summary = f"{what}, {folder}, has {size(space.free)} free, and {size(wanted)} are needed"
            findings.append(
                error(summary, cure, f"du -xh --max-depth=2 {folder} | sort -h | tail", command, free=space.free, need=wanted)
            )
    return findings or [ok(f"the model cache has {size(subject.host.space(cache).free)} free")]


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return folder if folder.exists() or folder.parent == folder else _existing(folder.parent)
