# SPDX-License-Identifier: Apache-2.0
"""Records what NVML answers on this machine, idle and under load, as JSON: `python scripts/nvml_probe.py OUT.json`.

Needs pynvml (`nvidia-ml-py`); the load needs torch with CUDA and is left out without it. It takes about a minute. Only
functions that read are called: no setting of a GPU is changed, no counter is reset, and no multicast object is created.

The file holds phases ("idle", "loaded", "after"). A phase is a list of calls: {"function", "args", "answer"} or {"function",
"args", "error", "code"}. A GPU's handle is written {"gpu": index}, a struct {"fields": {...}}. `tests/support/health_nvml.py`
plays a phase back.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

FORMAT = 1

# Functions of one GPU that take nothing else.
OF_A_GPU = [
    "Name", "UUID", "PciInfo", "CudaComputeCapability", "Architecture", "Brand", "VbiosVersion",
    "InforomImageVersion", "MemoryInfo", "BAR1MemoryInfo", "UtilizationRates", "PerformanceState", "PowerUsage",
    "PowerManagementMode", "PowerManagementLimit", "PowerManagementDefaultLimit", "PowerManagementLimitConstraints",
    "EnforcedPowerLimit", "TotalEnergyConsumption", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons",
    "SupportedClocksEventReasons", "SupportedClocksThrottleReasons", "CurrPcieLinkGeneration", "CurrPcieLinkWidth",
    "MaxPcieLinkGeneration", "MaxPcieLinkWidth", "GpuMaxPcieLinkGeneration", "PcieSpeed", "PcieLinkMaxSpeed",
    "PcieReplayCounter", "EccMode", "MigMode", "PersistenceMode", "ComputeMode", "DisplayMode", "DisplayActive",
    "VirtualizationMode", "NumaNodeId", "MinorNumber", "ModuleId", "BoardId", "MultiGpuBoard", "MemoryBusWidth",
    "NumGpuCores", "AddressingMode", "GspFirmwareVersion", "GspFirmwareMode", "RemappedRows", "RowRemapperHistogram",
    "RetiredPagesPendingStatus", "RepairStatus", "SramEccErrorStatus", "SupportedEventTypes", "ComputeRunningProcesses",
    "GraphicsRunningProcesses", "MPSComputeRunningProcesses", "MarginTemperature", "NvlinkBwMode", "NvlinkSupportedBwModes",
    "NvLinkInfo", "PlatformInfo", "Attributes", "Capabilities", "CurrentClockFreqs", "PerformanceModes", "GpuInstanceId",
    "MaxMigDeviceCount", "C2cModeInfoV",
]  # fmt: skip
# What a server samples while it runs: played again under load.
LIVE = [
    "MemoryInfo", "UtilizationRates", "PerformanceState", "PowerUsage", "EnforcedPowerLimit", "CurrentClocksEventReasons",
    "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "ComputeRunningProcesses", "TotalEnergyConsumption", "PcieReplayCounter",
]  # fmt: skip
CLOCKS = {"graphics": 0, "sm": 1, "memory": 2, "video": 3}
LINKS = 18
WAIT_FOR_EVENTS_MS = 200


def plain(value: Any) -> Any:
    """A value of pynvml as JSON: a struct becomes {"fields": {...}}, bytes text, an array a list."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no word for it
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, ctypes.Array):
        return plain(value.value) if hasattr(value, "value") else [plain(item) for item in value]
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        fields = [entry[0] for kind in reversed(type(value).__mro__) for entry in kind.__dict__.get("_fields_", [])]
        return {"fields": {name: plain(getattr(value, name)) for name in fields}}
    if isinstance(value, ctypes._SimpleCData):
        return plain(value.value)
    if hasattr(value, "__dict__"):
        return {"fields": {name: plain(part) for name, part in vars(value).items()}}
    return repr(value)


