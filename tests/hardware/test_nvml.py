# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a host of which one ails, and the codes of NVML in their tables."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from phalanx.hardware import probe
from phalanx.hardware.nvml import ABSENT, CURES, OTHERS, UNANSWERED, Listed, list_gpus
from tests.support.health_nvml import NVMLError, RecordedNvml, failing, machine


def test_every_code_stands_in_one_table():
    codes = {getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_ERROR_")}
    tables = [set(ABSENT), set(UNANSWERED), set(CURES), set(OTHERS)]
    assert codes - set().union(*tables) == set()
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize(
    ("function", "code", "cure"),
    [
        ("nvmlDeviceGetMemoryInfo", 15, "it has fallen off the bus"),
        ("nvmlDeviceGetHandleByIndex", 15, "it has fallen off the bus"),
        ("nvmlDeviceGetMemoryInfo", 999, "look for its Xid in `dmesg`"),
        ("nvmlDeviceGetName", 16, "nvidia-smi --gpu-reset"),
        ("nvmlDeviceGetHandleByIndex", 4, "access to its device file"),
        ("nvmlDeviceGetUUID", 8, "connect its power cables"),
        ("nvmlDeviceGetCudaComputeCapability", 17, "look into `nvidia-smi`"),
        ("nvmlDeviceGetHandleByIndex", 4711, "look into `nvidia-smi`"),
    ],
)
def test_one_gpu_of_eight_ails(function, code, cure):
    listed = list_gpus(failing(function, code))
    assert [gpu.index for gpu in listed.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert listed.failure == ""
    assert list(listed.ailing) == [3]
    assert listed.ailing[3].what.startswith("GPU 3 ")
    assert f"NVMLError: code {code}" in listed.ailing[3].what
    assert cure in listed.ailing[3].cure
    if function == "nvmlDeviceGetMemoryInfo":
        assert "GPU-00000003-0000-0000-0000-000000000000, NVIDIA H200" in listed.ailing[3].what


@pytest.mark.parametrize("code", [3, 13, 6])
def test_a_gpu_without_memory_of_its_own_is_sound(code):
    listed = list_gpus(failing("nvmlDeviceGetMemoryInfo", code, gpu=0, count=1))
    assert listed.ailing == {}
    assert listed.gpus[0].total_memory >= listed.gpus[0].free_memory > 1 << 20


@pytest.mark.parametrize(
    ("code", "device_file", "on_the_bus", "absent"),
    [
        (12, False, False, True), (12, False, True, True), (12, True, True, False), (9, False, False, True),
        (9, False, True, False), (18, False, False, False), (999, False, False, False), (4, False, False, False),
    ],
)  # fmt: skip
def test_no_gpu_and_a_failure_are_told_apart(tmp_path, code, device_file, on_the_bus, absent):
    (tmp_path / "dev").mkdir()
    if device_file:
        (tmp_path / "dev/nvidia0").touch()
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n" if on_the_bus else "0x060400\n")
    listed = list_gpus(RecordedNvml([]).fail(code, "no"), tmp_path)
    assert (listed.failure == "") == absent
    choice = probe.choose_gpus(listed, None)
    assert (choice.refusal is None) == absent
    assert choice.gpus == ()


def test_a_failure_of_the_count():
    host = machine(2)
    host.nvmlDeviceGetCount = lambda: (_ for _ in ()).throw(NVMLError(999, "Unknown Error"))
    listed = list_gpus(host)
    assert listed == Listed(failure="NVMLError: Unknown Error; look for its Xid in `dmesg`, and reset it: nvidia-smi --gpu-reset")


class InMigMode(RecordedNvml):
    """GPU 1 of two is in MIG mode, and has instances in places 0 and 2."""

    instances = ("MIG-aaaa", "MIG-bbbb")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, place):
        if place not in (0, 2) or place // 2 >= len(self.instances):
            raise NVMLError(6, "Not Found")
        return self.instances[place // 2]

    def nvmlDeviceGetUUID(self, handle):
        return handle if isinstance(handle, str) else self._call("nvmlDeviceGetUUID", [{"gpu": handle.index}])

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200 MIG 1g.18gb" if isinstance(handle, str) else self._call("nvmlDeviceGetName", [{"gpu": handle.index}])

    def nvmlDeviceGetMemoryInfo(self, handle):
        if isinstance(handle, str):
            return SimpleNamespace(total=18 << 30, free=17 << 30, used=1 << 30)
        return self._call("nvmlDeviceGetMemoryInfo", [{"gpu": handle.index}])


def in_mig_mode(*instances: str) -> InMigMode:
    host = InMigMode(list(machine(2).change("nvmlDeviceGetMigMode", [1, 1], gpu=1)._answers.values()))
    host.instances = instances
    return host


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-00000000-0000-0000-0000-000000000000", "MIG-aaaa"]),
        ("MIG-bbbb", ["MIG-bbbb"]), ("MIG-a", ["MIG-aaaa"]), ("1", ["MIG-aaaa"]), ("GPU-00000001", ["MIG-aaaa"]),
        ("MIG-bbbb,MIG-aaaa", ["MIG-bbbb", "MIG-aaaa"]),
    ],
)  # fmt: skip
def test_instances_of_mig(visible, uuids):
    choice = probe.choose_gpus(list_gpus(in_mig_mode("MIG-aaaa", "MIG-bbbb")), visible)
    assert [gpu.uuid for gpu in choice.gpus] == uuids
    assert all(gpu.total_memory == 18 << 30 for gpu in choice.gpus if gpu.uuid.startswith("MIG"))


def test_a_gpu_in_mig_mode_whose_memory_is_not_told():
    """A container that has an instance may not ask for the memory of the whole."""
    host = in_mig_mode("MIG-aaaa")
    inner = host.nvmlDeviceGetMemoryInfo

    def answer(handle):
        if getattr(handle, "index", None) == 1:
            raise NVMLError(4, "Insufficient Permissions")
        return inner(handle)

    host.nvmlDeviceGetMemoryInfo = answer
    listed = list_gpus(host)
    assert listed.ailing == {}
    assert probe.choose_gpus(listed, "1").gpus[0].total_memory == 18 << 30


def test_a_gpu_in_mig_mode_without_instances():
    listed = list_gpus(in_mig_mode())
    choice = probe.choose_gpus(listed, None)
    assert [gpu.index for gpu in choice.gpus] == [0]
    assert choice.unusable == "GPU 1 is in MIG mode and has no instance"
    refusal = probe.choose_gpus(listed, "1").refusal
    assert "CUDA_VISIBLE_DEVICES=1 names GPU 1, which is in MIG mode and has no instance" in str(refusal)
