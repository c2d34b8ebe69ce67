# SPDX-License-Identifier: Apache-2.0
"""The resources of this host: GPUs through NVML, memory and cores. Failures are recorded, never raised.

NVML needs no CUDA context: a probe takes no GPU memory and only milliseconds. No torch here.
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
    """gpus: those this process may use. Memory in bytes; memory and cores within the container's limits. failures: what could not
    be determined -> why."""

    gpus: tuple[Gpu, ...]
    host_memory: int
    free_host_memory: int
    cores: int
    failures: dict[str, str] = field(default_factory=dict)


def detect_machine(visible: str | None = None) -> Machine:
    """Probe this host. visible: the visible GPUs, in the format of CUDA_VISIBLE_DEVICES; None: the value of that variable, which
    CUDA obeys, too."""
    failures: dict[str, str] = {}
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus: list[Gpu] = _recorded(failures, "gpus", _nvml_gpus, [])
    total, free = _recorded(failures, "host memory", _memory, (0, 0))
    limit = _recorded(failures, "container memory limit", memory_limit, None)
    if limit is not None:
        total, free = min(total, limit[0]), min(free, limit[1])
    return Machine(tuple(choose(gpus, visible)), total, free, _recorded(failures, "cores", cores, 1), failures)


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPU cores that this process may use: its affinity, and the container's quota rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup / "cpu.max"
    if limit.is_file():
        quota, _, period = limit.read_text().strip().partition(" ")
        if quota != "max" and int(quota) > 0 and int(period) > 0:
            allowed = min(allowed, max(-(-int(quota) // int(period)), 1))
    return allowed


def free_cores(seconds: float = 0.1) -> int:
    """Of the cores that this process may use, those that no program uses now, but at least 1. It looks on for `seconds`."""
    present = psutil.cpu_count() or 1
    busy = psutil.cpu_percent(seconds) / 100 * present
    return max(1, min(cores(), round(present - busy)))


def address_towards(peer: str) -> str:
    """This host's address on the interface that leads to `peer` (a name or address). Nothing is sent.

    Raises OSError for an unknown name, or without a route.
    """
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def choose(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES of this value leaves, in its order; None leaves all.

    As CUDA reads it: indices or unambiguous prefixes of UUIDs. The first entry that matches no GPU ends the list; a GPU that is
    named twice leaves none.
    """
    if visible is None:
        return list(gpus)
    visible_gpus: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            named = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            named = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in visible_gpus:
            return []
        visible_gpus.append(named[0])
    return visible_gpus


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
    """(limit, free) bytes of the container; None for no limit. Inactive pages of files count as free: the kernel reclaims them."""
    limit = cgroup / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text == "max":
        return None
    used = int((cgroup / "memory.current").read_text())
    facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int(text), max(int(text) - used + int(facts.get("inactive_file", 0)), 0)


def _recorded(failures: dict[str, str], what: str, find: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return find()
    except Exception as error:
        failures[what] = f"{type(error).__name__}: {error}"
        return otherwise
