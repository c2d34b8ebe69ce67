# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.errors import OptionError
from phalanx.hardware import probe
from phalanx.hardware.nvml import Ailment, Gpu, Listed
from phalanx.hardware.visible import choose, is_unknown


def gpu(index: int, uuid: str, name: str = "NVIDIA H200", instances: tuple[Gpu, ...] | None = None) -> Gpu:
    return Gpu(index, uuid, name, 90, 140 << 30, 139 << 30, instances)


GPUS = [gpu(0, "GPU-aa11"), gpu(1, "GPU-ab22"), gpu(2, "GPU-cc33")]
AILING = {3: Ailment("GPU 3 (GPU-ee55, NVIDIA H200) cannot be used: GPU is lost", "restart the host")}


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]), ("", []), ("-1", []), ("NoDevFiles", []), ("0", [0]), ("2,0", [2, 0]), ("GPU-ab", [1]),
        ("1, GPU-cc33", [1, 2]), ("0,-1,1", [0]), ("0,", [0]), ("00", [0]),
    ],
)  # fmt: skip
def test_honoured(visible: str | None, indices: list[int]) -> None:
    assert [each.index for each in choose(GPUS, visible)] == indices


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        ("9", "names '9', which is no GPU of this host"), ("0,9,1", "names '9'"), ("all", "names 'all'"), ("none", "names 'none'"),
        ("GPU-dd44", "names 'GPU-dd44', which is no GPU"), ("MIG-aaaa", "names 'MIG-aaaa', which is no GPU"),
        ("MIG-GPU-aa11/1/0", "names 'MIG-GPU-aa11/1/0'"), ("GPU-a", "names 'GPU-a', which is more than one GPU"),
        ("aa11", "names 'aa11'"), ("1,1", "names 1 twice"), ("0,GPU-aa11", "names GPU-aa11 twice"), ("0;1", "names '0;1'"),
        ("3", "names GPU 3; GPU 3 (GPU-ee55, NVIDIA H200) cannot be used: GPU is lost; restart the host"), ("+1", "names '+1'"),
        ("0 1", "names '0 1'"), ("GPU-ee", "names GPU-ee; GPU 3 (GPU-ee55, NVIDIA H200) cannot be used: GPU is lost"),
    ],
)  # fmt: skip
def test_refused(visible: str, words: str) -> None:
    """What CUDA reads past: programs would run on the CPU."""
    with pytest.raises(OptionError, match="CUDA_VISIBLE_DEVICES=") as error:
        choose(GPUS, visible, ailing=AILING)
    assert words in str(error.value)
    refusal = probe.choose_gpus(Listed(tuple(GPUS), AILING), visible).refusal
    assert str(refusal) == str(error.value)


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("CUDA_VISIBLE_DEVICE", True), ("CUDA_VISIBLE_GPUS", True), ("cuda_visible_devices", True), ("CUDA_DEVICES", True),
        ("CUDA_DEVICE", True), ("CUDA_VISIBLE_DEVICES", False),
        ("CUDA_DEVICE_ORDER", False), ("CUDA_DEVICE_MAX_CONNECTIONS", False),
        ("CUDA_HOME", False), ("NVIDIA_VISIBLE_DEVICES", False),
    ],
)  # fmt: skip
def test_a_variable_in_no_table_is_one_warning(name: str, unknown: bool, monkeypatch, caplog) -> None:
    assert is_unknown(name) == unknown
    monkeypatch.setenv(name, "GPU-none")
    monkeypatch.setattr(probe, "list_gpus", Listed)
    probe._warn.cache_clear()
    for _ in range(2):
        probe.usable_machine()
    assert caplog.messages == [f"{name} is no variable of CUDA and has no effect: CUDA_VISIBLE_DEVICES chooses GPUs"] * unknown


@pytest.mark.gpu1
def test_the_uuids_of_nvml_are_those_of_cuda() -> None:
    """On real GPUs: device i of a process with these UUIDs is the i-th GPU of NVML."""
    gpus = probe.detect_machine().gpus
    code = "import torch; print(*(torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())))"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in reversed(gpus))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert [f"GPU-{uuid}" for uuid in done.stdout.split()] == [gpu.uuid for gpu in reversed(gpus)]


MIXED = [gpu(0, "GPU-aa11", "NVIDIA T4"), gpu(1, "GPU-ab22")]


@pytest.mark.parametrize(
    ("gpus", "visible", "order", "refused"),
    [
        (MIXED, "1", None, False), (MIXED, "1", "PCI_BUS_ID", False), (MIXED, "1", "FASTEST_FIRST", True), (MIXED, "1", "", False),
        (MIXED, "GPU-ab22", "FASTEST_FIRST", False), (MIXED, None, "FASTEST_FIRST", False), (GPUS, "1", "FASTEST_FIRST", False),
        (GPUS, None, "BY_NAME", True), (GPUS, "0", "pci_bus_id", True),
    ],
)  # fmt: skip
def test_the_order_of_cuda(gpus: list[Gpu], visible: str | None, order: str | None, refused: bool) -> None:
    refusal = probe.choose_gpus(Listed(tuple(gpus)), visible, order).refusal
    assert (refusal is not None) == refused
    if refused:
        assert "CUDA_DEVICE_ORDER=" in str(refusal)
    elif visible == "1":
        assert probe.choose_gpus(Listed(tuple(gpus)), visible, order).gpus == (gpus[1],)


@pytest.mark.parametrize(
    ("listed", "visible", "unusable", "refused"),
    [
        (Listed(), None, "this host has no GPU", False),
        (Listed(), "0", "this host has no GPU, and CUDA_VISIBLE_DEVICES=0 names some", False),
        (Listed(tuple(GPUS), AILING), "", "CUDA_VISIBLE_DEVICES='' hides the 4 GPUs of this host", False),
        (Listed(tuple(GPUS), AILING), None, "GPU 3 (GPU-ee55, NVIDIA H200) cannot be used: GPU is lost; restart the host", False),
        (Listed((), AILING), None, "GPU 3 (GPU-ee55, NVIDIA H200) cannot be used: GPU is lost; restart the host", True),
        (Listed(failure="NVMLError: Unknown Error"), None, "NVMLError: Unknown Error", True),
        (Listed(failure="NVMLError: Unknown Error"), "-1", "CUDA_VISIBLE_DEVICES='-1' hides the GPUs of this host", False),
        (Listed((gpu(0, "GPU-aa11", instances=()),)), None, "GPU 0 is in MIG mode and has no instance", True),
    ],
)  # fmt: skip
def test_why_there_is_no_gpu(listed: Listed, visible: str | None, unusable: str, refused: bool) -> None:
    choice = probe.choose_gpus(listed, visible)
    assert (choice.unusable, choice.refusal is not None) == (unusable, refused)
    assert not choice.gpus or len(choice.gpus) == len(listed.gpus)
