# SPDX-License-Identifier: Apache-2.0
"""Pairs are verified and timed by a process of its own: run for real between CPU tensors; damage, crash and hang are named."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict

import pytest
import torch

from phalanx.health import pair_worker, pairs
from phalanx.health.pairs import Measured

pytestmark = pytest.mark.usefixtures("forked_python")


def test_real_copies_between_cpu_tensors():
    results = pairs.measure(2, device="cpu", quick=True)
    assert results.failure == ""
    assert [(pair.source, pair.target) for pair in results.pairs] == [(0, 1), (1, 0)]
    assert all(pair.verified and pair.bytes_per_s > 1e8 and 0 < pair.latency_s < 0.01 for pair in results.pairs)
    assert results.between(1, 0) in results.pairs


def test_bandwidth_is_that_of_a_plain_copy():
    """Within a factor: a CPU of several users is no measuring device; on GPUs it is 5 percent (test_pairs_on_gpus)."""
    measured = pair_worker.direction("cpu", 0, 1, 16 << 20)
    source, target = torch.ones(4 << 20, dtype=torch.int32), torch.zeros(4 << 20, dtype=torch.int32)
    rates = []
    for _ in range(9):
        begin = time.perf_counter()
        target.copy_(source)
        rates.append((16 << 20) / (time.perf_counter() - begin))
    assert measured.bytes_per_s == pytest.approx(statistics.median(rates), rel=2.0)


@pytest.mark.gpu2
def test_pairs_on_gpus():
    """Within 5 percent of a plain copy, and at most 5 s a pair."""
    began = time.monotonic()
    results = pairs.measure(2)
    assert results.failure == ""
    assert time.monotonic() - began < pairs.START_SECONDS + 5 * len(results.pairs)
    for pair in results.pairs:
        source = torch.ones(64 << 20, dtype=torch.int32, device=f"cuda:{pair.source}")
        target = torch.zeros_like(source, device=f"cuda:{pair.target}")
        rates = []
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.device(pair.source):
                start.record()
                for _ in range(4):
                    target.copy_(source)
                end.record()
            torch.cuda.synchronize(pair.source)
            torch.cuda.synchronize(pair.target)
            rates.append(4 * source.nbytes / start.elapsed_time(end) * 1e3)
        assert pair.verified
        assert pair.bytes_per_s == pytest.approx(statistics.median(rates[1:]), rel=0.05)


def test_damage_is_counted(monkeypatch):
    """A device whose copies lose a bit: the worker compares on the host."""
    real = torch.Tensor.copy_

    def damaged(self, source, *args, **kwargs):
        answer = real(self, source, *args, **kwargs)
        if self.numel() > 10:
            self[7] ^= 4
        return answer

    monkeypatch.setattr(torch.Tensor, "copy_", damaged)
    result = pair_worker.direction("cpu", 0, 1, 1 << 16)
    assert not result.verified
    assert result.failure == "1 of 16384 words differ"


def worker(*lines: str, then: str = "") -> list[str]:
    """A process that writes these lines in place of the worker."""
    code = f"import sys, time; sys.stdin.read(); print({chr(10).join(lines)!r}, flush=True); {then or 'pass'}"
    return [sys.executable, "-c", code]


def line(a: int, b: int) -> str:
    return json.dumps(asdict(Measured(a, b, 4e11, 9e-6, True)))


def test_hang_is_named_and_ended():
    begin = time.monotonic()
    results = pairs.measure(2, command=worker(line(0, 1), then="time.sleep(60)"), seconds=1.0)
    assert time.monotonic() - begin < 10
    assert results.hung == (1, 0)
    assert results.failure == "the copy from device 1 to device 0 did not end: no answer within 1 s"
    assert len(results.pairs) == 1


def test_crash_is_named():
    results = pairs.measure(2, command=worker(then="sys.exit('CUDA error: an illegal memory access was encountered')"))
    assert results.hung is None
    assert results.failure == "the copy from device 0 to device 1 did not end: CUDA error: an illegal memory access was encountered"


def test_a_late_failure_of_a_finished_worker_is_none():
    results = pairs.measure(2, command=worker(line(0, 1), line(1, 0), then="sys.exit(3)"))
    assert results.failure == ""
    assert results.between(0, 1).bytes_per_s == 4e11