class Recorder:
    """Calls functions of pynvml and writes each call and its answer, or the error, into `calls`."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self.nvml, self.handles, self.calls = nvml, handles, []  # type: ignore[var-annotated]

    def call(self, function: str, *args: Any, gpu: int | None = None, peer: int | None = None) -> Any:
        """Calls `function` with the handle of `gpu` (and of `peer`) before `args`; None where it failed."""
        names = [{"gpu": index} for index in (gpu, peer) if index is not None]
        handles = [self.handles[index] for index in (gpu, peer) if index is not None]
        entry: dict[str, Any] = {"function": function, "args": [*names, *plain(list(args))]}
        self.calls.append(entry)
        try:
            answer = getattr(self.nvml, function)(*handles, *args)
        except Exception as error:
            entry["error"], entry["code"] = f"{type(error).__name__}: {error}", getattr(error, "value", None)
            return None
        entry["answer"] = plain(answer)
        return answer

    def special(self, function: str, args: list[Any], act: Any) -> None:
        """Records what `act()` returns as the answer of `function`: for functions that need a struct to write into."""
        entry: dict[str, Any] = {"function": function, "args": args}
        self.calls.append(entry)
        try:
            entry["answer"] = plain(act())
        except Exception as error:
            entry["error"], entry["code"] = f"{type(error).__name__}: {error}", getattr(error, "value", None)


def field_names(nvml: Any) -> list[tuple[str, int]]:
    """Every field of nvmlDeviceGetFieldValues, without thresholds of the power smoothing, which say nothing of health."""
    skipped = ("POWER_SMOOTHING", "PWR_SMOOTHING", "RESET_STATUS")
    names = [name for name in dir(nvml) if name.startswith("NVML_FI_DEV_") and not any(part in name for part in skipped)]
    return sorted({(name, getattr(nvml, name)) for name in names}, key=lambda entry: entry[1])


def of_the_machine(record: Recorder) -> None:
    nvml = record.nvml
    for function in (
        "DriverVersion",
        "NVMLVersion",
        "CudaDriverVersion",
        "DriverBranch",
        "ConfComputeState",
        "ConfComputeCapabilities",
        "NvlinkBwMode",
    ):
        record.call(f"nvmlSystemGet{function}")
    record.call("nvmlDeviceGetCount")
    record.call("nvmlGetExcludedDeviceCount")
    for a in range(len(record.handles)):
        for b in range(len(record.handles)):
            if a == b:
                continue
            record.call("nvmlDeviceGetTopologyCommonAncestor", gpu=a, peer=b)
            for kind in ("READ", "WRITE", "NVLINK", "ATOMICS", "PCI", "PROP"):
                index = getattr(nvml, f"NVML_P2P_CAPS_INDEX_{kind}", None)
                if isinstance(index, tuple):
                    index = index[0]  # pynvml 13 writes READ as (0,)
                if index is not None:
                    record.call("nvmlDeviceGetP2PStatus", index, gpu=a, peer=b)


def of_each_gpu(record: Recorder) -> None:
    nvml = record.nvml
    for gpu in range(len(record.handles)):
        for name in OF_A_GPU:
            if hasattr(nvml, f"nvmlDeviceGet{name}"):
                record.call(f"nvmlDeviceGet{name}", gpu=gpu)
        record.call("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU, gpu=gpu)
        for threshold in range(getattr(nvml, "NVML_TEMPERATURE_THRESHOLD_COUNT", 8)):
            record.call("nvmlDeviceGetTemperatureThreshold", threshold, gpu=gpu)
        for kind in CLOCKS.values():
            record.call("nvmlDeviceGetClockInfo", kind, gpu=gpu)
            record.call("nvmlDeviceGetMaxClockInfo", kind, gpu=gpu)
            record.call("nvmlDeviceGetApplicationsClock", kind, gpu=gpu)
            record.call("nvmlDeviceGetDefaultApplicationsClock", kind, gpu=gpu)
        for counter in range(2):  # corrected, uncorrected
            for since in range(2):  # since the driver loaded, since the board was made
                record.call("nvmlDeviceGetTotalEccErrors", counter, since, gpu=gpu)
        for policy in range(6):
            record.call("nvmlDeviceGetViolationStatus", policy, gpu=gpu)
        words = -(-(os.cpu_count() or 1) // 64)
        record.call("nvmlDeviceGetCpuAffinity", words, gpu=gpu)
        record.call("nvmlDeviceGetMemoryAffinity", 1, 0, gpu=gpu)
        for kind in range(2):
            record.call("nvmlDeviceGetPcieThroughput", kind, gpu=gpu)
        for source in range(3):  # page retirements
            record.call("nvmlDeviceGetRetiredPages", source, gpu=gpu)
        for level in range(10, 60, 10):
            record.call("nvmlDeviceGetTopologyNearestGpus", level, gpu=gpu)
        fabric(record, gpu)
        events(record, gpu)


def fabric(record: Recorder, gpu: int) -> None:
    """State of the NVSwitch fabric. Newer bindings take a struct to write into."""
    nvml = record.nvml

    def read(version: str) -> Any:
        info = getattr(nvml, f"c_nvmlGpuFabricInfo_{version}_t")()
        size_version = getattr(nvml, f"nvmlGpuFabricInfo_{version}", None)
        if size_version is not None:
            info.version = size_version
        nvml.nvmlDeviceGetGpuFabricInfoV(record.handles[gpu], ctypes.byref(info))
        return info

    record.call("nvmlDeviceGetGpuFabricInfo", gpu=gpu) if not hasattr(nvml, "c_nvmlGpuFabricInfo_t") else record.special(
        "nvmlDeviceGetGpuFabricInfo", [{"gpu": gpu}], lambda: _filled(nvml, record.handles[gpu])
    )
    for version in ("v2", "v3"):
        if hasattr(nvml, f"c_nvmlGpuFabricInfo_{version}_t"):
            record.special("nvmlDeviceGetGpuFabricInfoV", [{"gpu": gpu}, version], lambda version=version: read(version))


def _filled(nvml: Any, handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return info


def events(record: Recorder, gpu: int) -> None:
    """Whether Xid and ECC events can be waited for here."""
    nvml = record.nvml

    def wait() -> Any:
        kinds = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(record.handles[gpu], kinds, events)
            return nvml.nvmlEventSetWait_v2(events, WAIT_FOR_EVENTS_MS)
        finally:
            nvml.nvmlEventSetFree(events)

    record.special("nvmlEventSetWait_v2", [{"gpu": gpu}, "xid, double bit ECC"], wait)


def of_each_link(record: Recorder) -> None:
    for gpu in range(len(record.handles)):
        for link in range(LINKS):
            if record.call("nvmlDeviceGetNvLinkState", link, gpu=gpu) is None and link >= 2:
                break  # a GPU without NVLink refuses every link
            for function in ("Version", "RemotePciInfo", "RemoteDeviceType"):
                record.call(f"nvmlDeviceGetNvLink{function}", link, gpu=gpu)
            for capability in range(6):
                record.call("nvmlDeviceGetNvLinkCapability", link, capability, gpu=gpu)
            for counter in range(5):
                record.call("nvmlDeviceGetNvLinkErrorCounter", link, counter, gpu=gpu)


def fields(record: Recorder, entries: list[tuple[str, int]], scopes: dict[str, list[int]]) -> None:
    """Field values, one call a field, so that one unknown field spoils no other. `scopes`: name -> links beside scope 0."""
    for gpu in range(len(record.handles)):
        for name, field in entries:
            for scope in [0, *scopes.get(name, [])]:
                record.call("nvmlDeviceGetFieldValues", [(field, scope)], gpu=gpu)


# Fields whose scope is a link, or all links (UINT_MAX).
ALL_LINKS = 0xFFFFFFFF
LINK_FIELDS = [
    "GET_STATE", "GET_SPEED", "GET_VERSION", "COUNT_XMIT_BYTES", "COUNT_RCV_BYTES", "COUNT_RCV_ERRORS", "COUNT_SYMBOL_ERRORS",
    "COUNT_LINK_RECOVERY_EVENTS", "COUNT_LINK_RECOVERY_FAILED_EVENTS", "ERROR_DL_REPLAY", "ERROR_DL_RECOVERY", "ERROR_DL_CRC",
]  # fmt: skip


def link_scopes() -> dict[str, list[int]]:
    per_link = {f"NVML_FI_DEV_NVLINK_THROUGHPUT_{kind}_{way}": [ALL_LINKS] for kind in ("DATA", "RAW") for way in ("TX", "RX")}
    for name in LINK_FIELDS:
        per_link[f"NVML_FI_DEV_NVLINK_{name}"] = [ALL_LINKS, *range(1, LINKS)]
    return per_link


def counters(nvml: Any) -> list[tuple[str, int]]:
    """The fields that change while a server runs."""
    parts = (
        "NVLINK_THROUGHPUT",
        "CLOCKS_EVENT_REASON",
        "PERF_POLICY",
        "PCIE_",
        "POWER_",
        "ENERGY",
        "MEMORY_TEMP",
        "NVLINK_COUNT_XMIT_BYTES",
        "NVLINK_COUNT_RCV_BYTES",
    )
    return [entry for entry in field_names(nvml) if any(part in entry[0] for part in parts)]


def gpm(nvml: Any, handle: Any, seconds: float) -> dict[str, Any]:
    """Values of GPU performance monitoring over `seconds`, by metric name."""
    support = nvml.nvmlGpmQueryDeviceSupport(handle)
    out: dict[str, Any] = {"supported": plain(getattr(support, "isSupportedDevice", support))}
    if not out["supported"]:
        return out
    names = [
        name
        for name in dir(nvml)
        if name.startswith("NVML_GPM_METRIC_") and "C2C" not in name and "NVENC" not in name and name != "NVML_GPM_METRIC_MAX"
    ]
    first, second = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
    try:
        nvml.nvmlGpmSampleGet(handle, first)
        time.sleep(seconds)
        nvml.nvmlGpmSampleGet(handle, second)
        for start in range(0, len(names), 50):
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version, request.sample1, request.sample2 = nvml.NVML_GPM_METRICS_GET_VERSION, first, second
            chunk = names[start : start + 50]
            request.numMetrics = len(chunk)
            for place, name in enumerate(chunk):
                request.metrics[place].metricId = getattr(nvml, name)
            nvml.nvmlGpmMetricsGet(request)
            for place, name in enumerate(chunk):
                metric = request.metrics[place]
                out[name] = metric.value if metric.nvmlReturn == 0 else {"code": metric.nvmlReturn}
    finally:
        nvml.nvmlGpmSampleFree(first)
        nvml.nvmlGpmSampleFree(second)
    return out


def attempt(act: Any) -> Any:
    try:
        return act()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "code": getattr(error, "value", None)}


CUDA_ATTRIBUTES = {
    "multicast_supported": 132, "fabric_handles": 128, "posix_handles": 103, "virtual_memory": 102, "sms": 16, "unified": 41,
    "gpu_direct_rdma": 116, "managed": 83, "host_numa_id": 134, "clock_khz": 13, "memory_clock_khz": 36, "l2_bytes": 38,
}  # fmt: skip


def cuda_attributes() -> dict[str, Any]:
    """Attributes of each device by the driver's API, read only: cuInit and cuDeviceGetAttribute make no context."""
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuInit(0)
    if code:
        return {"cuInit": code}
    count, value, out = ctypes.c_int(), ctypes.c_int(), {"cuInit": 0}
    driver.cuDeviceGetCount(ctypes.byref(count))
    for device in range(count.value):
        entry: dict[str, Any] = {}
        for name, attribute in CUDA_ATTRIBUTES.items():
            code = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            entry[name] = value.value if code == 0 else {"code": code}
        for peer in range(count.value):
            if peer != device:
                code = driver.cuDeviceCanAccessPeer(ctypes.byref(value), device, peer)
                entry[f"can_access_{peer}"] = value.value if code == 0 else {"code": code}
                for name, attribute in {"performance_rank": 1, "access": 2, "native_atomics": 3}.items():
                    code = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, device, peer)
                    entry[f"{name}_{peer}"] = value.value if code == 0 else {"code": code}
        out[f"gpu{device}"] = entry  # type: ignore[assignment]
    return out


