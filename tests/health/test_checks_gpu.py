# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs, their links and their memory, provoked by what NVML answers on a machine that has the fault."""

from __future__ import annotations

import os
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from phalanx.health.checks import gpu as gpu_checks
from phalanx.health.checks import nvlink
from phalanx.health.pairs import Measured, Measurements
from phalanx.health.servers import Server
from tests.support.health_host import executable, rdma
from tests.support.health_nvml import changed, holding, machine, memory, struct
from tests.support.health_subject import findings, no_gpu, only, subject


def test_the_commands_of_a_cure():
    """Three in full: others are alike."""
    taken = subject("demo", nvml=holding(2, os.getpid(), 90 << 30), tensor_parallel_size=2)
    assert only("gpu_memory_taken", taken).commands == (f"kill {os.getpid()}",)
    assert [finding.commands for finding in findings("power_limit", subject(nvml=changed(2, "EnforcedPowerLimit", 500_000)))] == [
        (f"nvidia-smi -i {index} -pl 700",) for index in (0, 1)
    ]
    finding = only("layout", subject("llama-3-70b", nvml=machine(4), tensor_parallel_size=3))
    assert finding.level == "error"
    assert "1, 2, 4, 8, 16, 32" in finding.cure


def levels(name, nvml, model=None, **options):
    return [(str(finding.level), finding.summary) for finding in findings(name, subject(model, nvml=nvml, **options))]


def test_driver_without_its_library(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    level, summary = levels("driver", no_gpu(), root=tmp_path)[0]
    assert level == "error"
    assert summary.startswith("1 GPUs are on this host, and NVML cannot be reached")


@pytest.mark.parametrize(
    ("built", "driver", "level", "words"),
    [
        ("12.8", 13010, "ok", "torch is built for CUDA 12.8, and the driver supports 13.1"),
        ("13.0", 12080, "error", "torch is built for CUDA 13.0, and driver 570.124.06 supports CUDA 12.8"),
        ("12.8", 12040, "ok", "torch is built for CUDA 12.8, and the driver supports 12.4"),
        ("", 13010, "error", f"torch {version('torch')} is built without CUDA, and this host has 1 GPU"),
        (None, 13010, "error", "torch is not installed, and this host has 1 GPU"),
    ],
)
def test_driver_cuda(monkeypatch, built, driver, level, words):
    """Within one major version an older driver runs newer libraries (CUDA's minor version compatibility)."""
    monkeypatch.setattr(gpu_checks, "torch_cuda", lambda: built)
    assert levels("driver_cuda", machine(1).change("nvmlSystemGetCudaDriverVersion", driver)) == [(level, words)]


def test_torch_version_file():
    import torch

    assert gpu_checks.torch_cuda() == (torch.version.cuda or "")


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'\n", "12.8"), ("cuda = '13.0'\n", "13.0"), ('cuda: str | None = "12.6"\n', "12.6"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.1'\n", ""), ("__all__ = ['cuda']\ncuda = None\n", ""),
    ],
)  # fmt: skip
def test_torch_version_files(tmp_path, monkeypatch, text, cuda):
    (tmp_path / "version.py").write_text(text)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpu_checks.importlib.util, "find_spec", lambda name: spec)
    assert gpu_checks.torch_cuda() == cuda


@pytest.mark.parametrize(
    ("state", "status", "cuda", "level", "words"),
    [
        (3, 0, 0, "ok", "2 GPUs are registered in the fabric"),
        (0, 0, 0, "ok", "these GPUs need no fabric manager"),
        (2, 0, 802, "error", "the fabric is not up (GPU 0 in progress, GPU 1 in progress), and CUDA fails with error 802"),
        (2, 0, None, "error", "the fabric is not up"),
        (1, 0, 0, "note", "NVML shows the fabric as not started, and CUDA works"),
        (0, 0, 802, "error", "the fabric is not up (NVML does not say its state)"),
        (3, 13, 0, "error", "registration in the fabric failed: GPU 0 status 13, GPU 1 status 13"),
    ],
)
def test_fabric(monkeypatch, state, status, cuda, level, words):
    monkeypatch.setattr(nvlink, "cuda_status", lambda: cuda)
    results = levels("fabric", machine(2).change("nvmlDeviceGetGpuFabricInfoV", struct(state=state, status=status)))
    assert len(results) == 1
    assert results[0][0] == level
    assert results[0][1].startswith(words)


