# SPDX-License-Identifier: Apache-2.0
"""NVML as `scripts/nvml_probe.py` recorded it, played back: the same functions, answers and refusals, and changes for one test."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ALL_LINKS = 0xFFFFFFFF
NOT_SUPPORTED = 3


class NVMLError(Exception):
    """As pynvml raises it: `value` is the code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.value = code


class Handle:
    """A GPU's handle."""

    def __init__(self, index: int) -> None:
        self.index = index


class RecordedNvml:
    """Plays one phase of a recording. A call that was not recorded is refused as NVML refuses what it does not support."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._answers = {_key(call["function"], call["args"]): call for call in copy.deepcopy(calls)}

    @classmethod
    def of_file(cls, path: Path, phase: str = "idle") -> RecordedNvml:
        return cls(json.loads(path.read_text(encoding="utf-8"))["phases"][phase])

    def change(self, function: str, answer: Any, *args: Any, gpu: int | None = None) -> RecordedNvml:
        """Another answer to a call; without `args` to every call of the function with this GPU."""
        for call in self._answers.values():
            if call["function"] != function or (gpu is not None and call["args"][:1] != [{"gpu": gpu}]):
                continue
            if args and call["args"][-len(args) :] != list(args):
                continue
            call.pop("error", None)
            call["answer"] = answer
        if args or not any(call["function"] == function for call in self._answers.values()):
            named = [] if gpu is None else [{"gpu": gpu}]
            entry = {"function": function, "args": [*named, *args], "answer": answer}
            self._answers[_key(function, entry["args"])] = entry
        return self

    def refuse(self, function: str) -> RecordedNvml:
        """The function is not supported here."""
        for call in self._answers.values():
            if call["function"] == function:
                call.pop("answer", None)
                call["error"], call["code"] = "NVMLError_NotSupported: Not Supported", NOT_SUPPORTED
        return self

    def nvmlInit(self) -> None:
        failure = self._answers.get(_key("nvmlInit", []))
        if failure is not None and "error" in failure:
            raise NVMLError(failure["code"], failure["error"])

    def fail(self, code: int, text: str) -> RecordedNvml:
        """NVML itself cannot be reached."""
        self._answers[_key("nvmlInit", [])] = {"function": "nvmlInit", "args": [], "error": text, "code": code}
        return self

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        return Handle(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        for index in range(self.nvmlDeviceGetCount()):
            if self.nvmlDeviceGetUUID(Handle(index)) == uuid:
                return Handle(index)
        raise NVMLError(6, "Not Found")

    nvmlGpuFabricInfo_v2 = 2

    def c_nvmlGpuFabricInfo_v2_t(self) -> SimpleNamespace:
        return SimpleNamespace()

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Handle, info: SimpleNamespace) -> int:
        vars(info).update(vars(self._call("nvmlDeviceGetGpuFabricInfoV", [{"gpu": handle.index}, "v2"])))
        return 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *args: self._call(name, [_plain(arg) for arg in args])

    def _call(self, function: str, args: list[Any]) -> Any:
        call = self._answers.get(_key(function, args))
        if call is None and function == "nvmlDeviceGetCpuAffinity":  # recorded with as many words as that machine has cores for
            call = next(
                (each for each in self._answers.values() if each["function"] == function and each["args"][0] == args[0]), None
            )
        if call is None or "error" in call:
            code = NOT_SUPPORTED if call is None else call["code"]
            raise NVMLError(code or NOT_SUPPORTED, "Not Supported" if call is None else call["error"])
        return _rebuilt(call["answer"])


def _plain(arg: Any) -> Any:
    if isinstance(arg, Handle):
        return {"gpu": arg.index}
    return [_plain(item) for item in arg] if isinstance(arg, (list, tuple)) else arg


def _key(function: str, args: list[Any]) -> str:
    return json.dumps([function, args])


def _rebuilt(answer: Any) -> Any:
    if isinstance(answer, dict) and "fields" in answer:
        return SimpleNamespace(**{name: _rebuilt(value) for name, value in answer["fields"].items()})
    return [_rebuilt(item) for item in answer] if isinstance(answer, list) else answer


def struct(**fields: Any) -> dict[str, Any]:
    """A struct as recordings write it."""
    return {"fields": fields}


def field_value(value: int) -> list[dict[str, Any]]:
    """An answer of nvmlDeviceGetFieldValues."""
    return [struct(nvmlReturn=0, valueType=3, value=struct(ullVal=value, uiVal=value & 0xFFFFFFFF))]


def machine(
    count: int = 2,
    *,
    name: str = "NVIDIA H200",
    memory: int = 150_754_820_096,
    links: int = 18,
    nvlink: bool = True,
    watts: int = 700,
    switch: bool = True,
) -> RecordedNvml:
    """A healthy machine of `count` equal GPUs under NVSwitch (switch) or with bridges, as a recording of it would be."""
    calls: list[dict[str, Any]] = []

    def add(function: str, answer: Any, *args: Any) -> None:
        calls.append({"function": function, "args": list(args), "answer": answer})

    add("nvmlDeviceGetCount", count)
    add("nvmlSystemGetDriverVersion", "570.124.06")
    add("nvmlSystemGetCudaDriverVersion", 13010)
    for gpu in range(count):
        at = {"gpu": gpu}
        simple = {
            "Name": name,
            "UUID": f"GPU-0000000{gpu}-0000-0000-0000-000000000000",
            "CudaComputeCapability": [9, 0],
            "PciInfo": struct(busId=f"00000000:{gpu + 1:02X}:00.0"),
            "MemoryInfo": struct(total=memory, free=memory - (600 << 20), used=600 << 20),
            "UtilizationRates": struct(gpu=0, memory=0),
            "PowerUsage": 75_000,
            "EnforcedPowerLimit": watts * 1000,
            "PowerManagementDefaultLimit": watts * 1000,
            "CurrentClocksEventReasons": 1,
            "CurrPcieLinkGeneration": 5,
            "CurrPcieLinkWidth": 16,
            "MaxPcieLinkGeneration": 5,
            "MaxPcieLinkWidth": 16,
            "RemappedRows": [0, 0, 0, 0],
            "MigMode": [0, 0],
            "PersistenceMode": 1,
            "ComputeMode": 0,
            "ComputeRunningProcesses": [],
            "NumaNodeId": 0,
        }
        for function, answer in simple.items():
            add(f"nvmlDeviceGet{function}", answer, at)
        add("nvmlDeviceGetTemperature", 34, at, 0)
        add("nvmlDeviceGetTemperatureThreshold", 87, at, 1)
        add("nvmlDeviceGetClockInfo", 1980, at, 1)
        add("nvmlDeviceGetMaxClockInfo", 1980, at, 1)
        add("nvmlDeviceGetApplicationsClock", 1980, at, 1)
        add("nvmlDeviceGetDefaultApplicationsClock", 1980, at, 1)
        add("nvmlDeviceGetTotalEccErrors", 0, at, 1, 0)
        add("nvmlDeviceGetCpuAffinity", [(1 << 64) - 1], at, 1)
        add("nvmlDeviceGetGpuFabricInfoV", struct(state=3 if switch else 0, status=0), at, "v2")
        add("nvmlDeviceGetFieldValues", field_value(26_562), at, [[90, 0]])
        add("nvmlDeviceGetFieldValues", field_value(1_000_000), at, [[138, ALL_LINKS]])
        add("nvmlDeviceGetFieldValues", field_value(1_000_000), at, [[139, ALL_LINKS]])
        for link in range(18 if nvlink else 0):
            up = link < links
            add("nvmlDeviceGetNvLinkState", int(up), at, link)
            if up:
                add("nvmlDeviceGetNvLinkVersion", 6, at, link)
                add("nvmlDeviceGetNvLinkRemoteDeviceType", 2 if switch else 0, at, link)
                add("nvmlDeviceGetNvLinkRemotePciInfo", struct(busId="00000000:00:00.0"), at, link)
                for counter in range(4):
                    add("nvmlDeviceGetNvLinkErrorCounter", 0, at, link, counter)
        for peer in range(count):
            if peer != gpu:
                other = {"gpu": peer}
                add("nvmlDeviceGetTopologyCommonAncestor", 50, at, other)
                for kind in range(4):
                    add("nvmlDeviceGetP2PStatus", 0 if kind != 2 or nvlink else 5, at, other, kind)
    return RecordedNvml(calls)


def failing(function: str, code: int, gpu: int = 3, count: int = 8) -> RecordedNvml:
    """One GPU of eight answers a function with an error."""
    host = machine(count)
    inner = getattr(host, function)

    def answer(*args):
        if args[0] == gpu or getattr(args[0], "index", None) == gpu:
            raise NVMLError(code, f"code {code}")
        return inner(*args)

    setattr(host, function, answer)
    return host


def memory(total, used=1):
    return struct(total=total, used=used, free=total - used)


def holding(count, pid, size, gpu=1):
    return machine(count).change("nvmlDeviceGetComputeRunningProcesses", [struct(pid=pid, usedGpuMemory=size)], gpu=gpu)


def changed(count, function, answer, *args, **where):
    return machine(count).change(f"nvmlDeviceGet{function}", answer, *args, **where)


def refusing(*functions):
    nvml = machine(2)
    for function in functions:
        nvml.refuse(f"nvmlDeviceGet{function}")
    return nvml
