# SPDX-License-Identifier: Apache-2.0
"""What NVML answers about the GPUs of this host, as plain data. A function that is refused leaves None; nothing is raised, and
nothing is changed."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from phalanx.hardware.nvml import Ailment, Gpu, list_gpus, text_of
from phalanx.hardware.probe import choose_gpus

T = TypeVar("T")

NVLINKS = 18
LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")
"""In the order of NVML's counters."""
LINK_TO_SWITCH = 2
GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
"""nvmlDeviceGetNvLinkVersion counts 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 from 1 on."""
LINK_RATES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes per second of one link in one direction, by generation, where NVML does not answer: data sheets of P100 to B200."""
LINK_SPEED_MBPS = 90
"""A field of nvmlDeviceGetFieldValues, as nvml.h numbers it."""

REASONS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons."""

TOPOLOGY = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlDeviceGetTopologyCommonAncestor in the words of `nvidia-smi topo -m`."""

P2P = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
}
FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


@dataclass(frozen=True)
class Holder:
    """A process that has memory on a GPU. bytes None: NVML does not say."""

    pid: int
    bytes: int | None


@dataclass(frozen=True)
class Link:
    """One NVLink of a GPU. remote: the PCI address at its other end, "" unknown. errors: counter -> count, where not 0."""

    index: int
    active: bool
    version: int | None = None
    remote: str = ""
    remote_is_switch: bool | None = None
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """One GPU. Bytes, watts, MHz, degrees Celsius; None: NVML does not answer. `index` is NVML's."""

    index: int
    uuid: str
    name: str
    sm: int
    pci: str
    total: int
    used: int
    holders: tuple[Holder, ...] | None = None
    utilization: int | None = None
    power_limit: float | None = None
    power_default: float | None = None
    temperature: int | None = None
    slowdown_temperature: int | None = None
    sm_clock: int | None = None
    max_sm_clock: int | None = None
    application_clock: int | None = None
    default_application_clock: int | None = None
    reasons: frozenset[str] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    max_pcie_generation: int | None = None
    max_pcie_width: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    mig: bool | None = None
    persistence: bool | None = None
    compute_mode: int | None = None
    links: tuple[Link, ...] = ()
    link_mbps: int | None = None
    fabric: str | None = None
    fabric_status: int | None = None
    numa_node: int | None = None
    cpus: frozenset[int] | None = None

    @property
    def active_links(self) -> tuple[Link, ...]:
        return tuple(link for link in self.links if link.active)

    @property
    def nvlink_bytes_per_s(self) -> float:
        """One way, over all active links: by their signalled rate where NVML answers it, else by their generation's."""
        if self.link_mbps:
            return len(self.active_links) * self.link_mbps * 1e6
        return sum(LINK_RATES.get(link.version or 0, 0.0) for link in self.active_links)


@dataclass(frozen=True)
class Pair:
    """Two GPUs. ancestor: where their PCIe paths meet; p2p: capability ("read", "write", "nvlink") -> status."""

    ancestor: str | None
    p2p: dict[str, str]

    @property
    def nvlink(self) -> bool:
        return self.p2p.get("nvlink") == "ok"

    @property
    def peer_access(self) -> bool:
        return self.p2p.get("read") == "ok" and self.p2p.get("write", "ok") == "ok"

    @property
    def kind(self) -> str:
        """As `nvidia-smi topo -m` writes it: NVLink is "NV"; else where the paths meet."""
        return "NV" if self.nvlink else self.ancestor or "?"


@dataclass(frozen=True)
class Devices:
    """All GPUs that this process may use.

    failure: why NVML cannot be asked although there are GPUs, "" where it can or there are none.
    present: how many NVML lists. ailing: NVML's index -> why one of them cannot be used.
    unusable: why there is no GPU here, or which are not used. refused: the engine would not start for that reason.
    """

    gpus: tuple[Device, ...] = ()
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    driver: str = ""
    cuda: int | None = None
    failure: str = ""
    present: int = 0
    ailing: dict[int, Ailment] = field(default_factory=dict)
    unusable: str = ""
    refused: bool = False

    @property
    def uuids(self) -> str:
        """As CUDA_VISIBLE_DEVICES: device i of CUDA is then the i-th GPU."""
        return ",".join(gpu.uuid for gpu in self.gpus)

    def pair(self, a: Device, b: Device) -> Pair:
        return self.pairs.get((a.index, b.index)) or self.pairs.get((b.index, a.index)) or Pair(None, {})


def read(nvml: Any = None, visible: str | None = None, order: str | None = None, root: Path = Path("/")) -> Devices:
    """Read all GPUs that the engine would use. nvml: the module pynvml, or one with the same functions. visible, order: as
    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None: unset. root: where /dev and /sys are mounted."""
    listed = list_gpus(nvml, root)
    gpus, unusable, refusal = choose_gpus(listed, visible, order)
    present, refused = len(listed.gpus) + len(listed.ailing), refusal is not None
    nothing = Devices((), {}, "", None, listed.failure, present, listed.ailing, unusable, refused)
    if not present:
        return nothing
    nvml = importlib.import_module("pynvml") if nvml is None else nvml
    nvml.nvmlInit()
    try:
        handles = {gpu.index: nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus}
        devices = tuple(_device(nvml, gpu, handles[gpu.index]) for gpu in gpus)
        pairs = {
            (a.index, b.index): _pair(nvml, handles[a.index], handles[b.index])
            for a in devices for b in devices if a.index < b.index
        }  # fmt: skip
        ask = _Asker(nvml, None)
        driver = text_of(ask("nvmlSystemGetDriverVersion") or "")
        return replace(nothing, gpus=devices, pairs=pairs, driver=driver, cuda=ask("nvmlSystemGetCudaDriverVersion"))
    except Exception as error:  # a GPU that was lost since
        return replace(nothing, failure=f"{type(error).__name__}: {error}", refused=True)
    finally:
        nvml.nvmlShutdown()