def test_xid(tmp_path):
    """For real as far as it goes: the check reads the output of the program `dmesg`."""

    def log(*lines):
        return executable(tmp_path / "bin", "dmesg", "\n".join(f"echo '{line}'" for line in lines))

    fallen = log("[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "[1.1] usb 1-1: reset")
    finding = only("xid", subject(nvml=machine(1), environment=fallen))
    assert finding.level == "error"
    assert finding.summary == "Xid 79 of 0000:3b:00, 1 times: the GPU has fallen off the bus"
    crashed = log(
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=12, name=python, MMU Fault", "NVRM: Xid (PCI:0000:3b:00): 31, pid=13, name=x"
    )
    assert only("xid", subject(nvml=machine(1), environment=crashed)).level == "note", "a program's own fault"
    assert only("xid", subject(nvml=machine(1), environment=log("all quiet"))).level == "ok"
    refused = executable(tmp_path / "bin", "dmesg", "exit 1")
    assert only("xid", subject(nvml=machine(1), environment=refused)).level == "skipped"


def measured(**changes):
    entries = [Measured(a, b, 393e9, 9e-6, True) for a, b in ((0, 1), (1, 0))]
    entries[1] = Measured(**{**vars(entries[1]), **changes})
    return Measurements(tuple(entries))


def test_peer_write():
    def check(results):
        examined = subject(nvml=machine(2))
        examined.measured = results
        return findings("peer_write", examined)

    assert [finding.level for finding in check(measured())] == ["ok"]
    damaged = check(measured(verified=False, failure="512 of 1000 words differ"))
    assert [finding.level for finding in damaged] == ["error"]
    assert damaged[0].summary == "data copied from GPU 1 to GPU 0 arrives damaged: 512 of 1000 words differ"
    slow = check(measured(bytes_per_s=24e9))
    assert slow[0].level == "warning"
    assert slow[0].summary.startswith("24 GB/s are reached from GPU 1 to GPU 0, and their NVLinks signal 478 GB/s")
    assert check(Measurements((), "no torch"))[0].level == "skipped"
    beside_a_server = subject(nvml=machine(2))
    beside_a_server.servers = (Server("http://h:8000"),)
    assert findings("peer_write", beside_a_server)[0].level == "skipped"
    hung = check(Measurements((), "the copy from device 1 to device 0 did not end: no answer within 70 s", (1, 0)))
    assert hung[0].level == "error"
    assert hung[0].summary.startswith("copying from GPU 1 to GPU 0 hangs")


def test_multicast(monkeypatch):
    for answer, level in ((True, "ok"), (False, "note"), (None, "skipped")):
        monkeypatch.setattr(nvlink, "multicast_offered", lambda answer=answer: answer)
        assert levels("multicast", machine(2))[0][0] == level


def test_no_check_makes_a_multicast_object():
    from pathlib import Path

    from phalanx import health

    for file in Path(health.__file__).parent.rglob("*.py"):
        assert "cuMulticast" not in file.read_text(encoding="utf-8"), file


def test_rdma_ports(tmp_path):
    down = rdma(tmp_path / "a", mlx5_0="DOWN")
    assert levels("rdma_ports", no_gpu(), "demo", **down) == [("error", "no RDMA port is active: port 1 of mlx5_0 is DOWN")]
    part = rdma(tmp_path / "b", mlx5_0="DOWN", mlx5_1="ACTIVE")
    assert levels("rdma_ports", no_gpu(), "demo", **part)[0][0] == "note"
    up = rdma(tmp_path / "c", mlx5_0="ACTIVE")
    assert levels("rdma_ports", no_gpu(), "demo", **up) == [("ok", "mlx5_0 400 Gb/sec (4X NDR)")]
    assert levels("rdma_ports", machine(2), "demo", **up)[0][0] == "note", "without nvidia_peermem"
    (tmp_path / "c/sys/module/nvidia_peermem").mkdir(parents=True)
    assert levels("rdma_ports", machine(2), "demo", **up)[0][0] == "ok"
    assert levels("rdma_ports", no_gpu(), "demo", root=tmp_path, nnodes=2, tensor_parallel_size=2)[0][0] == "note"


# ---- memory and layout -----------------------------------------------------------------------------------------------


def test_memory_budget_kv_tokens_are_those_of_a_real_start():
    """70B in FP8 on one H200 has 400,448 tokens of KV cache, on two 1,196,384 (benchmarks/results/serving, max_batch_size 512)."""
    for tp, tokens in ((1, 400_448), (2, 1_196_384)):
        nvml = machine(2).change("nvmlDeviceGetMemoryInfo", memory(150_754_820_096, 150_754_820_096 - 150_109_880_320))
        examined = subject("llama-3-70b", nvml=nvml, dtype="fp8", tensor_parallel_size=tp, max_batch_size=512, kv_cache_dtype="fp8")
        assert 0.98 * tokens <= only("memory_budget", examined).facts["kv_tokens"] <= tokens


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 2)])
def test_memory_budget_is_the_planners(tp, pp):
    """What the doctor counts is what `phalanx plan` promises, to the byte."""
    from phalanx.health import memory
    from phalanx.planner import search
    from phalanx.planner.subject import machine_for, shape_for

    request = search.PlanRequest(dtype="fp8", kv_cache_dtype="fp8", max_batch_size=256)
    plan = search.examine(shape_for("llama-3-70b"), machine_for("H200")[0], request, search.Layout(tp=tp, pp=pp))
    examined = subject(
        "llama-3-70b", dtype="fp8", kv_cache_dtype="fp8", tensor_parallel_size=tp, pipeline_parallel_size=pp, max_batch_size=256
    )
    rank = memory.budget(examined.options, examined.model_shape, plan.bytes["capacity"], on_gpu=True).rank
    kinds = {"weights": rank.weights, "activations_and_context": rank.beside, "graphs": rank.graphs, "kv": rank.kv}
    assert kinds == {kind: plan.bytes[kind] for kind in kinds}
    assert rank.kv_tokens == plan.kv_tokens