COMMANDS = [
    "nvidia-smi", "nvidia-smi topo -m", "nvidia-smi topo -p2p n", "nvidia-smi topo -p2p r", "nvidia-smi nvlink --status",
    "nvidia-smi nvlink -e", "nvidia-smi -q", "nvidia-smi dmon -s u -c 1", "nvidia-smi dmon -s m -c 1", "lspci -nn",
    "ibstat", "ibv_devinfo", "ip -brief address", "ip route", "ulimit -a", "lscpu", "df -h", "mount", "dmesg", "uname -a",
    "systemctl is-active nvidia-fabricmanager", "systemctl is-active nvidia-persistenced",
    "ps -eo pid,rss,comm --sort=-rss",
]  # fmt: skip
FILES = [
    "/proc/driver/nvidia/version", "/proc/driver/nvidia/params", "/proc/self/cgroup", "/proc/self/limits", "/proc/meminfo",
    "/proc/cmdline", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/pids.max",
    "/proc/sys/kernel/yama/ptrace_scope", "/proc/sys/net/core/somaxconn", "/etc/os-release", "/.dockerenv",
    "/sys/class/dmi/id/product_name", "/proc/sys/net/ipv4/ip_local_port_range",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource", "/etc/hosts",
]  # fmt: skip


PATTERNS = [
    "/sys/bus/pci/devices/*/numa_node", "/sys/bus/pci/devices/*/class", "/sys/bus/pci/devices/*/vendor",
    "/sys/bus/pci/devices/*/current_link_speed", "/sys/bus/pci/devices/*/current_link_width",
    "/sys/bus/pci/devices/*/max_link_speed",
    "/sys/class/infiniband/*/ports/*/rate", "/sys/class/infiniband/*/ports/*/state", "/sys/class/net/*/operstate",
    "/sys/class/net/*/speed", "/sys/devices/system/node/node*/cpulist",
]  # fmt: skip


