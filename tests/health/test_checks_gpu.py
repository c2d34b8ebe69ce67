# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs, their links and their memory, provoked by what NVML answers on a machine that has the fault."""

from __future__ import annotations

import os

import pytest

from phalanx.health.checks import driver_cuda, fabric, multicast
from phalanx.health.pairs import Measured, Measurements
from phalanx.health.servers import Server
from tests.support.health_host import executable, rdma
from tests.support.health_nvml import RecordedNvml, field_value, machine, struct
from tests.support.health_subject import findings, no_gpu, only, subject


def levels(name, nvml, model=None, **options):
    return [(str(finding.level), finding.summary) for finding in findings(name, subject(model, nvml=nvml, **options))]


def test_driver(tmp_path):
    assert levels("driver", machine(2)) == [("ok", "driver 570.124.06, 2 GPUs")]
    assert levels("driver", no_gpu()) == [("ok", "no GPU on this host, and none is asked for")]
    mismatch = RecordedNvml([]).fail(18, "NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch.")
    level, summary = levels("driver", mismatch)[0]
    assert level == "error"
    assert summary.startswith("the driver's kernel module and its library differ in version")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    level, summary = levels("driver", no_gpu(), root=tmp_path)[0]
    assert level == "error"
    assert summary.startswith("1 GPUs are on this host, and NVML cannot be reached")
    level, summary = levels("driver", no_gpu(), "demo", device="cuda")[0]
    assert level == "error"
    assert summary.startswith("device='cuda', and this host shows no GPU")


@pytest.mark.parametrize(
    ("built", "driver", "level", "words"),
    [
        ("12.8", 13010, "ok", "torch is built for CUDA 12.8, and the driver supports 13.1"),
        ("13.0", 12080, "error", "torch is built for CUDA 13.0, and driver 570.124.06 supports CUDA 12.8"),
        ("12.8", 12040, "ok", "torch is built for CUDA 12.8, and the driver supports 12.4"),
        (None, 13010, "error", "torch is built without CUDA, and this host has 1 GPU"),
    ],
)
def test_driver_cuda(monkeypatch, built, driver, level, words):
    """Within one major version an older driver runs newer libraries (CUDA's minor version compatibility)."""
    monkeypatch.setattr(driver_cuda, "torch_cuda", lambda: built)
    assert levels("driver_cuda", machine(1).change("nvmlSystemGetCudaDriverVersion", driver)) == [(level, words)]


def test_torch_version_file():
    import torch

    assert driver_cuda.torch_cuda() == torch.version.cuda


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
    monkeypatch.setattr(fabric, "cuda_status", lambda: cuda)
    results = levels("fabric", machine(2).change("nvmlDeviceGetGpuFabricInfoV", struct(state=state, status=status)))
    assert len(results) == 1
    assert results[0][0] == level
    assert results[0][1].startswith(words)


def test_gpu_count():
    assert levels("gpu_count", machine(2), "demo", tensor_parallel_size=4) == [
        ("error", "2 GPUs are visible, and 4 ranks need one each")
    ]
    limited = {"environment": {"CUDA_VISIBLE_DEVICES": "0"}, "tensor_parallel_size": 2}
    assert levels("gpu_count", machine(2), "demo", **limited) == [
        ("error", "CUDA_VISIBLE_DEVICES=0 leaves 1 of 2 GPUs, and 2 ranks need one each")
    ]
    assert levels("gpu_count", machine(2), "demo", tensor_parallel_size=2)[0][0] == "ok"
    assert levels("gpu_count", machine(2), "demo")[0] == ("note", "1 of 2 GPUs are used by this layout; the others stay idle")
    assert levels("gpu_count", no_gpu(), "demo", tensor_parallel_size=2)[0][0] == "ok"
    assert levels("gpu_count", machine(2), "demo", tensor_parallel_size=8, launcher="ray")[0][0] == "skipped"


def with_holder(nvml, pid, size, gpu=1):
    return nvml.change("nvmlDeviceGetComputeRunningProcesses", [struct(pid=pid, usedGpuMemory=size)], gpu=gpu)


