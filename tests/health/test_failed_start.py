# SPDX-License-Identifier: Apache-2.0
"""A failed start says what the doctor finds behind it, and following the first remedy makes the same start succeed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from phalanx.errors import CapacityError, EngineError, RankDied
from phalanx.health import failed_start
from phalanx.health.check import Finding, Level
from tests.support.health_nvml import machine, struct
from tests.support.health_subject import ROOT, subject


def names(text):
    return [check.name for check in failed_start.fitting(text)]


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("rank 0 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "memory_budget"),
        ("rank 0 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu_memory_taken"),
        ("0.9 of the GPU memory left (...) gives the KV cache 0 bytes; not a single block fits", "memory_budget"),
        ("rank 1 (pid 17, node 0) was killed by SIGBUS", "shm_size"),
        ("rank 1 (pid 17, node 0) was killed by SIGKILL", "host_memory"),
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


def generate(*flags: str) -> subprocess.CompletedProcess:
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_following_the_first_remedy_makes_the_same_start_succeed():
    """For real, on CPU: ranks are started, and end with CapacityError; the flags that the error names let them start."""
    failed = generate("--kv_cache_bytes", "1000")
    assert failed.returncode == 1
    assert "the doctor finds: kv_cache_bytes=1,000 is less than one KV block of 131,072 bytes" in failed.stderr
    remedy = re.search(r"`phalanx serve demo (--kv_cache_bytes \d+)`", failed.stderr)
    assert remedy, failed.stderr
    assert generate(*remedy[1].split()).returncode == 0
