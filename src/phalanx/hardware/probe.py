# SPDX-License-Identifier: Apache-2.0
"""What this host has: GPUs through NVML, memory and cores. What cannot be found out is recorded, never raised.

NVML needs no CUDA context: looking costs no GPU memory and takes milliseconds. No torch here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

_T = TypeVar("_T")


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it. `index` is NVML's, `sm` the compute capability x 10 (90 is Hopper); memory in bytes."""

    index: int
    uuid: str
    name: str
    sm: int
    total_memory: int
    free_memory: int


@dataclass(frozen=True)
class Machine:
    """What was found. `gpus`: those this process may use. Bytes; `cores` and memory as the container allows.

    `failures`: what could not be found out -> why.
    """

    gpus: tuple[Gpu, ...]
    host_memory: int
    free_host_memory: int
    cores: int
    failures: dict[str, str] = field(default_factory=dict)


def detect_machine(visible: str | None = None) -> Machine:
    """Look at this host. `visible`: which GPUs count, as CUDA_VISIBLE_DEVICES would say; None takes that variable, which is
    part of what the machine is to this process: CUDA itself obeys it."""
    failures: dict[str, str] = {}
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus: list[Gpu] = _noted(failures, "gpus", _nvml_gpus, [])
    total, free = _noted(failures, "host memory", _memory, (0, 0))
    limit = _noted(failures, "container memory limit", memory_limit, None)
    if limit is not None:
        total, free = min(total, limit[0]), min(free, limit[1])
    return Machine(tuple(choose(gpus, visible)), total, free, _noted(failures, "cores", cores, 1), failures)


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPU cores that this process may use: its affinity, and the container's quota rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup / "cpu.max"
    if limit.is_file():
        quota, _, period = limit.read_text().strip().partition(" ")
        if quota != "max" and int(quota) > 0 and int(period) > 0:
            allowed = min(allowed, max(-(-int(quota) // int(period)), 1))
    return allowed


def address_towards(peer: str) -> str:
    """This host's address on the interface from which `peer` (a name or address) is reached. Nothing is sent.

    Raises OSError for an unknown name, or where no route leads.
    """
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(address)
        return str(asked.getsockname()[0])


def choose(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Those of `gpus` that a CUDA_VISIBLE_DEVICES of this value leaves, in its order; None leaves all.

    As CUDA reads it: indices or unambiguous beginnings of UUIDs; the first entry that names nothing ends the list, and one that
    is named twice leaves none.
    """
    if visible is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            named = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            named = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in found:
            return []
        found.append(named[0])
    return found


def _nvml_gpus() -> list[Gpu]:
    import pynvml

    pynvml.nvmlInit()
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    return Gpu(index, _text(uuid), _text(name), 10 * major + minor, int(memory.total), int(memory.free))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def memory_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Bytes that a container may hold, and how many of them it does not; None for no limit. Pages of files that nobody uses are
    given up when memory is wanted."""
    limit = cgroup / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text == "max":
        return None
    held = int((cgroup / "memory.current").read_text())
    facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int(text), max(int(text) - held + int(facts.get("inactive_file", 0)), 0)


def _noted(failures: dict[str, str], what: str, find: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return find()
    except Exception as error:
        failures[what] = f"{type(error).__name__}: {error}"
        return otherwise
