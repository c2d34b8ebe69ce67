# SPDX-License-Identifier: Apache-2.0
"""Checks as a table: what NVML answers and the options and variables are in, level and words of the first finding out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.health_nvml import RecordedNvml, changed, failing, holding, machine, memory, refusing, struct
from tests.support.health_subject import findings, no_gpu, subject

US = os.getpid()
DEMO = {"model": "demo"}
TP2 = {"model": "demo", "tensor_parallel_size": 2}
PCIE = {"nvlink": False, "name": "NVIDIA L40S", "switch": False}
TWO_HOSTS = {"model": "demo", "nnodes": 2, "tensor_parallel_size": 2}


def env(**variables):
    return {"environment": variables}


MISMATCH = "NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch."
CASES = [
    # check, NVML, options, level of the first finding, how its summary begins or what it contains
    ("driver", machine(2), {}, "ok", "driver 570.124.06, 2 GPUs"),
    ("driver", no_gpu(), {}, "ok", "no GPU on this host, and none is asked for"),
    ("driver", RecordedNvml([]).fail(18, MISMATCH), {}, "error", "the driver's kernel module and its library differ in version"),
    ("driver", no_gpu(), {"model": "demo", "device": "cuda"}, "error", "device='cuda', and this host has no GPU"),
    ("driver", RecordedNvml([]).fail(999, "Unknown Error"), {}, "error", "NVML cannot be reached: NVMLError: Unknown Error"),
    ("gpu_answers", machine(2), {}, "ok", ""),
    ("gpu_answers", failing("nvmlDeviceGetMemoryInfo", 15), TP2, "error", "NVIDIA H200) cannot be used: NVMLError: code 15"),
    ("gpu_answers", failing("nvmlDeviceGetMemoryInfo", 999, 0, 1), DEMO, "error", "GPU 0 ("),
    ("gpu_answers", failing("nvmlDeviceGetMemoryInfo", 3, 0, 1), DEMO, "ok", ""),  # a GB10 shares the host's memory
    ("gpu_count", failing("nvmlDeviceGetHandleByIndex", 15), {**TP2, "tensor_parallel_size": 8}, "error", "7 GPUs are visible"),
    *(
        ("visible_devices", machine(2), {"environment": {"CUDA_VISIBLE_DEVICES": value}, **options}, level, words)
        for value, options, level, words in (
            ("0,1", {}, "ok", "CUDA_VISIBLE_DEVICES=0,1 leaves 2 GPUs"),
            ("7", {}, "error", "CUDA_VISIBLE_DEVICES=7 names '7', which is no GPU of this host"),
            ("MIG-1", TP2, "error", "CUDA_VISIBLE_DEVICES=MIG-1 names 'MIG-1'"),
            ("all", TP2, "error", "CUDA_VISIBLE_DEVICES=all names 'all'"),
            ("", TP2, "note", "CUDA_VISIBLE_DEVICES='' hides the 2 GPUs of this host"),
            ("", {"model": "demo", "device": "cpu"}, "ok", ""),
        )
    ),
    ("visible_devices", machine(2), {}, "ok", "neither is set"),
    ("visible_devices", failing("nvmlDeviceGetName", 15), env(CUDA_VISIBLE_DEVICES=""), "note", "hides the 8 GPUs of this host"),
    ("visible_devices", failing("nvmlDeviceGetName", 15), env(CUDA_VISIBLE_DEVICES="3"), "error", "names GPU 3; GPU 3 ("),
    ("visible_devices", machine(2), env(CUDA_DEVICE_ORDER="x"), "error", "CUDA_DEVICE_ORDER=x is no order"),
    ("visible_devices", machine(2), env(CUDA_VISIBLE_DEVICE="0"), "warning", "CUDA_VISIBLE_DEVICE is no"),
    ("device_order", changed(2, "Name", "NVIDIA T4", gpu=1), {}, "note", "the GPUs differ (NVIDIA H200, NVIDIA T4)"),
    ("device_order", changed(2, "Name", "NVIDIA T4", gpu=1), env(CUDA_DEVICE_ORDER="PCI_BUS_ID"), "ok", ""),
    ("device_order", machine(2), {}, "ok", ""),
    ("gpu_known", machine(2), {}, "ok", ""),
    ("gpu_known", machine(1, name="NVIDIA GeForce RTX 4090 Laptop GPU"), {}, "note", "RTX 4090 Laptop GPU is not in the catalogue"),
    ("gpu_count", machine(2), {**TP2, "tensor_parallel_size": 4}, "error", "2 GPUs are visible, and 4 ranks need one each"),
    (
        "gpu_count", machine(2), {**TP2, "environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "error",
        "CUDA_VISIBLE_DEVICES=0 leaves 1 of 2 GPUs, and 2 ranks need one each",
    ),
    ("gpu_count", machine(2), TP2, "ok", ""),
    ("gpu_count", machine(2), DEMO, "note", "1 of 2 GPUs are used by this layout; the others stay idle"),
    ("gpu_count", no_gpu(), TP2, "ok", ""),
    ("gpu_count", machine(2), {**TP2, "launcher": "ray"}, "skipped", ""),
    ("gpu_memory_taken", holding(2, US, 90 << 30), TP2, "error", f"(pid {US}) has 90.0 GiB of 140.4 GiB"),
    ("gpu_memory_taken", holding(2, US, 90 << 30), DEMO, "ok", ""),  # rank 0 takes GPU 0
    ("gpu_memory_taken", holding(2, 2**22 - 1, 5 << 30), {}, "error", "a process outside this container"),
    (
        "gpu_memory_taken", changed(1, "MemoryInfo", memory(80 << 30, 30 << 30)), {}, "warning",
        "30.0 GiB of 80.0 GiB are in use, by processes that are not visible here",
    ),
    ("gpu_memory_taken", holding(1, US, 600 << 20, 0), {}, "ok", ""),
    ("gpu_mixed", machine(2), {}, "ok", "2 x NVIDIA H200"),
    ("gpu_mixed", changed(2, "Name", "NVIDIA H100 80GB HBM3", gpu=1), {}, "warning", ""),
    (
        "gpu_mixed", changed(2, "MemoryInfo", memory(140 << 30), gpu=1).change("nvmlDeviceGetMemoryInfo", memory(120 << 30), gpu=0),
        {}, "warning", "GPUs of one kind differ in memory",
    ),
    ("gpu_mixed", changed(2, "MaxClockInfo", 1755, gpu=1), {}, "warning", "GPUs of one kind differ in their highest clock"),
    ("mig", changed(2, "MigMode", [1, 1], gpu=1), TP2, "error", ""),
    ("mig", changed(1, "MigMode", [1, 1]), DEMO, "note", ""),
    ("mig", machine(2), {}, "ok", ""),
    ("mig", refusing("MigMode"), {}, "ok", ""),
    ("persistence", changed(2, "PersistenceMode", 0), {}, "note", ""),
    ("persistence", machine(2), {}, "ok", ""),
    (
        "power_limit", changed(2, "EnforcedPowerLimit", 500_000), {}, "warning",
        "GPU 0 may draw 500 W, and its default is 700 W: long prompts get slower",
    ),
    (
        "power_limit", refusing("PowerManagementDefaultLimit").change("nvmlDeviceGetEnforcedPowerLimit", 600_000, gpu=1), {},
        "warning", "GPUs of one kind have different power limits: GPU 0 700 W, GPU 1 600 W",
    ),
    ("power_limit", changed(2, "CurrentClocksEventReasons", 0x4), {}, "ok", ""),  # a power cap that always binds is no alarm
    ("power_limit", refusing("EnforcedPowerLimit"), {}, "ok", ""),
    *(
        ("thermal", changed(1, "CurrentClocksEventReasons", reasons), {}, level, "")
        for reasons, level in ((0x1, "ok"), (0x4, "ok"), (0x20, "warning"), (0x40, "warning"), (0x80, "warning"), (0x48, "warning"))
    ),
    ("thermal", changed(2, "Temperature", 88, gpu=1), {}, "warning", "GPU 1 is slowed down by heat: 88 degrees, 1980 of 1980 MHz"),
    ("clocks", changed(1, "ApplicationsClock", 1200), {}, "warning", ""),
    ("clocks", machine(1), {}, "ok", ""),
    ("clocks", refusing("ApplicationsClock"), {}, "ok", ""),
    ("ecc", machine(2), {}, "ok", ""),
    ("ecc", changed(2, "TotalEccErrors", 3, gpu=1), {}, "error", "GPU 1: 3 uncorrected"),
    ("ecc", changed(1, "RemappedRows", [0, 1, 1, 0]), {}, "error", "waits to be remapped"),
    ("ecc", changed(1, "RemappedRows", [0, 1, 0, 1]), {}, "error", "remapping a row of its memory failed"),
    ("nvlink_links", machine(2), {}, "ok", "18 NVLinks are active on every GPU"),
    (
        "nvlink_links", machine(2, name="NVIDIA H100 NVL", links=12, switch=False), {}, "ok",
        "12 of 18 NVLinks are active on every GPU, as a board with bridges has them",
    ),
    (
        "nvlink_links", changed(2, "NvLinkState", 0, 17, gpu=1), {}, "error",
        "GPU 1 has 17 active NVLinks, and GPU 0 has 18: link 17 is down",
    ),
    ("nvlink_links", machine(2, nvlink=False), {}, "ok", ""),
    ("nvlink_links", machine(2, links=0), {}, "ok", ""),  # a guest may show links as inactive that work
    ("nvlink_links", machine(2, links=0).change("nvmlDeviceGetP2PStatus", 3), {}, "error", "every NVLink is down"),
    ("nvlink_errors", machine(2), {}, "ok", ""),
    ("nvlink_errors", changed(2, "NvLinkErrorCounter", 12, 3, 0, gpu=0), {}, "ok", ""),  # few replays
    (
        "nvlink_errors", changed(2, "NvLinkErrorCounter", 2, 3, 1, gpu=1), {}, "warning",
        "NVLink 3 of GPU 1 counts 2 recovery errors",
    ),
    ("pcie_link", machine(2), {}, "ok", ""),
    ("pcie_link", changed(2, "CurrPcieLinkWidth", 4, gpu=1), {}, "warning", "GPU 1 runs on 4 of 16 PCIe lanes"),
    ("pcie_link", changed(1, "CurrPcieLinkGeneration", 1), {}, "ok", ""),  # an idle link is slowed down to save power
    (
        "pcie_link", changed(1, "CurrPcieLinkGeneration", 1).change("nvmlDeviceGetUtilizationRates", struct(gpu=95, memory=40)), {},
        "warning", "GPU 0 runs at PCIe 1 of 5 under load",
    ),
    ("peer_class", machine(2), TP2, "ok", "all 1 pairs have NVLink"),
    (
        "peer_class", machine(2, **PCIE), TP2, "warning",
        "GPU 0 and GPU 1 are joined over PCIe (SYS), and TP 2 sums tensors over them twice a layer",
    ),
    ("peer_class", machine(2, **PCIE), {"model": "demo", "pipeline_parallel_size": 2}, "note", ""),
    (
        "peer_class", machine(2, nvlink=False).change("nvmlDeviceGetP2PStatus", 1), {}, "note",
        "have no peer access (chipset not supported)",
    ),
    ("numa", machine(1), {}, "ok", ""),
    (
        "numa", changed(1, "CpuAffinity", [0, 0b1111], gpu=0), {}, "warning", "is attached to the NUMA node of cores 64-67",
    ),
    ("compute_mode", machine(1), {}, "ok", ""),
    ("compute_mode", changed(1, "ComputeMode", 2), {}, "error", ""),
    ("compute_mode", changed(1, "ComputeMode", 3), {}, "note", ""),
    ("compute_mode", holding(1, 77, 1 << 20, 0).change("nvmlDeviceGetComputeMode", 3), {}, "error", ""),
    ("memory_budget", machine(2), {"model": "llama-3-70b", "tensor_parallel_size": 2}, "ok", ""),
    ("memory_budget", machine(2), {"model": "llama-3-70b", "dtype": "fp8"}, "ok", ""),
    ("layout", machine(4), {"model": "llama-3-70b", "tensor_parallel_size": 4}, "ok", ""),
    (
        "layout", machine(1, name="NVIDIA A100-SXM4-80GB").change("nvmlDeviceGetCudaComputeCapability", [8, 0]),
        {"model": "llama-3-8b", "dtype": "fp8"}, "note", "",
    ),
    ("layout", machine(1), {"model": "llama-3-8b", "max_seq_len": 10**6}, "error", ""),
    ("network_interface", None, {**DEMO, **env(GLOO_SOCKET_IFNAME="nosuch0")}, "error", "names nosuch0, and this host"),
    ("network_interface", None, {**DEMO, **env(NCCL_SOCKET_IFNAME="nosuch")}, "error", "names nosuch, and this host"),
    ("network_interface", None, {**DEMO, **env(GLOO_SOCKET_IFNAME="^lo")}, "error", "=^lo is no interface"),
    ("network_interface", None, {**TWO_HOSTS, **env(GLOO_SOCKET_IFNAME="lo")}, "error", "which other hosts do not reach"),
    ("network_interface", None, {**DEMO, **env(GLOO_SOCKET_IFNAME="lo")}, "ok", ""),  # one host needs no more
    ("network_interface", None, {**TWO_HOSTS, **env(NCCL_SOCKET_IFNAME="^lo,docker")}, "ok", ""),
    ("master_address", None, {**TWO_HOSTS, "launcher": "ray"}, "skipped", ""),
    ("master_address", None, TWO_HOSTS, "error", "is this host's loopback"),
    ("master_address", None, {**TWO_HOSTS, "master_addr": "no-such-name.invalid"}, "error", "does not resolve"),
    ("master_address", None, {**TWO_HOSTS, "master_addr": "192.0.2.222"}, "warning", ""),
    ("variables", None, {}, "ok", ""),
    ("variables", None, env(NCCL_ALGO="Ring"), "note", ""),
    ("variables", None, env(NCCL_IB_DISABLE="1"), "ok", ""),  # no second host
    ("proxy", None, env(http_proxy="http://p:3128", no_proxy="localhost,.corp"), "note", ""),
    ("proxy", None, env(http_proxy="http://p:3128", no_proxy="localhost, 127.0.0.1"), "ok", ""),
    ("proxy", None, {}, "ok", ""),
    ("timeouts", None, DEMO, "ok", ""),
    ("timeouts", None, {"model": "demo", "stall_timeout": 400}, "warning", "stall_timeout=400 is not below step_timeout=300"),
    ("timeouts", None, {"model": "llama-3-70b"}, "note", ""),  # 141 GB from a network disk outlast start_timeout
    ("model_files", None, {"model": "some/model", "environment": {"HF_HUB_OFFLINE": "1"}}, "error", "HF_HUB_OFFLINE forbids"),
    ("model_files", None, {"model": "some/model"}, "note", ""),
    ("task_limit", None, DEMO, "ok", ""),
    ("library_versions", None, {}, "ok", ""),
    ("ray_cluster", None, {}, "skipped", ""),
    ("locked_memory", None, {"root": Path("/none")}, "skipped", ""),
    ("service_variables", None, {}, "ok", ""),
    ("home_folder", None, {}, "ok", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "nvml", "options", "level", "words"), CASES, ids=[f"{row[0]}-{row[3]}" for row in CASES])
def test_check(name, nvml, options, level, words):
    finding = findings(name, subject(nvml=nvml, **options))[0]
    assert finding.level == level, finding.summary
    assert words in finding.summary
    assert level not in ("warning", "error") or finding.cure
