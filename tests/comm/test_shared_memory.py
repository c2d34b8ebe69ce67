# SPDX-License-Identifier: Apache-2.0
"""Real CPU ranks sum and finish over shared memory; every one of them must hold what the oracles hold, bit for bit."""

from __future__ import annotations

import itertools
import mmap
import platform
from pathlib import Path

import pytest
import torch

from phalanx.comm import shared_memory
from phalanx.comm.group import ResidualRmsNorm
from phalanx.errors import RankStalled
from phalanx.kernels import reference
from tests.support import comm_cpu_ranks

pytestmark = [
    pytest.mark.usefixtures("forked_python"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="shared memory needs stores in order: x86-64"),
]

SHAPES = ((1, 8), (3, 1000), (17, 512), (2, 16), (5, 8), (700, 1024))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTS = (("none", None, False), ("fp8", 0.02, True), ("fp8", None, False), ("nvfp4", 0.01, True))

BODY = """
import itertools
from phalanx.comm import shared_memory
from phalanx.comm.group import ResidualRmsNorm
from tests.comm.test_shared_memory import DTYPES, QUANTS, SHAPES, part, residual_of
memory = shared_memory.form(group, 1 << 20)
assert not isinstance(memory, str), memory
for shape, dtype in itertools.product(SHAPES, DTYPES):
    for name in ("oneshot", "twoshot"):
        for _ in range(3):
            results[name, shape, dtype] = getattr(memory, name)(part(rank, shape, dtype))
for (quant, scale, keep), shape in itertools.product(QUANTS, SHAPES):
    if quant == "nvfp4" and shape[1] % 16:
        continue
    residual, weight = residual_of(shape, torch.bfloat16)
    fusion = ResidualRmsNorm(residual, weight, 1e-5, quant, None if scale is None else torch.tensor(scale), keep)
    for name in ("oneshot_norm", "twoshot_norm"):
        results[name, quant, scale, shape] = getattr(memory, name)(part(rank, shape, torch.bfloat16), fusion)
"""


