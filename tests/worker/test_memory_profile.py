# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.engine.messages import StepBatch
from phalanx.errors import CapacityError
from phalanx.layout.cache import CacheTensor
from phalanx.worker import memory_profile
from tests.support.engine_drive import options

CACHES = [tuple(CacheTensor(name, (2, 16), "fp32") for name in ("key", "value"))] * 3  # 768 bytes per token, 3072 per block of 4


def test_bytes_hold_so_many_blocks() -> None:
    assert memory_profile.cpu_blocks(options(Path("x"), kv_cache_bytes=10 * 3072 + 5), CACHES, 128) == 10


def test_no_more_than_full_requests_can_use() -> None:
    assert memory_profile.cpu_blocks(options(Path("x"), kv_cache_bytes=None), CACHES, 128) == 4 * 32
    assert memory_profile.cpu_blocks(options(Path("x"), kv_cache_bytes=1 << 30), CACHES, 128) == 4 * 32


def test_a_budget_that_holds_no_block_says_what_would_fit() -> None:
    with pytest.raises(CapacityError, match=r"kv_cache_bytes=3,071.*at least 3,072"):
        memory_profile.cpu_blocks(options(Path("x"), kv_cache_bytes=3071), CACHES, 128)


def test_the_state_of_requests_takes_its_part() -> None:
    """Of four slots, each with 1,024 bytes."""
    caches = [*CACHES, (CacheTensor("state", (4, 64), "fp32", "request"),)]
    assert memory_profile.cpu_blocks(options(Path("x"), kv_cache_bytes=10 * 3072 + 4096), caches, 128) == 10
    assert memory_profile.cpu_blocks(options(Path("x"), kv_cache_bytes=None), caches[-1:], 128) == 4 * 32
    with pytest.raises(CapacityError, match=r"beside 4,096 bytes of 4 states of requests and prefixes"):
        memory_profile.cpu_blocks(options(Path("x"), kv_cache_bytes=4096), caches, 128)


class Allocator:
    """As torch's counts: it takes from the device what it has no room for, and keeps it. A runner of steps that want 300, then 150
    bytes."""

    def __init__(self, allocated: int, reserved: int) -> None:
        self.memory_allocated = self.max_memory_allocated = allocated
        self.memory_reserved = self.max_memory_reserved = reserved
        self.wanted = [300, 150]

    def run(self, step: StepBatch) -> Allocator:
        self.max_memory_allocated = max(self.max_memory_allocated, self.memory_allocated + self.wanted.pop(0))
        self.max_memory_reserved = max(self.max_memory_reserved, self.max_memory_allocated)
        return self

    def results(self) -> None:
        return


@pytest.mark.parametrize(("holes", "taken"), [(0, 300), (100, 200), (1000, 0)])
def test_activations_that_fill_holes_are_held_and_take_nothing(monkeypatch: pytest.MonkeyPatch, holes: int, taken: int) -> None:
    allocator: Any = Allocator(5000, 5000 + holes)
    monkeypatch.setattr(memory_profile, "free_bytes", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: getattr(allocator, name))
    progress: list[tuple[int, int]] = []
    one_more = memory_profile.counting(lambda done, total: progress.append((done, total)), 3)
    peak = memory_profile.measure_activations(allocator, [StepBatch(), StepBatch()], torch.device("cuda"), one_more)
    assert peak == memory_profile.ActivationPeak(tensors=300, reserved=taken)
    assert progress == [(1, 3), (2, 3)]