class _Asker:
    """Calls functions of NVML for one GPU, or for none; what is refused gives None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def __call__(self, function: str, *args: Any) -> Any:
        handles = () if self.handle is None else (self.handle,)
        return _attempt(lambda: getattr(self.nvml, function)(*handles, *args))


def _attempt(act: Callable[[], T]) -> T | None:
    try:
        return act()
    except Exception:
        return None


def _link_mbps(ask: _Asker) -> int | None:
    values = ask("nvmlDeviceGetFieldValues", [(LINK_SPEED_MBPS, 0)])
    if not values or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.ullVal if values[0].valueType in (2, 3) else values[0].value.uiVal)


def _device(nvml: Any, gpu: Gpu, handle: Any) -> Device:
    ask = _Asker(nvml, handle)
    pci = ask("nvmlDeviceGetPciInfo")
    utilization = ask("nvmlDeviceGetUtilizationRates")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    rows = ask("nvmlDeviceGetRemappedRows")
    mig = ask("nvmlDeviceGetMigMode")
    fabric, fabric_status = _fabric(ask)
    return Device(
        gpu.index,
        gpu.uuid,
        gpu.name,
        gpu.sm,
        text_of(pci.busId).lower() if pci is not None else "",
        gpu.total_memory,
        gpu.total_memory - gpu.free_memory,
        holders=_holders(ask),
        utilization=None if utilization is None else int(utilization.gpu),
        power_limit=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        power_default=_watts(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
        temperature=ask("nvmlDeviceGetTemperature", 0),
        slowdown_temperature=ask("nvmlDeviceGetTemperatureThreshold", 1),
        sm_clock=ask("nvmlDeviceGetClockInfo", 1),
        max_sm_clock=ask("nvmlDeviceGetMaxClockInfo", 1),
        application_clock=ask("nvmlDeviceGetApplicationsClock", 1),
        default_application_clock=ask("nvmlDeviceGetDefaultApplicationsClock", 1),
        reasons=None if reasons is None else frozenset(name for bit, name in REASONS.items() if reasons & bit),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        max_pcie_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", 1, 0),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        mig=None if mig is None else bool(mig[0]),
        persistence=_flag(ask("nvmlDeviceGetPersistenceMode")),
        compute_mode=ask("nvmlDeviceGetComputeMode"),
        links=_links(ask),
        link_mbps=_link_mbps(ask),
        fabric=fabric,
        fabric_status=fabric_status,
        numa_node=ask("nvmlDeviceGetNumaNodeId"),
        cpus=_cpus(ask),
    )


def _holders(ask: _Asker) -> tuple[Holder, ...] | None:
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    if processes is None:
        return None
    return tuple(Holder(int(each.pid), None if each.usedGpuMemory is None else int(each.usedGpuMemory)) for each in processes)


def _links(ask: _Asker) -> tuple[Link, ...]:
    links = []
    for index in range(NVLINKS):
        state = ask("nvmlDeviceGetNvLinkState", index)
        if state is None:  # a link that this GPU does not have
            continue
        if not state:
            links.append(Link(index, False))
            continue
        remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", index)
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", index)
        version = ask("nvmlDeviceGetNvLinkVersion", index)
        counts = {name: ask("nvmlDeviceGetNvLinkErrorCounter", index, counter) for counter, name in enumerate(LINK_ERRORS)}
        links.append(
            Link(
                index,
                True,
                None if version is None else GENERATIONS.get(int(version)),
                "" if remote is None else text_of(remote.busId).lower(),
                None if kind is None else kind == LINK_TO_SWITCH,
                {name: int(count) for name, count in counts.items() if count},
            )
        )
    return tuple(links)


def _fabric(ask: _Asker) -> tuple[str | None, int | None]:
    """State of the NVSwitch fabric, and the status with which registration ended (0: success)."""

    def fill() -> Any:
        info = ask.nvml.c_nvmlGpuFabricInfo_v2_t()
        info.version = ask.nvml.nvmlGpuFabricInfo_v2
        ask.nvml.nvmlDeviceGetGpuFabricInfoV(ask.handle, ctypes.byref(info) if isinstance(info, ctypes.Structure) else info)
        return info

    info = _attempt(fill)
    return (None, None) if info is None else (FABRIC.get(int(info.state), f"state {info.state}"), int(info.status))


def _pair(nvml: Any, a: Any, b: Any) -> Pair:
    def status(kind: int) -> str:
        return P2P.get(int(nvml.nvmlDeviceGetP2PStatus(a, b, kind)), "unknown")

    level = _attempt(lambda: int(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)))
    kinds = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
    answers = {name: _attempt(lambda kind=kind: status(kind)) for name, kind in kinds.items()}  # type: ignore[misc]
    return Pair(None if level is None else TOPOLOGY.get(level, str(level)), {name: text for name, text in answers.items() if text})


def _cpus(ask: _Asker) -> frozenset[int] | None:
    words = ask("nvmlDeviceGetCpuAffinity", 16)
    if words is None:
        return None
    return frozenset(64 * place + bit for place, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)
