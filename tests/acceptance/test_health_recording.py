# SPDX-License-Identifier: Apache-2.0
"""What NVML answered on two H200 (scripts/nvml_probe.py): read as it is, and no cause for an alarm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.health import devices, topology
from phalanx.health.checks import gpu as gpu_checks
from phalanx.health.checks import limits, nvlink
from phalanx.health.doctor import examine
from phalanx.health.pairs import Measured, Measurements
from tests.support.health_nvml import RecordedNvml
from tests.support.health_subject import subject

FILE = Path(__file__).resolve().parents[1] / "support" / "recordings" / "nvml_h200x2.json"
RECORDING = json.loads(FILE.read_text(encoding="utf-8"))


def test_devices():
    answer = devices.read(RecordedNvml.of_file(FILE))
    assert (answer.failure, answer.driver, answer.cuda, len(answer.gpus)) == ("", "580.159.04", 13000, 2)
    for gpu in answer.gpus:
        assert (gpu.name, gpu.sm, gpu.total, gpu.fabric, gpu.persistence, gpu.mig) == (
            "NVIDIA H200",
            90,
            150754820096,
            "completed",
            True,
            False,
        )
        assert (gpu.pcie_generation, gpu.pcie_width, gpu.power_limit, gpu.power_default) == (5, 16, 700.0, 700.0)
        assert [link.version for link in gpu.active_links] == [4] * 18
        assert gpu.link_mbps is None, "refused on this machine: the rate is that of the generation"
        assert gpu.nvlink_bytes_per_s == 450e9
        assert topology.rate_of(gpu) == 450e9
    assert answer.pair(*answer.gpus).kind == "NV"


def test_nvlink_counters_count_what_is_copied():
    """In KiB of data: the counter of the source rose by the bytes of the copies, within 1 percent."""
    for copied in RECORDING["load"]["copies"]:
        before, after = copied["tx_kib"]
        assert (after - before) * 1024 == pytest.approx(copied["bytes"], rel=0.01)


def test_no_alarm(monkeypatch):
    monkeypatch.setattr(gpu_checks, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(nvlink, "multicast_offered", lambda: True)
    monkeypatch.setattr(limits, "cores", lambda *_: 32)
    monkeypatch.setattr(nvlink, "cuda_status", lambda: RECORDING["cuda"]["cuInit"])
    examined = subject("llama-3-8b", nvml=RecordedNvml.of_file(FILE), tensor_parallel_size=2, port=0, max_seq_len=8192)
    rates = [(copied["from"], copied["to"], copied["gbytes_per_s"] * 1e9) for copied in RECORDING["load"]["copies"]]
    examined.measured = Measurements(tuple(Measured(a, b, rate, 9e-6, True) for a, b, rate in rates))
    report = examine(examined)
    assert report.alarms() == []
    assert not [finding for result in report.results for finding in result.findings if "could not run" in finding.summary]