def host() -> dict[str, Any]:
    out: dict[str, Any] = {"commands": {}, "files": {}, "sysfs": {}}
    for command in COMMANDS:
        if command.split()[0] not in ("ulimit",) and shutil.which(command.split()[0]) is None:
            continue
        ran = attempt(
            lambda command=command: subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=20, check=False)
        )
        out["commands"][command] = (
            ran if isinstance(ran, dict) else {"status": ran.returncode, "out": (ran.stdout + ran.stderr)[-40_000:]}
        )
    for name in FILES:
        out["files"][name] = attempt(lambda name=name: Path(name).read_text(errors="replace")[:20_000])
    for pattern in PATTERNS:
        for name in sorted(glob.glob(pattern)):
            out["sysfs"][name] = attempt(lambda name=name: Path(name).read_text().strip())
    out["devices"] = sorted(glob.glob("/dev/nvidia*") + glob.glob("/dev/infiniband/*") + glob.glob("/dev/nvidia-caps*/*"))
    out["limits"] = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in ("nofile", "memlock", "nproc", "stack")
    }
    out["shm"] = attempt(lambda: dict(zip(("total", "used", "free"), shutil.disk_usage("/dev/shm"), strict=True)))
    out["hostname"] = {"name": socket.gethostname(), "address": attempt(lambda: socket.gethostbyname(socket.gethostname()))}
    return out


