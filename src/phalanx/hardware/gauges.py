# SPDX-License-Identifier: Apache-2.0
"""What one GPU is doing at this moment, by NVML: for a rank's sign of life, once a second. No torch here, and no CUDA context.

A function that NVML refuses once is not called again; its gauge is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

ALL_LINKS = 0xFFFFFFFF
"""The scope of an NVML field that counts over all NVLinks of a GPU."""
_TX_KIB, _RX_KIB = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, in KiB since the driver was loaded
_SM_CLOCK = 1
CLOCK_REASONS = {0x4: "power_cap", 0x20: "thermal", 0x40: "hardware_thermal", 0x80: "power_brake"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons for which a GPU that computes may run below its highest clock."""


class GpuSampler:
    """Reads one GPU, by its UUID with or without "GPU-". failure: why NVML cannot be reached, "" where it can."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.failure = ""
        self.refused: dict[str, str] = {}
        self._handle: Any = None
        try:
            self._nvml: Any = importlib.import_module("pynvml") if nvml is None else nvml
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def read(self) -> dict[str, float]:
        """Gauges by name: gpu_utilization_perc (0 to 100), power_watts, power_limit_watts, temperature_celsius, sm_clock_mhz,
        nvlink_tx_bytes and nvlink_rx_bytes (counters), clock_reason/<reason> (0 or 1). {} where NVML cannot be reached."""
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        gauges = {
            "gpu_utilization_perc": self._value("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "power_watts": self._value("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "power_limit_watts": self._value("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            "temperature_celsius": self._value("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, 0)),
            "sm_clock_mhz": self._value("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK)),
            "nvlink_tx_bytes": self._value("nvlink tx", lambda: self._counter(_TX_KIB)),
            "nvlink_rx_bytes": self._value("nvlink rx", lambda: self._counter(_RX_KIB)),
        }
        reasons = self._value("reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if reasons is not None:
            gauges |= {f"clock_reason/{name}": float(bool(int(reasons) & bit)) for bit, name in CLOCK_REASONS.items()}
        return {name: float(value) for name, value in gauges.items() if value is not None}

    def _counter(self, field: int) -> float:
        """Bytes over all NVLinks. Raises RuntimeError where the field is not supported."""
        value = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, ALL_LINKS)])[0]
        if value.nvmlReturn != 0:
            raise RuntimeError(f"field {field} is refused with {value.nvmlReturn}")
        return float(value.value.ullVal * 1024)

    def _value(self, name: str, read: Callable[[], float]) -> float | None:
        if name in self.refused:
            return None
        try:
            return read()
        except Exception as error:
            self.refused[name] = f"{type(error).__name__}: {error}"
            return None
