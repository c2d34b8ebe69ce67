# SPDX-License-Identifier: Apache-2.0
"""A GPU's gauges by a recording of NVML's calls: units, and what is refused is left out and not asked for again."""

from __future__ import annotations

from phalanx.hardware.gauges import GpuSampler
from tests.support.health_nvml import RecordedNvml, field_value, machine, struct

UUID = "GPU-00000001-0000-0000-0000-000000000000"


def test_units():
    nvml = (
        machine(2)
        .change("nvmlDeviceGetUtilizationRates", struct(gpu=87, memory=40), gpu=1)
        .change("nvmlDeviceGetPowerUsage", 671_250, gpu=1)
    )
    nvml.change("nvmlDeviceGetClockInfo", 1395, gpu=1).change("nvmlDeviceGetCurrentClocksEventReasons", 0x4, gpu=1)
    nvml.change("nvmlDeviceGetFieldValues", field_value(2_000_000), [[138, 0xFFFFFFFF]], gpu=1)
    gauges = GpuSampler(UUID, nvml).read()
    assert gauges == {
        "gpu_utilization_perc": 87.0,
        "power_watts": 671.25,
        "power_limit_watts": 700.0,
        "temperature_celsius": 34.0,
        "sm_clock_mhz": 1395.0,
        "nvlink_tx_bytes": 2_048_000_000.0,
        "nvlink_rx_bytes": 1_024_000_000.0,
        "clock_reason/power_cap": 1.0,
        "clock_reason/thermal": 0.0,
        "clock_reason/hardware_thermal": 0.0,
        "clock_reason/power_brake": 0.0,
    }
    assert GpuSampler(UUID.removeprefix("GPU-"), nvml).read() == gauges


def test_what_is_refused_is_left_out_and_not_asked_again():
    nvml = machine(2).refuse("nvmlDeviceGetFieldValues").refuse("nvmlDeviceGetPowerUsage")
    sampler = GpuSampler(UUID, nvml)
    assert not {"nvlink_tx_bytes", "power_watts"} & sampler.read().keys()
    assert sampler.refused.keys() == {"nvlink tx", "nvlink rx", "power"}
    nvml.change("nvmlDeviceGetPowerUsage", 1)
    assert "power_watts" not in sampler.read()


def test_field_that_is_refused_by_its_value():
    nvml = machine(2).change("nvmlDeviceGetFieldValues", [struct(nvmlReturn=3, valueType=0, value=struct(ullVal=0, uiVal=0))])
    assert "nvlink_tx_bytes" not in GpuSampler(UUID, nvml).read()


def test_without_nvml():
    sampler = GpuSampler(UUID, RecordedNvml([]).fail(12, "NVML Shared Library Not Found"))
    assert sampler.read() == {}
    assert "Not Found" in sampler.failure
    assert GpuSampler("GPU-none", machine(1)).read() == {}