def test_memory_budget_remedies():
    examined = subject("llama-3-70b", nvml=machine(2, name="NVIDIA H100 80GB HBM3", memory=85_520_809_984))
    finding = only("memory_budget", examined)
    assert finding.level == "error"
    assert finding.commands[0] == "phalanx serve llama-3-70b --dtype fp8"
    assert "--tensor_parallel_size 2 frees" in finding.cure
    remedies = finding.facts["remedies"]
    assert [entry["fits"] for entry in remedies] == sorted((entry["fits"] for entry in remedies), reverse=True)
    from phalanx.health import memory

    before = memory.budget(examined.options, examined.model_shape, on_gpu=True)
    for entry in remedies:
        after = memory.budget(examined.options.model_copy(update=entry["options"]), examined.model_shape, on_gpu=True)
        assert before.least - after.least == entry["freed"] > 0
        assert entry["fits"] == (after.least <= finding.facts["free"])
    first = subject("llama-3-70b", nvml=machine(2, name="NVIDIA H100 80GB HBM3", memory=85_520_809_984), **remedies[0]["options"])
    assert only("memory_budget", first).level == "ok", "following the first remedy makes it fit"


def test_memory_budget_commands_keep_the_layout():
    layout = {"tensor_parallel_size": 2, "moe_expert_parallel_size": 2}
    finding = only("memory_budget", subject("mixtral-8x7b", nvml=machine(2, memory=40_000_000_000), **layout))
    assert finding.commands[0] == "phalanx serve mixtral-8x7b --tp_size 2 --moe_ep_size 2 --dtype fp8"


def test_memory_budget_with_a_full_gpu():
    """8B fits an H200 that is free, and not one of which another process has all but 14 GB."""
    assert only("memory_budget", subject("llama-3-8b", nvml=machine(1))).level == "ok"
    full = machine(1).change("nvmlDeviceGetMemoryInfo", struct(total=150_754_820_096, used=136_754_820_096, free=14_000_000_000))
    finding = only("memory_budget", subject("llama-3-8b", nvml=full))
    assert finding.level == "error"
    assert finding.commands[0] == "phalanx serve llama-3-8b --dtype fp8"


def test_memory_budget_of_a_long_sequence():
    finding = only(
        "memory_budget", subject("llama-3.1-405b", nvml=machine(4), tensor_parallel_size=4, dtype="fp8", max_seq_len=131072)
    )
    assert finding.level in ("ok", "warning")
    small = machine(4, memory=112 * 10**9)
    finding = only("memory_budget", subject("llama-3.1-405b", nvml=small, tensor_parallel_size=4, dtype="fp8", max_seq_len=131072))
    assert finding.level == "warning", finding.summary
    assert "--max_seq_len" in finding.commands[0]
    options = {"tensor_parallel_size": 8, "dtype": "fp8", "max_seq_len": 163_840}
    finding = only("memory_budget", subject("deepseek-v3", nvml=machine(8, memory=105 * 10**9), **options))
    assert finding.level == "warning", finding.summary
    assert finding.commands[0] == "phalanx serve deepseek-v3 --tp_size 8 --decode_context_parallel_size 8"


def test_memory_budget_on_cpu():
    finding = only("memory_budget", subject("demo", kv_cache_bytes=100))
    assert finding.level == "error"
    assert finding.summary.startswith("kv_cache_bytes=100 is less than one KV block")
    amount = finding.commands[0].rpartition(" ")[2]
    assert only("memory_budget", subject("demo", kv_cache_bytes=int(amount))).level == "ok"


def test_what_nvml_refuses_is_unknown():
    from phalanx.health import devices

    gpu = devices.read(machine(1)).gpus[0]
    assert gpu.link_mbps == 26_562
    assert gpu.nvlink_bytes_per_s == pytest.approx(478e9, rel=0.01)
    gpu = devices.read(machine(1).refuse("nvmlDeviceGetTemperature").refuse("nvmlDeviceGetFieldValues")).gpus[0]
    assert (gpu.temperature, gpu.link_mbps) == (None, None)


def test_visible_gpus_only():
    from phalanx.health import devices

    answer = devices.read(machine(4), "2,0")
    assert [gpu.index for gpu in answer.gpus] == [2, 0]
    assert answer.present == 4
    assert answer.pair(answer.gpus[0], answer.gpus[1]).nvlink
