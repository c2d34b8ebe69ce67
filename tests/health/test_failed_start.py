# SPDX-License-Identifier: Apache-2.0
"""A failed start says what the doctor finds behind it, and following the first remedy makes the same start succeed."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from phalanx.errors import CapacityError, EngineError, RankDied
from phalanx.health import failed_start
from phalanx.health.check import Finding, Level
from tests.support.health_nvml import machine, struct
from tests.support.health_subject import ROOT, subject

pytestmark = pytest.mark.usefixtures("forked_python")


def names(text):
    return [check.name for check in failed_start.fitting(text)]


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("rank 0 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "memory_budget"),
        ("rank 0 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu_memory_taken"),
        ("0.9 of the GPU memory left (...) gives the KV cache 0 bytes; not a single KV block fits", "memory_budget"),
        ("rank 1 (pid 17, node 0) was killed by SIGBUS", "shm_size"),
        ("rank 1 (pid 17, node 0) was killed by SIGKILL", "host_memory"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 536870912 bytes", "host_memory"),
        ("rank 0 failed: OSError: [Errno 24] Too many open files", "open_files"),
        ("rank 0 failed: OSError: [Errno 28] No space left on device", "disk_space"),
        ("rank 0 failed: RuntimeError: can't start new thread", "task_limit"),
        ("Gloo connectFullMesh failed with ...", "network_interface"),
        ("rank 0 failed: AcceleratorError: CUDA error: system not yet initialized", "fabric"),
        ("CUDA error: forward compatibility was attempted on non supported HW", "driver_cuda"),
        ("master_port=29400 on 10.0.0.1 was asked for; Address already in use", "port_free"),
        ("ranks were given 600 s to start; node 1 has not joined", "master_address"),
        ("rank 0 failed: SafetensorError: incomplete metadata, file not fully covered: model.safetensors", "model_files"),
    ],
)  # fmt: skip
def test_the_fitting_checks(text, check):
    assert check in names(text)


def test_nothing_fits_a_failure_that_no_check_knows():
    assert names("the engine met the moon") == []
    error = EngineError("the engine met the moon")
    assert failed_start.explain(error, {"model": "demo"}) is error


def test_findings_of_a_full_gpu():
    taken = machine(1).change("nvmlDeviceGetComputeRunningProcesses", [struct(pid=os.getpid(), usedGpuMemory=136 << 30)])
    taken.change("nvmlDeviceGetMemoryInfo", struct(total=150_754_820_096, used=137 << 30, free=3 << 30))
    findings = failed_start.find("CUDA out of memory", subject("llama-3-8b", nvml=taken))
    assert len(findings) == 2
    assert {finding.level for finding in findings} == {Level.ERROR}
    assert any(f"(pid {os.getpid()}) has 136.0 GiB" in finding.summary for finding in findings)


def test_several_processes_on_a_gpu_leave_room_for_the_remedy():
    holders = [struct(pid=os.getppid(), usedGpuMemory=4 << 30), struct(pid=os.getpid(), usedGpuMemory=126 << 30)]
    taken = machine(1).change("nvmlDeviceGetComputeRunningProcesses", holders)
    taken.change("nvmlDeviceGetMemoryInfo", struct(total=150_754_820_096, used=127 << 30, free=13 << 30))
    findings = failed_start.find("CUDA out of memory", subject("llama-3-8b", nvml=taken))
    assert [finding.level for finding in findings] == [Level.ERROR, Level.ERROR]
    assert any(f"(pid {os.getpid()}) has 126.0 GiB" in finding.summary for finding in findings)  # the one with the most
    assert any("--dtype fp8" in command for finding in findings for command in finding.commands)


def test_the_error_keeps_its_kind_and_words():
    finding = Finding(Level.ERROR, "the disk is full", "free it", ("rm big",))
    error = failed_start.with_findings(CapacityError("no room", held="1 byte", why="it is small", next="grow"), [finding])
    assert type(error) is CapacityError
    assert str(error) == "no room; 1 byte; it is small; grow; the doctor finds: the disk is full: free it (`rm big`)"


def test_an_explanation_is_never_late(monkeypatch):
    monkeypatch.setattr(failed_start, "SECONDS", 0.2)
    monkeypatch.setattr(failed_start, "find", lambda text, examined: time.sleep(3) or [Finding(Level.ERROR, "late", "")])
    error = RankDied("rank 0 was killed by SIGKILL")
    begin = time.monotonic()
    assert failed_start.explain(error, {"model": "demo"}) is error
    assert time.monotonic() - begin < 2


def test_an_explanation_that_fails_changes_nothing():
    from phalanx.engine import process

    error = EngineError("rank 0 failed")
    for diagnosis in ("no.such.module:explain", "phalanx.health.failed_start:nothing", ""):
        assert process._explained(error, {"options": {"model": "demo"}, "diagnosis": diagnosis}) is error
    assert process._explained(error, {"options": {"model": "demo", "unknown": 1}}) is error


def generate(*flags: str, limits: Callable[[], None] | None = None) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "generate",
        "demo",
        "--prompt",
        "Hello",
        "--max_tokens",
        "3",
        "--device",
        "cpu",
        *flags,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment, preexec_fn=limits)


def test_following_the_first_remedy_makes_the_same_start_succeed():
    """For real, on CPU: ranks are started, and end with CapacityError; the flags that the error names let them start."""
    failed = generate("--kv_cache_bytes", "1000")
    assert failed.returncode == 1
    assert "the doctor finds: kv_cache_bytes=1,000 is less than one KV block of 131,072 bytes" in failed.stderr
    remedy = re.search(r"`phalanx serve demo (--kv_cache_bytes \d+)`", failed.stderr)
    assert remedy, failed.stderr
    assert generate(*remedy[1].split()).returncode == 0


def test_following_the_first_remedy_with_capped_memory():
    """For real, on CPU: the allocator of a rank runs out of memory (`ulimit -v`); the KV cache that the error names lets the same
    start succeed under the same cap."""

    def capped() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (5 << 29, 5 << 29))

    same = ("--max_batch_size", "1024")
    failed = generate(*same, "--kv_cache_bytes", str(4 << 30), limits=capped)
    assert failed.returncode == 1
    assert "can't allocate memory" in failed.stderr
    assert "the doctor finds: `ulimit -v` allows each process 2.50 GiB, and a rank needs about 6.0" in failed.stderr
    remedy = re.search(r"`phalanx serve demo (--kv_cache_bytes \d+)`", failed.stderr)
    assert remedy, failed.stderr
    again = generate(*same, *remedy[1].split(), limits=capped)
    assert again.returncode == 0, again.stderr[-2000:]
