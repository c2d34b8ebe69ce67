# SPDX-License-Identifier: Apache-2.0
"""The GPUs that NVML lists: those that answer, and those that ail, each with the reason and the cure. Nothing is changed.

NVML needs no CUDA context: a probe takes no GPU memory and only milliseconds. No torch here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ABSENT = {9: "driver not loaded", 12: "library not found"}
"""Codes of nvmlInit on a host without GPUs. A GPU that is on its bus, or has a device file, makes them failures."""
UNANSWERED = {
    3: "not supported", 6: "not found", 13: "function not found", 21: "no data", 22: "not supported with vGPU and ECC",
    24: "frequency not supported", 25: "version of the argument", 26: "deprecated", 30: "type of reset not supported",
}  # fmt: skip
"""Codes with which a sound GPU refuses a question: the fact stays unknown."""
CURES = {
    4: "give this user, or the container, access to its device file",
    8: "connect its power cables",
    10: "look for its Xid in `dmesg`, and restart the host",
    11: "look at its slot and BIOS: the kernel gets no interrupts from it",
    14: "have the board replaced: its inforom is damaged",
    15: "it has fallen off the bus: restart the host; reseat or replace it where that returns",
    16: "reset it with no process on it: nvidia-smi --gpu-reset",
    18: "restart the host: the driver was upgraded, and its old module is loaded",
    19: "end the program that has it alone",
    27: "wait until the driver has initialized it",
    999: "look for its Xid in `dmesg`, and reset it: nvidia-smi --gpu-reset",
}
"""Codes with which a GPU or NVML itself ails, and what to do."""
OTHERS = {1, 2, 5, 7, 17, 20, 23, 28, 29}
"""Codes that no healthy GPU answers, without a cure of their own."""
CURE = "look into `nvidia-smi` and `dmesg`"

NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""Vendor and classes of GPUs on the PCI bus."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it, or one MIG instance of it. `index` is NVML's, `sm` the compute capability x 10 (90 is Hopper);
    memory in bytes. instances: of a GPU in MIG mode, which CUDA offers in its place; None where MIG is off."""

    index: int
    uuid: str
    name: str
    sm: int
    total_memory: int
    free_memory: int
    instances: tuple[Gpu, ...] | None = None


class Ailment(NamedTuple):
    """Of a GPU: what is wrong, and what to do."""

    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}"


@dataclass(frozen=True)
class Listed:
    """gpus: those that answer. ailing: NVML's index -> what is wrong with the GPU. failure: why NVML itself cannot
    be asked although there are GPUs, "" where it can or there are none."""

    gpus: tuple[Gpu, ...] = ()
    ailing: dict[int, Ailment] = field(default_factory=dict)
    failure: str = ""


def list_gpus(nvml: Any = None, root: Path = Path("/")) -> Listed:
    """nvml: the module pynvml, or one with the same functions. root: where /dev and /sys are mounted."""
    try:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
    except Exception as error:
        return Listed(failure="" if is_absence(error, root) else described(error))
    try:
        count = nvml.nvmlDeviceGetCount()
        gpus, ailing = [], {}
        for index in range(count):
            known: list[str] = []
            try:
                gpus.append(_gpu(nvml, index, known))
            except Exception as error:
                named = f" ({', '.join(known)})" if known else ""
                ailing[index] = Ailment(f"GPU {index}{named} cannot be used: {type(error).__name__}: {error}", cure_of(error))
        return Listed(tuple(gpus), ailing)
    except Exception as error:
        return Listed(failure=described(error))
    finally:
        nvml.nvmlShutdown()


def is_absence(error: Exception, root: Path = Path("/")) -> bool:
    """Whether a failure of nvmlInit only says that this host has no GPU, or that this container was given none."""
    code = getattr(error, "value", None)
    if any((root / "dev").glob("nvidia[0-9]*")):
        return False
    return isinstance(error, ImportError) or code == 12 or (code == 9 and not _on_the_bus(root))


def _on_the_bus(root: Path) -> bool:
    def read(file: Path) -> str:
        try:
            return file.read_text(encoding="ascii").strip()
        except OSError:
            return ""

    folders = (root / "sys/bus/pci/devices").glob("*")
    return any(read(each / "vendor") == NVIDIA and read(each / "class").startswith(DISPLAYS) for each in folders)


def described(error: Exception) -> str:
    """The error and what to do about it: "NVMLError_GpuIsLost: GPU is lost; it has fallen off the bus: ..."."""
    return f"{type(error).__name__}: {error}; {cure_of(error)}"


def cure_of(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install NVML's bindings: pip install nvidia-ml-py"
    return CURES.get(getattr(error, "value", None) or 0, CURE)


def _gpu(nvml: Any, index: int, known: list[str]) -> Gpu:
    """Raises what NVML raises for a GPU that ails. known: gets its UUID and name as they are answered."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = text_of(nvml.nvmlDeviceGetUUID(handle))
    known.append(uuid)
    name = text_of(nvml.nvmlDeviceGetName(handle))
    known.append(name)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    sm = 10 * major + minor
    instances = _instances(nvml, handle, index, sm)
    if instances is not None:  # who may use an instance may not ask for the memory of the whole
        total, free = sum(each.total_memory for each in instances), sum(each.free_memory for each in instances)
    else:
        total, free = _memory(nvml, handle)
    return Gpu(index, uuid, name, sm, total, free, instances)


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """(total, free) bytes. A GPU that shares the host's memory (GB10) answers that it has none of its own."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception as error:
        if getattr(error, "value", None) not in UNANSWERED:
            raise
        host = psutil.virtual_memory()
        return int(host.total), int(host.available)
    return int(memory.total), int(memory.free)


def _instances(nvml: Any, handle: Any, index: int, sm: int) -> tuple[Gpu, ...] | None:
    """The MIG instances that this process may use; None where MIG is off."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
        places = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except Exception:
        return None
    instances = []
    for place in places:
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except Exception:  # no instance in this place
            continue
        name = text_of(nvml.nvmlDeviceGetName(instance))
        instances.append(Gpu(index, text_of(nvml.nvmlDeviceGetUUID(instance)), name, sm, *_memory(nvml, instance)))
    return tuple(instances)


def text_of(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