def test_gpu_memory_taken():
    taken = with_holder(machine(2), os.getpid(), 90 << 30)
    finding = only("gpu_memory_taken", subject("demo", nvml=taken, tensor_parallel_size=2))
    assert finding.level == "error"
    assert f"(pid {os.getpid()}) has 90.0 GiB of 140.4 GiB" in finding.summary
    assert finding.commands == (f"kill {os.getpid()}",)
    assert only("gpu_memory_taken", subject("demo", nvml=taken)).level == "ok", "rank 0 takes GPU 0"
    outside = only("gpu_memory_taken", subject(nvml=with_holder(machine(2), 2**22 - 1, 5 << 30)))
    assert "a process outside this container" in outside.summary
    hidden = machine(1).change("nvmlDeviceGetMemoryInfo", struct(total=80 << 30, used=30 << 30, free=50 << 30))
    finding = only("gpu_memory_taken", subject(nvml=hidden))
    assert finding.level == "warning"
    assert "30.0 GiB of 80.0 GiB are in use, by processes that are not visible here" in finding.summary
    assert only("gpu_memory_taken", subject(nvml=with_holder(machine(1), os.getpid(), 600 << 20, 0))).level == "ok"


def test_gpu_mixed():
    assert levels("gpu_mixed", machine(2)) == [("ok", "2 x NVIDIA H200")]
    names = machine(2).change("nvmlDeviceGetName", "NVIDIA H100 80GB HBM3", gpu=1)
    assert levels("gpu_mixed", names)[0][0] == "warning"
    less = machine(2).change("nvmlDeviceGetMemoryInfo", struct(total=140 << 30, used=1, free=1), gpu=1)
    less.change("nvmlDeviceGetMemoryInfo", struct(total=120 << 30, used=1, free=1), gpu=0)
    assert levels("gpu_mixed", less)[0][1].startswith("GPUs of one kind differ in memory")
    slower = machine(2).change("nvmlDeviceGetMaxClockInfo", 1755, gpu=1)
    assert levels("gpu_mixed", slower)[0][1].startswith("GPUs of one kind differ in their highest clock")


def test_mig():
    cut = machine(2).change("nvmlDeviceGetMigMode", [1, 1], gpu=1)
    assert levels("mig", cut, "demo", tensor_parallel_size=2)[0][0] == "error"
    assert levels("mig", machine(1).change("nvmlDeviceGetMigMode", [1, 1]), "demo")[0][0] == "note"
    assert levels("mig", machine(2))[0][0] == "ok"
    assert levels("mig", machine(2).refuse("nvmlDeviceGetMigMode"))[0][0] == "ok"


def test_persistence():
    assert levels("persistence", machine(2).change("nvmlDeviceGetPersistenceMode", 0))[0][0] == "note"
    assert levels("persistence", machine(2))[0][0] == "ok"


def test_power_limit():
    lowered = machine(2).change("nvmlDeviceGetEnforcedPowerLimit", 500_000)
    assert levels("power_limit", lowered) == [
        ("warning", f"GPU {gpu} may draw 500 W, and its default is 700 W: long prompts get slower") for gpu in (0, 1)
    ]
    uneven = machine(2).refuse("nvmlDeviceGetPowerManagementDefaultLimit").change("nvmlDeviceGetEnforcedPowerLimit", 600_000, gpu=1)
    assert levels("power_limit", uneven) == [("warning", "GPUs of one kind have different power limits: GPU 0 700 W, GPU 1 600 W")]
    always_capped = machine(2).change("nvmlDeviceGetCurrentClocksEventReasons", 0x4)
    assert levels("power_limit", always_capped)[0][0] == "ok", "a power cap that always binds is no alarm"
    assert levels("power_limit", machine(2).refuse("nvmlDeviceGetEnforcedPowerLimit"))[0][0] == "ok"


@pytest.mark.parametrize(
    ("reasons", "level"), [(0x1, "ok"), (0x4, "ok"), (0x20, "warning"), (0x40, "warning"), (0x80, "warning"), (0x48, "warning")]
)
def test_thermal(reasons, level):
    assert levels("thermal", machine(1).change("nvmlDeviceGetCurrentClocksEventReasons", reasons))[0][0] == level


def test_hot_gpu():
    hot = machine(2).change("nvmlDeviceGetTemperature", 88, gpu=1)
    assert levels("thermal", hot) == [("warning", "GPU 1 is slowed down by heat: 88 degrees, 1980 of 1980 MHz")]


def test_clocks():
    assert levels("clocks", machine(1).change("nvmlDeviceGetApplicationsClock", 1200))[0][0] == "warning"
    assert levels("clocks", machine(1))[0][0] == "ok"
    assert levels("clocks", machine(1).refuse("nvmlDeviceGetApplicationsClock"))[0][0] == "ok"


