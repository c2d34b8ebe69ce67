# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from phalanx import hardware
from phalanx.errors import OptionError
from phalanx.hardware import probe
from phalanx.hardware.cgroup import GroupLimits, Limit
from phalanx.hardware.nvml import Ailment, Gpu, Listed
from phalanx.hardware.probe import address_towards, cores, detect_machine, usable_machine
from tests.conftest import gpu_count

GPUS = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 90, 140 << 30, 139 << 30) for index in range(3))


def test_a_driver_that_fails_is_recorded_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", broken)
    machine = detect_machine()
    assert machine.gpus == ()
    assert "gpus" in machine.failures
    assert machine.host_memory >= machine.free_host_memory > 0
    assert machine.cores >= 1
    with pytest.raises(OptionError, match=r"cannot be reached; .*; restart the host: the driver was upgraded.*device='cpu'"):
        usable_machine()
    assert usable_machine("cpu").gpus == ()


def test_seven_gpus_and_the_eighth_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ailing = {3: Ailment("GPU 3 cannot be used: GPU is lost", "restart the host")}
    monkeypatch.setattr(probe, "list_gpus", lambda: Listed(GPUS, ailing))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = usable_machine()
    assert machine.gpus == GPUS
    assert machine.unusable == "GPU 3 cannot be used: GPU is lost; restart the host"
    assert machine.unusable in caplog.text
    monkeypatch.setattr(probe, "list_gpus", lambda: Listed((), ailing))
    with pytest.raises(OptionError, match="no GPU of this host can be used; GPU 3 cannot be used"):
        usable_machine()


def test_the_environment_hides_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "list_gpus", lambda: Listed(GPUS))
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
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    assert cores(tmp_path) == 1
    (group / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == len(os.sched_getaffinity(0))


def test_loopback_is_reached_from_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_probing_needs_no_torch() -> None:
    code = "import sys, phalanx.hardware as h; h.detect_machine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert hardware.detect_machine is detect_machine


def test_what_a_container_holds_is_not_free(monkeypatch):
    limits = GroupLimits(Limit(32000, Path("/sys/fs/cgroup"), True), 5000, None, None)
    monkeypatch.setattr(probe, "read_limits", lambda *_: limits)
    machine = probe.detect_machine()
    assert (machine.host_memory, machine.free_host_memory) == (32000, 5000)


def test_free_cores(monkeypatch):
    monkeypatch.setattr(probe, "cores", lambda: 4)
    monkeypatch.setattr(probe.psutil, "cpu_count", lambda: 8)
    for percent, free in ((0, 4), (25, 4), (75, 2), (100, 1)):
        monkeypatch.setattr(probe.psutil, "cpu_percent", lambda seconds, percent=percent: percent)
        assert probe.free_cores() == free
