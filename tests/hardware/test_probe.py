# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from phalanx import hardware
from phalanx.hardware import probe
from phalanx.hardware.probe import Gpu, address_towards, choose, cores, detect_machine
from tests.conftest import gpu_count


def gpu(index: int, uuid: str) -> Gpu:
    return Gpu(index, uuid, "NVIDIA H200", 90, 140 << 30, 139 << 30)


GPUS = [gpu(0, "GPU-aa11"), gpu(1, "GPU-ab22"), gpu(2, "GPU-cc33")]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]), ("", []), ("-1", []), ("0", [0]), ("2,0", [2, 0]), ("GPU-ab", [1]), ("GPU-a", []),
        ("1, GPU-cc33", [1, 2]), ("0,-1,1", [0]), ("0,9,1", [0]), ("1,1", []), ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, indices: list[int]) -> None:
    assert [g.index for g in choose(GPUS, visible)] == indices


def test_a_driver_that_fails_is_recorded_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", broken)
    machine = detect_machine()
    assert machine.gpus == ()
    assert "gpus" in machine.failures
    assert machine.host_memory >= machine.free_host_memory > 0
    assert machine.cores >= 1


def test_the_environment_hides_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.hardware.probe._nvml_gpus", lambda: list(GPUS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [g.index for g in detect_machine().gpus] == [1]
    assert [g.index for g in detect_machine(visible="0,2").gpus] == [0, 2]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(detect_machine().gpus) == 3


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("", 0), ("-1", 0), ("7", 0), ("GPU-b", 1), ("1,0", 2)])
def test_gpu_tests_count_as_cuda_does(visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-a1)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-b2)'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


def test_a_containers_quota_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == cores(tmp_path / "none")


def test_loopback_is_reached_from_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_probing_needs_no_torch() -> None:
    code = "import sys, phalanx.hardware as h; h.detect_machine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert hardware.detect_machine is detect_machine


def test_what_a_container_holds_is_not_free(tmp_path, monkeypatch):
    assert probe.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert probe.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("32000\n")
    (tmp_path / "memory.current").write_text("31000\n")
    (tmp_path / "memory.stat").write_text("anon 20000\ninactive_file 4000\nactive_file 7000\n")
    assert probe.memory_limit(tmp_path) == (32000, 5000)
    (tmp_path / "memory.current").write_text("39000\n")
    assert probe.memory_limit(tmp_path) == (32000, 0)
    monkeypatch.setattr(probe, "memory_limit", lambda: (32000, 5000))
    machine = probe.detect_machine()
    assert (machine.host_memory, machine.free_host_memory) == (32000, 5000)


def test_free_cores(monkeypatch):
    monkeypatch.setattr(probe, "cores", lambda: 4)
    monkeypatch.setattr(probe.psutil, "cpu_count", lambda: 8)
    for percent, free in ((0, 4), (25, 4), (75, 2), (100, 1)):
        monkeypatch.setattr(probe.psutil, "cpu_percent", lambda seconds, percent=percent: percent)
        assert probe.free_cores() == free
