# SPDX-License-Identifier: Apache-2.0
"""Records what NVML answers to `phalanx doctor` on this machine, as JSON: `PYTHONPATH=src python scripts/nvml_probe.py OUT.json`.

Needs pynvml (`nvidia-ml-py`). Where torch has several GPUs, 10 GiB are copied between each pair, with the source's NVLink counter
before and after. Only functions that read are called: no setting of a GPU is changed, and no counter is reset.

A phase of the file is a list of calls: {"function", "args", "answer"} or {"function", "args", "error", "code"}. A GPU's handle is
written {"gpu": index}, a struct {"fields": {...}}. `tests/support/health_nvml.py` plays a phase back.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.hardware.gauges import ALL_LINKS
from phalanx.health import devices
from phalanx.health.checks.nvlink import cuda_status

COPY_BYTES, COPIES = 256 << 20, 40
TX_KIB = 138
"""A field of NVML: KiB that a GPU has sent over its NVLinks."""


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
    return {"fields": {name: plain(part) for name, part in vars(value).items()}} if hasattr(value, "__dict__") else repr(value)


class Recorder:
    """Stands for the module pynvml, and writes each call of a function that reads into `calls`, with its answer or the error."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: list[tuple[Any, int]] = []
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        return partial(self._call, name, value) if name.startswith(("nvmlDeviceGet", "nvmlSystemGet")) else value

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        self._handles.append((handle, index))
        return handle

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> Any:
        """Fills a struct, whose version stands for it among the arguments."""
        struct = getattr(info, "_obj", info)
        return self._call("nvmlDeviceGetGpuFabricInfoV", lambda *_: self._nvml.nvmlDeviceGetGpuFabricInfoV(handle, info), handle,
                          "v2", answer=lambda _: struct)  # fmt: skip

    def _call(self, name: str, function: Any, *args: Any, answer: Any = lambda returned: returned) -> Any:
        call: dict[str, Any] = {"function": name, "args": [self._named(arg) for arg in args]}
        self.calls.append(call)
        try:
            returned = function(*args)
        except Exception as error:
            call["error"], call["code"] = f"{type(error).__name__}: {error}", getattr(error, "value", None)
            raise
        call["answer"] = plain(answer(returned))
        return returned

    def _named(self, arg: Any) -> Any:
        return next(({"gpu": index} for handle, index in self._handles if handle is arg), None) or plain(arg)


def copies(nvml: Any) -> list[dict[str, Any]]:
    """Of each pair of GPUs that torch has: what was copied, how fast, and the source's counter of KiB sent."""
    try:
        import torch
    except ImportError:
        return []
    count, rows = torch.cuda.device_count() if torch.cuda.is_available() else 0, []

    def sent(gpu: int) -> int:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
        return int(nvml.nvmlDeviceGetFieldValues(handle, [(TX_KIB, ALL_LINKS)])[0].value.ullVal)

    for source, target in ((a, b) for a in range(count) for b in range(count) if a != b):
        values = torch.arange(COPY_BYTES // 4, device=f"cuda:{source}", dtype=torch.int32)
        copied = torch.zeros_like(values, device=f"cuda:{target}").copy_(values)
        torch.cuda.synchronize(target)
        before, begin = sent(source), time.monotonic()
        for _ in range(COPIES):
            copied.copy_(values)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        seconds = time.monotonic() - begin
        time.sleep(0.3)  # the counter follows
        rows.append({
            "from": source, "to": target, "bytes": COPY_BYTES * COPIES, "gbytes_per_s": COPY_BYTES * COPIES / seconds / 1e9,
            "equal": torch.equal(values.cpu(), copied.cpu()), "tx_kib": [before, sent(source)],
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    import pynvml

    recorder = Recorder(pynvml)
    machine = devices.read(recorder)
    if machine.failure or not machine.present:
        print(f"NVML cannot be read: {machine.failure or 'this host has no GPU'}")
        return 1
    calls = [call for place, call in enumerate(recorder.calls) if call not in recorder.calls[:place]]
    pynvml.nvmlInit()
    recording = {"format": 1, "cuda": {"cuInit": cuda_status()}, "load": {"copies": copies(pynvml)}, "phases": {"idle": calls}}
    out.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    print(f"{len(machine.gpus)} GPUs, {len(calls)} calls of NVML, {sum('error' in call for call in calls)} refused: wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