def test_ecc():
    assert levels("ecc", machine(2))[0][0] == "ok"
    assert levels("ecc", machine(2).change("nvmlDeviceGetTotalEccErrors", 3, gpu=1))[0][1].startswith("GPU 1: 3 uncorrected")
    assert "waits to be remapped" in levels("ecc", machine(1).change("nvmlDeviceGetRemappedRows", [0, 1, 1, 0]))[0][1]
    assert (
        "remapping a row of its memory failed" in levels("ecc", machine(1).change("nvmlDeviceGetRemappedRows", [0, 1, 0, 1]))[0][1]
    )


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


def test_nvlink_links():
    assert levels("nvlink_links", machine(2)) == [("ok", "18 NVLinks are active on every GPU")]
    by_design = machine(2, name="NVIDIA H100 NVL", links=12, switch=False)
    assert levels("nvlink_links", by_design) == [
        ("ok", "12 of 18 NVLinks are active on every GPU, as a board with bridges has them")
    ]
    broken = machine(2).change("nvmlDeviceGetNvLinkState", 0, 17, gpu=1)
    level, summary = levels("nvlink_links", broken)[0]
    assert (level, summary) == ("error", "GPU 1 has 17 active NVLinks, and GPU 0 has 18: link 17 is down")
    assert levels("nvlink_links", machine(2, nvlink=False))[0][0] == "ok"
    assert levels("nvlink_links", machine(2, links=0))[0][0] == "ok", "a guest may show links as inactive that work"
    down = machine(2, links=0).change("nvmlDeviceGetP2PStatus", 3)
    assert levels("nvlink_links", down)[0] == ("error", "every NVLink is down")


def test_nvlink_errors():
    assert levels("nvlink_errors", machine(2))[0][0] == "ok"
    assert levels("nvlink_errors", machine(2).change("nvmlDeviceGetNvLinkErrorCounter", 12, 3, 0, gpu=0))[0][0] == "ok", (
        "few replays"
    )
    recovering = machine(2).change("nvmlDeviceGetNvLinkErrorCounter", 2, 3, 1, gpu=1)
    assert levels("nvlink_errors", recovering) == [("warning", "NVLink 3 of GPU 1 counts 2 recovery errors")]


def test_pcie_link():
    assert levels("pcie_link", machine(2))[0][0] == "ok"
    narrow = machine(2).change("nvmlDeviceGetCurrPcieLinkWidth", 4, gpu=1)
    assert levels("pcie_link", narrow) == [("warning", "GPU 1 runs on 4 of 16 PCIe lanes")]
    idle = machine(1).change("nvmlDeviceGetCurrPcieLinkGeneration", 1)
    assert levels("pcie_link", idle)[0][0] == "ok", "an idle link is slowed down to save power"
    idle.change("nvmlDeviceGetUtilizationRates", struct(gpu=95, memory=40))
    assert levels("pcie_link", idle) == [("warning", "GPU 0 runs at PCIe 1 of 5 under load")]


def test_peer_class():
    assert levels("peer_class", machine(2), "demo", tensor_parallel_size=2) == [("ok", "all 1 pairs have NVLink")]
    pcie = machine(2, nvlink=False, name="NVIDIA L40S", switch=False)
    level, summary = levels("peer_class", pcie, "demo", tensor_parallel_size=2)[0]
    assert level == "warning"
    assert summary == "GPU 0 and GPU 1 are joined over PCIe (SYS), and TP 2 sums tensors over them twice a layer"
    assert levels("peer_class", pcie, "demo", pipeline_parallel_size=2)[0][0] == "note"
    blocked = machine(2, nvlink=False).change("nvmlDeviceGetP2PStatus", 1)
    assert "have no peer access (chipset not supported)" in levels("peer_class", blocked)[0][1]


def measured(**changes):
    entries = [Measured(a, b, 393e9, 9e-6, True, True, 0.2) for a, b in ((0, 1), (1, 0))]
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
    hung = check(Measurements((), "the copy from device 1 to device 0 did not end: no answer within 70 s", 70, (1, 0)))
    assert hung[0].level == "error"
    assert hung[0].summary.startswith("copying from GPU 1 to GPU 0 hangs")


def test_multicast(monkeypatch):
    for answer, level in ((True, "ok"), (False, "note"), (None, "skipped")):
        monkeypatch.setattr(multicast, "attribute", lambda answer=answer: answer)
        assert levels("multicast", machine(2))[0][0] == level


def test_no_check_makes_a_multicast_object():
    from pathlib import Path

    from phalanx import health

    for file in Path(health.__file__).parent.rglob("*.py"):
        assert "cuMulticast" not in file.read_text(encoding="utf-8"), file