def load(nvml: Any, handles: list[Any], seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs GEMMs in bf16 on every GPU, then copies between each pair, while NVML is sampled: what ran, and the phase."""
    import torch

    if not torch.cuda.is_available():
        return {"error": "torch sees no GPU"}, []
    out: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gemm": [], "copies": []}
    record = Recorder(nvml, handles)
    gpus = range(min(torch.cuda.device_count(), len(handles)))
    stop = threading.Event()

    def multiply(gpu: int) -> None:
        a = torch.randn(8192, 8192, device=f"cuda:{gpu}", dtype=torch.bfloat16)
        while not stop.is_set():
            for _ in range(20):
                a @ a
            torch.cuda.synchronize(gpu)

    threads = [threading.Thread(target=multiply, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        time.sleep(1.0)
        row: dict[str, Any] = {"at_s": round(time.monotonic() - started, 2)}
        for gpu in gpus:
            handle = handles[gpu]
            row[f"gpu{gpu}"] = {
                "power_mw": attempt(lambda handle=handle: nvml.nvmlDeviceGetPowerUsage(handle)),
                "sm_mhz": attempt(lambda handle=handle: nvml.nvmlDeviceGetClockInfo(handle, 1)),
                "reasons": attempt(lambda handle=handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
                "temperature": attempt(lambda handle=handle: nvml.nvmlDeviceGetTemperature(handle, 0)),
                "utilization": attempt(lambda handle=handle: plain(nvml.nvmlDeviceGetUtilizationRates(handle))),
            }
        out["gemm"].append(row)
    for gpu in gpus:
        for name in LIVE:
            record.call(f"nvmlDeviceGet{name}", gpu=gpu)
        record.call("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU, gpu=gpu)
        for kind in CLOCKS.values():
            record.call("nvmlDeviceGetClockInfo", kind, gpu=gpu)
    out["gpm_gemm"] = {f"gpu{gpu}": attempt(lambda gpu=gpu: gpm(nvml, handles[gpu], 0.5)) for gpu in gpus}
    stop.set()
    for thread in threads:
        thread.join()
    for a in gpus:
        for b in gpus:
            if a != b:
                out["copies"].append(copy(torch, nvml, handles, a, b))
    fields(record, counters(nvml), link_scopes())
    return out, record.calls


def throughput(nvml: Any, handle: Any) -> dict[str, Any]:
    """NVLink counters of a GPU over all links, in the counters' own units, and per-link scope 0 where all links are refused."""
    out: dict[str, Any] = {}
    for name in ("NVLINK_THROUGHPUT_DATA_TX", "NVLINK_THROUGHPUT_DATA_RX", "NVLINK_THROUGHPUT_RAW_TX", "NVLINK_THROUGHPUT_RAW_RX"):
        for scope in (ALL_LINKS, 0):
            out[f"{name}@{scope}"] = attempt(
                lambda name=name, scope=scope: plain(
                    nvml.nvmlDeviceGetFieldValues(handle, [(getattr(nvml, f"NVML_FI_DEV_{name}"), scope)])[0]
                )
            )
    return out


KEPT_GPM = ("NVLINK_TOTAL", "PCIE", "error")


def copy(torch: Any, nvml: Any, handles: list[Any], a: int, b: int) -> dict[str, Any]:
    """Copies 256 MiB from GPU a to GPU b 40 times, checks the bytes, and reads the NVLink counters before and after."""
    size, times = 256 * 2**20, 40
    source = torch.arange(size // 4, device=f"cuda:{a}", dtype=torch.int32)
    target = torch.zeros(size // 4, device=f"cuda:{b}", dtype=torch.int32)
    target.copy_(source)
    torch.cuda.synchronize(a), torch.cuda.synchronize(b)
    before = {gpu: throughput(nvml, handles[gpu]) for gpu in (a, b)}
    sample: dict[str, Any] = {}
    sampler = threading.Thread(target=lambda: sample.update(attempt(lambda: gpm(nvml, handles[a], 0.05))))
    sampler.start()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(a):
        start.record()
        for _ in range(times):
            target.copy_(source)
        end.record()
    torch.cuda.synchronize(a), torch.cuda.synchronize(b)
    sampler.join()
    elapsed_ms = start.elapsed_time(end)
    time.sleep(0.3)
    after = {gpu: throughput(nvml, handles[gpu]) for gpu in (a, b)}
    return {
        "from": a, "to": b, "bytes": size * times, "ms": elapsed_ms, "gbytes_per_s": size * times / elapsed_ms / 1e6,
        "equal": bool(torch.equal(source.cpu(), target.cpu())), "peer_access": torch.cuda.can_device_access_peer(a, b),
        "before": before, "after": after,
        "gpm": {name: value for name, value in sample.items() if any(part in name for part in KEPT_GPM)},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--load_seconds", type=float, default=10.0, help="how long the GEMMs run")
    args = parser.parse_args()
    started = time.monotonic()
    answer: dict[str, Any] = {
        "format": FORMAT,
        "python": sys.version,
        "platform": platform.platform(),
        "host": host(),
        "phases": {},
    }

    def save() -> None:
        answer["seconds"] = round(time.monotonic() - started, 1)
        args.out.write_text(json.dumps(answer, indent=1) + "\n")

    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception as error:
        answer["nvml"] = f"{type(error).__name__}: {error}"
        save()
        print(f"NVML cannot be reached: {answer['nvml']}; wrote what the host answers to {args.out}")
        return 1
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    prefixes = ("NVML_P2P_", "NVML_TOPOLOGY_", "NVML_GPU_FABRIC_", "NVML_FEATURE_", "nvmlClocksEventReason")
    names = [name for name in dir(nvml) if name.startswith(prefixes)]
    answer["constants"] = {name: getattr(nvml, name) for name in names if isinstance(getattr(nvml, name), int)}
    answer["fields"] = dict(field_names(nvml))
    answer["cuda"] = attempt(cuda_attributes)
    idle = Recorder(nvml, handles)
    of_the_machine(idle)
    of_each_gpu(idle)
    of_each_link(idle)
    fields(idle, field_names(nvml), link_scopes())
    answer["phases"]["idle"] = idle.calls
    answer["gpm_idle"] = {f"gpu{gpu}": attempt(lambda gpu=gpu: gpm(nvml, handles[gpu], 0.2)) for gpu in range(len(handles))}
    save()
    loaded = attempt(lambda: load(nvml, handles, args.load_seconds))
    if isinstance(loaded, tuple):
        answer["load"], answer["phases"]["loaded"] = loaded
    else:
        answer["load"] = loaded
    after = Recorder(nvml, handles)
    for gpu in range(len(handles)):
        for name in LIVE:
            after.call(f"nvmlDeviceGet{name}", gpu=gpu)
    fields(after, counters(nvml), link_scopes())
    answer["phases"]["after"] = after.calls
    answer["multicast"] = "the attribute was read; no multicast object was created"
    save()
    refused = sum("error" in call for phase in answer["phases"].values() for call in phase)
    total = sum(len(phase) for phase in answer["phases"].values())
    print(
        f"{len(handles)} GPUs, {total} calls of NVML, {refused} refused, {answer['seconds']} s: "
        f"wrote {args.out} ({args.out.stat().st_size} bytes)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
