# SPDX-License-Identifier: Apache-2.0
"""The resources of this host: GPUs through NVML, memory and cores. Failures are recorded; `usable_machine` raises. No torch."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from phalanx.errors import OptionError
from phalanx.hardware.cgroup import GroupLimits, read_limits
from phalanx.hardware.nvml import Gpu, Listed, list_gpus
from phalanx.hardware.visible import ENDS, ORDER, VISIBLE, choose, is_unknown
from phalanx.log import get_logger

logger = get_logger(__name__)

NO_GPU = "this host has no GPU"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Machine:
    """What this process may use. Bytes and cores are within the limits of control groups.

    gpus: GPUs, or MIG instances.
    failures: what could not be determined -> why.
    unusable: which GPUs are not in `gpus`, why, and what to do; or that there is none.
    refusal: the error where no GPU can be used although there are some. None where the environment hides them on purpose.
    """

    gpus: tuple[Gpu, ...]
    host_memory: int
    free_host_memory: int
    cores: int
    failures: dict[str, str] = field(default_factory=dict)
    unusable: str = ""
    refusal: OptionError | None = None


def detect_machine(visible: str | None = None) -> Machine:
    """Probe this host. visible: the visible GPUs, in the format of CUDA_VISIBLE_DEVICES; None: the value of that variable, which
    CUDA obeys, too."""
    failures: dict[str, str] = {}
    visible = os.environ.get(VISIBLE) if visible is None else visible
    gpus, unusable, refusal = choose_gpus(list_gpus(), visible, os.environ.get(ORDER))
    if refusal is not None:
        failures["gpus"] = str(refusal)
    total, free = _recorded(failures, "host memory", _memory, (0, 0))
    limits = _recorded(failures, "limits of control groups", read_limits, GroupLimits(None, None, None, None))
    if limits.memory is not None and limits.free_memory is not None:
        total, free = min(total, int(limits.memory.amount)), min(free, limits.free_memory)
    return Machine(gpus, total, free, _recorded(failures, "cores", cores, 1), failures, unusable, refusal)


def usable_machine(device: str = "auto") -> Machine:
    """The machine, for who places ranks on its GPUs. A GPU that ails beside sound ones is named in the log.

    Raises OptionError where there are GPUs and none can be used: nothing runs on the CPU because a GPU ails or a variable is wrong.
    Not for device "cpu".
    """
    machine = detect_machine()
    for name in filter(is_unknown, os.environ):
        _warn(f"{name} is no variable of CUDA and has no effect: {VISIBLE} chooses GPUs")
    if device != "cpu" and machine.refusal is not None:
        raise machine.refusal
    if device != "cpu" and machine.gpus and machine.unusable:
        _warn(machine.unusable)
    return machine


@cache
def _warn(text: str) -> None:
    logger.warning("%s", text)


class GpuChoice(NamedTuple):
    """`gpus`, `unusable` and `refusal` of Machine."""

    gpus: tuple[Gpu, ...]
    unusable: str = ""
    refusal: OptionError | None = None


def choose_gpus(listed: Listed, visible: str | None, order: str | None = None) -> GpuChoice:
    """What the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER leave of the GPUs that NVML lists."""
    count = len(listed.gpus) + len(listed.ailing)
    empty = [f"GPU {gpu.index} is in MIG mode and has no instance" for gpu in listed.gpus if gpu.instances == ()]
    unusable = "; ".join([*map(str, listed.ailing.values()), *empty])
    mend = "mend that, or run on the CPU on purpose (device='cpu')"
    if visible is not None and visible.split(",")[0].strip() in ENDS:
        hidden = f"{count} GPUs" if count else "GPUs"
        return GpuChoice((), f"{VISIBLE}={visible!r} hides the {hidden} of this host" if count or listed.failure else NO_GPU)
    if listed.failure:
        return GpuChoice((), listed.failure, OptionError("the GPUs of this host cannot be reached", held=listed.failure, next=mend))
    if not count:
        return GpuChoice((), NO_GPU + (f", and {VISIBLE}={visible} names some" if visible is not None else ""))
    try:
        chosen = tuple(choose(listed.gpus, visible, order=order, ailing=listed.ailing))
    except OptionError as error:
        return GpuChoice((), str(error), error)
    if chosen:
        return GpuChoice(chosen, unusable)
    return GpuChoice((), unusable, OptionError("no GPU of this host can be used", held=unusable, next=mend))


def cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: its affinity, and the quota of its control groups rounded up. root: where /proc and
    /sys are mounted."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_limits(root).cores
    return allowed if quota is None else min(allowed, max(math.ceil(quota.amount), 1))


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


def free_host_memory() -> int:
    """Bytes of this host that processes may still take, within the limits of their control groups."""
    available, in_groups = _memory()[1], read_limits().free_memory
    return available if in_groups is None else min(available, in_groups)


def _memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _recorded(failures: dict[str, str], what: str, find: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return find()
    except Exception as error:
        failures[what] = f"{type(error).__name__}: {error}"
        return otherwise