def test_numa():
    here = machine(1)
    assert levels("numa", here)[0][0] == "ok"
    far = machine(1).change("nvmlDeviceGetCpuAffinity", [0, 0b1111], gpu=0)
    level, summary = levels("numa", far)[0]
    assert level == "warning"
    assert summary.endswith("is attached to the NUMA node of cores 64-67")


def test_compute_mode():
    assert levels("compute_mode", machine(1))[0][0] == "ok"
    assert levels("compute_mode", machine(1).change("nvmlDeviceGetComputeMode", 2))[0][0] == "error"
    exclusive = machine(1).change("nvmlDeviceGetComputeMode", 3)
    assert levels("compute_mode", exclusive)[0][0] == "note"
    assert levels("compute_mode", with_holder(exclusive, 77, 1 << 20, 0))[0][0] == "error"


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


def test_memory_budget_fits():
    for options in ({"tensor_parallel_size": 2}, {"dtype": "fp8"}):
        finding = only("memory_budget", subject("llama-3-70b", nvml=machine(2), **options))
        assert finding.level == "ok", finding.summary


def test_memory_budget_kv_tokens_are_those_of_a_real_start():
    """70B in FP8 on one H200 has 400,448 tokens of KV cache, on two 1,196,384 (benchmarks/results/serving, max_batch_size 512)."""
    for tp, tokens in ((1, 400_448), (2, 1_196_384)):
        nvml = machine(2).change(
            "nvmlDeviceGetMemoryInfo", struct(total=150_754_820_096, used=150_754_820_096 - 150_109_880_320, free=0)
        )
        examined = subject("llama-3-70b", nvml=nvml, dtype="fp8", tensor_parallel_size=tp, max_batch_size=512, kv_cache_dtype="fp8")
        assert 0.98 * tokens <= only("memory_budget", examined).facts["kv_tokens"] <= tokens


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 2)])
def test_memory_budget_is_the_planners(tp, pp):
    """What the doctor counts is what `phalanx plan` promises, to the byte."""
    from phalanx.health import memory
    from phalanx.plan import search
    from phalanx.plan.subject import machine_for, shape_for

    request = search.PlanRequest(dtype="fp8", kv_cache_dtype="fp8", max_batch_size=256)
    plan = search.examine(shape_for("llama-3-70b"), machine_for("H200")[0], request, search.PlannedLayout(tp, pp, 1, 1))
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


def test_memory_budget_on_cpu():
    finding = only("memory_budget", subject("demo", kv_cache_bytes=100))
    assert finding.level == "error"
    assert finding.summary.startswith("kv_cache_bytes=100 is less than one KV block")
    amount = finding.commands[0].rpartition(" ")[2]
    assert only("memory_budget", subject("demo", kv_cache_bytes=int(amount))).level == "ok"


def test_layout():
    finding = only("layout", subject("llama-3-70b", nvml=machine(4), tensor_parallel_size=3))
    assert finding.level == "error"
    assert "1, 2, 4, 8, 16, 32" in finding.cure
    assert only("layout", subject("llama-3-70b", nvml=machine(4), tensor_parallel_size=4)).level == "ok"
    old = machine(1, name="NVIDIA A100-SXM4-80GB").change("nvmlDeviceGetCudaComputeCapability", [8, 0])
    assert only("layout", subject("llama-3-8b", nvml=old, dtype="fp8")).level == "note"
    assert only("layout", subject("llama-3-8b", nvml=machine(1), max_seq_len=10**6)).level == "error"


def test_field_values_of_all_links():
    from phalanx.health import devices

    nvml = machine(1).change("nvmlDeviceGetFieldValues", field_value(77), [[138, 0xFFFFFFFF]], gpu=0)
    gpu = devices.read(nvml).gpus[0]
    assert (gpu.tx_kib, gpu.rx_kib, gpu.link_mbps) == (77, 1_000_000, 26_562)
    assert gpu.nvlink_bytes_per_s == pytest.approx(478e9, rel=0.01)


def test_what_nvml_refuses_is_written_down():
    from phalanx.health import devices

    nvml = machine(1).refuse("nvmlDeviceGetPowerUsage").refuse("nvmlDeviceGetFieldValues")
    gpu = devices.read(nvml).gpus[0]
    assert (gpu.power, gpu.tx_kib) == (None, None)
    assert {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues"} <= gpu.unanswered.keys()


def test_visible_gpus_only():
    from phalanx.health import devices

    answer = devices.read(machine(4), "2,0")
    assert [gpu.index for gpu in answer.gpus] == [2, 0]
    assert answer.present == 4
    assert answer.pair(answer.gpus[0], answer.gpus[1]).nvlink