def part(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def residual_of(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    maker = torch.Generator().manual_seed(77)
    return torch.randn(shape, generator=maker).to(dtype), (1 + 0.1 * torch.randn(shape[1], generator=maker)).to(dtype)


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("world", [2, 3])
def test_equals_the_oracles_on_every_rank(world: int, tmp_path: Path) -> None:
    ranks = comm_cpu_ranks.run(world, BODY, tmp_path)
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        wanted = reference.all_reduce([part(rank, shape, dtype) for rank in range(world)])
        for rank, name in itertools.product(range(world), ("oneshot", "twoshot")):
            assert equal(ranks[rank][name, shape, dtype], wanted), (rank, name, shape, dtype)
    for (quant, scale, keep), shape in itertools.product(QUANTS, SHAPES):
        if quant == "nvfp4" and shape[1] % 16:
            continue
        total = reference.all_reduce([part(rank, shape, torch.bfloat16) for rank in range(world)])
        residual, weight = residual_of(shape, torch.bfloat16)
        scale_tensor = None if scale is None else torch.tensor(scale)
        wanted = reference.residual_rms_norm_quant(total, residual, weight, 1e-5, quant=quant, scale=scale_tensor, keep_norm=keep)
        for rank, name in itertools.product(range(world), ("oneshot_norm", "twoshot_norm")):
            outputs = ranks[rank][name, quant, scale, shape]
            assert len(outputs) == len(wanted)
            for left, right in zip(outputs, wanted, strict=True):
                assert equal(left, right), (rank, name, quant, scale, shape)


def test_the_file_is_gone_once_all_have_mapped_it(tmp_path: Path) -> None:
    body = """
from phalanx.comm import shared_memory
memory = shared_memory.form(group, 1 << 16, folder=folder)
group.barrier()  # the rank that made the file removes it before it gets here
results["files"] = [path.name for path in folder.glob("phalanx-*")]
results["sum"] = memory.oneshot(torch.ones(1, 8))
"""
    for rank in comm_cpu_ranks.run(2, body, tmp_path):
        assert rank["files"] == []
        assert torch.equal(rank["sum"], torch.full((1, 8), 2.0))


def test_what_a_killed_rank_left_is_swept_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    body = """
import fcntl
from phalanx.comm import shared_memory
used = None
if rank == 0:
    (folder / "phalanx-left").write_bytes(b"x")
    used = (folder / "phalanx-used").open("wb")
    fcntl.flock(used, fcntl.LOCK_EX)
group.barrier()
shared_memory.form(group, 1 << 16, folder=folder)
group.barrier()
results["files"] = [path.name for path in folder.glob("phalanx-*")]
"""
    for rank in comm_cpu_ranks.run(2, body, tmp_path):
        assert rank["files"] == ["phalanx-used"]


def test_all_ranks_refuse_when_one_host_has_no_room(tmp_path: Path) -> None:
    body = """
from phalanx.comm import shared_memory
if rank == 1:
    shared_memory.refusal = lambda *_: "64 MiB free, and 100 MiB are needed"
results["why"] = shared_memory.form(group, 1 << 20)
"""
    assert {rank["why"] for rank in comm_cpu_ranks.run(2, body, tmp_path)} == {"rank 1: 64 MiB free, and 100 MiB are needed"}


def test_a_rank_looks_on_only_where_there_are_cores_for_all_and_the_engine(tmp_path: Path) -> None:
    """Else it naps after some 50 rounds: it keeps the rank that it waits for from its part."""
    body = """
import os, time
from phalanx.comm import shared_memory
yields, sched_yield = [], os.sched_yield
os.sched_yield = lambda: (yields.append(1), sched_yield())
for cores in (2, 3):
    shared_memory.cores = lambda: cores
    memory = shared_memory.form(group, 1 << 16)
    group.barrier()
    yields.clear()
    time.sleep(0.5 * rank)
    memory.oneshot(torch.ones(1, 8))
    results[cores] = len(yields)
"""
    first, _ = comm_cpu_ranks.run(2, body, tmp_path)
    assert first[2] <= 50 < first[3]


def test_faster_than_gloo_for_small_messages(tmp_path: Path) -> None:
    body = """
import statistics, time
from phalanx.comm import shared_memory
memory = shared_memory.form(group, 1 << 20)
x = torch.ones(1, 4096, dtype=torch.bfloat16)
for name, call in (("ours", memory.oneshot), ("gloo", group.all_reduce)) * 6:  # others may have the cores for a while
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        call(x.clone())
        times.append(time.perf_counter() - begin)
    results[name] = min(statistics.median(times), results.get(name, 1.0))
"""
    ranks = comm_cpu_ranks.run(2, body, tmp_path)
    assert max(rank["ours"] for rank in ranks) < max(rank["gloo"] for rank in ranks)


def test_a_rank_that_does_not_come_is_named() -> None:
    memory = mmap.mmap(-1, shared_memory.memory_bytes(2, 1 << 16))
    alone = shared_memory.SharedMemory(memory, 0, 2, shared_memory.chunk_bytes(1 << 16), timeout=0.05)
    with pytest.raises(RankStalled, match=r"rank 1 did not join an all-reduce .* rank 0 of this group of 2 has waited"):
        alone.oneshot(torch.ones(1, 8))


def test_refusals_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory.refusal(2, 1 << 20) is None
    assert "MiB are needed" in str(shared_memory.refusal(1 << 20, 1 << 30))
    assert "cannot be used" in str(shared_memory.refusal(2, 8, tmp_path / "missing"))
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "aarch64")
    assert "aarch64" in str(shared_memory.refusal(2, 8))


def test_a_row_longer_than_a_chunk_is_finished_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's view of two that agree: both post the same."""
    memory = mmap.mmap(-1, shared_memory.memory_bytes(1, 1 << 16))
    alone = shared_memory.SharedMemory(memory, 0, 1, shared_memory.chunk_bytes(1 << 16), timeout=1)
    monkeypatch.setattr(alone, "_sum", lambda half, count, dtype, where: alone._parts(count, dtype)[half][0][where] * 2)
    x, weight = torch.randn(2, 40_000), torch.ones(40_000)
    norm, residual = alone.twoshot_norm(x, ResidualRmsNorm(torch.zeros_like(x), weight, 1e-5))
    wanted = reference.residual_rms_norm(x * 2, torch.zeros_like(x), weight, 1e-5)
    assert torch.equal(norm, wanted[0])
    assert torch.equal(residual, wanted[1])
