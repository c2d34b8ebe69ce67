# SPDX-License-Identifier: Apache-2.0
"""CPU ranks whose all-reduce is picked by size, by force, or refused; and what is counted."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from phalanx.comm.group import ResidualRmsNorm, Solo, finish
from phalanx.comm.local import LocalWorld
from phalanx.comm.tuned_group import TunedGroup, tuned
from phalanx.kernels import reference
from phalanx.kernels.scaled_tensors import Unscaled
from tests.support import comm_cpu_ranks

pytestmark = [
    pytest.mark.usefixtures("forked_python"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="shared memory needs stores in order: x86-64"),
]

BODY = """
import pathlib
from dataclasses import replace
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.tuned_group import tuned
from phalanx.tables.strategy import Strategy
empty = pathlib.Path("/nonexistent")

def mine(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)

for strategy in ("AUTO", "NCCL", "ONESHOT", "TWOSHOT"):
    group_of = tuned(group, message_bytes=1 << 20, strategy=strategy, tables=empty)
    fusion = ResidualRmsNorm(torch.ones(5, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16), 1e-5)
    results[strategy] = {
        "sum": group_of.all_reduce(mine(5, 64)),
        "fused": group_of.all_reduce(mine(5, 64), fusion),
        "strided": group_of.all_reduce(mine(64, 5).t()),
        "three dims": group_of.all_reduce(mine(2, 3, 16)),
        "wide weight": group_of.all_reduce(mine(5, 64), replace(fusion, weight=torch.ones(64))),
        "one dim": group_of.all_reduce(mine(24)),
        "odd": group_of.all_reduce(mine(3, 5)),
        "whole numbers": group_of.all_reduce(torch.full((3,), rank)),
        "nothing": group_of.all_reduce(mine(0, 64)),
        "gathered": group_of.all_gather(mine(1, 2), dim=0),
        "calls": dict(group_of.calls),
        "digest": group_of.digest,
        "buffer": group_of.empty(2, 3, dtype=torch.bfloat16, device=torch.device("cpu")).shape,
    }
    with group_of.without({Strategy.ONESHOT, Strategy.GEMM_RS}):
        runs = group_of.strategies
        results[strategy]["replaced"] = sorted(each.name for each in runs if runs[each] is runs[Strategy.NCCL])
        results[strategy]["without"] = group_of.all_reduce(mine(5, 64), fusion)
        assert group_of.gemm_reduce_scatter_targets(5, 64, replace(fusion, accepts_sharded=True)) is None
    runs = group_of.strategies
    results[strategy]["afterwards"] = sorted(each.name for each in runs if runs[each] is runs[Strategy.NCCL])
    group_of.barrier()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return comm_cpu_ranks.run(2, BODY, tmp_path_factory.mktemp("tuned"))


def part_of(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


@pytest.mark.parametrize("strategy", ["AUTO", "NCCL", "ONESHOT", "TWOSHOT"])
def test_every_strategy_gives_the_same_bits(ranks: list[dict], strategy: str) -> None:
    total = reference.all_reduce([part_of(rank, 5, 64) for rank in range(2)])
    ones = torch.ones(5, 64, dtype=torch.bfloat16)
    norm, residual = reference.residual_rms_norm(total, ones, ones[0], 1e-5)
    for outputs in (rank[strategy] for rank in ranks):
        assert torch.equal(outputs["sum"], total)
        assert torch.equal(outputs["fused"][0], norm)
        assert torch.equal(outputs["fused"][1], residual)
        assert torch.equal(outputs["wide weight"][0], norm.float())
        assert torch.equal(outputs["strided"], reference.all_reduce([part_of(rank, 64, 5).t() for rank in range(2)]))
        assert torch.equal(outputs["three dims"], reference.all_reduce([part_of(rank, 2, 3, 16) for rank in range(2)]))
        assert torch.equal(outputs["one dim"], reference.all_reduce([part_of(rank, 24) for rank in range(2)]))
        assert torch.equal(outputs["odd"], reference.all_reduce([part_of(rank, 3, 5) for rank in range(2)]))
        assert outputs["whole numbers"].tolist() == [1, 1, 1]
        assert outputs["nothing"].shape == (0, 64)
        assert torch.equal(outputs["gathered"], torch.cat([part_of(0, 1, 2), part_of(1, 1, 2)]))
        assert outputs["buffer"] == (2, 3)


@pytest.mark.parametrize("strategy", ["AUTO", "ONESHOT", "TWOSHOT"])
def test_a_group_runs_without_a_strategy_for_a_while(ranks: list[dict], strategy: str) -> None:
    for outputs in (rank[strategy] for rank in ranks):
        assert outputs["replaced"] == ["GEMM_RS", "NCCL", "ONESHOT"]
        assert outputs["afterwards"] == ["NCCL"]
        assert all(torch.equal(*pair) for pair in zip(outputs["without"], outputs["fused"], strict=True))


def test_calls_are_counted_by_strategy_and_fusion(ranks: list[dict]) -> None:
    calls = ranks[0]["TWOSHOT"]["calls"]
    # Rows of 5 are no whole vectors, so gloo runs that one.
    assert calls == {"TWOSHOT/NONE": 4, "TWOSHOT/RESIDUAL_RMS_NORM": 2, "GLOO/NONE": 1}
    assert ranks[0]["NCCL"]["calls"] == {"GLOO/NONE": 5, "GLOO/RESIDUAL_RMS_NORM": 2}
    assert sum(ranks[0]["AUTO"]["calls"].values()) == 7


def test_the_seed_decides_on_a_machine_without_a_table(ranks: list[dict]) -> None:
    assert {rank["AUTO"]["digest"] for rank in ranks} == {"seed"}


def test_ranks_that_hold_different_options_refuse(tmp_path: Path) -> None:
    body = """
from phalanx.comm.tuned_group import tuned
from phalanx.errors import EngineError
try:
    tuned(group, message_bytes=8, strategy="ONESHOT" if rank else "AUTO", tables=folder / "none")
except EngineError as error:
    results["error"] = str(error)
"""
    for rank in comm_cpu_ranks.run(2, body, tmp_path):
        assert "rank 1: ONESHOT" in rank["error"]


def test_no_shared_memory_means_gloo_with_the_reason(tmp_path: Path) -> None:
    body = """
from phalanx.comm import shared_memory
from phalanx.comm.tuned_group import tuned
from phalanx.tables.message import Fusion
shared_memory.refusal = lambda *_: "no room in /dev/shm"
made = tuned(group, message_bytes=1 << 20, strategy="ONESHOT", tables=folder / "none")
results["sum"] = made.all_reduce(torch.ones(1, 8))
results["calls"], results["reason"] = made.calls, made.decide(1, 8, "fp32", Fusion.NONE).reason
"""
    for rank in comm_cpu_ranks.run(2, body, tmp_path):
        assert torch.equal(rank["sum"], torch.full((1, 8), 2.0))
        assert rank["calls"] == {"GLOO/NONE": 1}
        assert "no room in /dev/shm" in rank["reason"]


def test_a_gpu_without_room_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Nobody maps the memory of a rank that has none: ranks that wait for it there wait for ever."""
    pytest.importorskip("triton")
    body = """
import time
import torch.distributed._symmetric_memory as memory
from phalanx.comm.strategies import _on_gpu
def empty(count, *, dtype, device):
    if rank == 1:
        raise RuntimeError("CUDA out of memory.\\nTried to allocate")
    return torch.empty(count, dtype=dtype)
memory.empty, memory.rendezvous = empty, lambda *_: time.sleep(600)
results["why"] = _on_gpu(group, torch.device("cpu"), 1 << 20, gemm_rs=True)
"""
    for rank in comm_cpu_ranks.run(2, body, tmp_path, timeout=60):
        assert rank["why"] == "symmetric memory: rank 1 has no room for 3 MiB of it: CUDA out of memory."


def test_a_group_of_one_stays_as_it_is() -> None:
    alone = Solo()
    assert tuned(alone, message_bytes=8) is alone
    assert not isinstance(alone, TunedGroup)


def test_scales_of_a_product_are_applied_before_its_sum(tmp_path: Path) -> None:
    """By every strategy, fused and not, and by the group below: as if the GEMM output had come finished."""
    body = """
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.tuned_group import tuned
from phalanx.kernels.scaled_tensors import Unscaled
maker = torch.Generator().manual_seed(rank)
output = Unscaled((1000 * torch.randn(5, 64, generator=maker)).bfloat16(), torch.rand(5, 1, generator=maker),
                   torch.rand(64, generator=maker))
finished = output.to_fp32().bfloat16()
ones = torch.ones(5, 64, dtype=torch.bfloat16)
fusion = ResidualRmsNorm(ones, ones[0], 1e-5)
for name in ("NCCL", "ONESHOT", "TWOSHOT", "base"):
    each = group if name == "base" else tuned(group, message_bytes=1 << 20, strategy=name, tables=folder / "none")
    results[name] = [
        (each.all_reduce(output), each.all_reduce(finished.clone())),
        *zip(each.all_reduce(output, fusion), each.all_reduce(finished.clone(), fusion), strict=True),
    ]
"""
    for rank in comm_cpu_ranks.run(2, body, tmp_path):
        assert set(rank) == {"NCCL", "ONESHOT", "TWOSHOT", "base"}
        for name, outputs in rank.items():
            assert len(outputs) == 3
            for left, right in outputs:
                assert torch.equal(left, right), name


def test_one_rank_and_ranks_in_threads_finish_a_product_too() -> None:
    output = Unscaled((1000 * torch.randn(3, 16)).bfloat16(), torch.rand(3, 1), torch.rand(16))
    finished = output.to_fp32().bfloat16()
    fusion = ResidualRmsNorm(torch.ones_like(finished), torch.ones(16, dtype=torch.bfloat16), 1e-5)
    assert torch.equal(Solo().all_reduce(output), finished)
    for left, right in zip(Solo().all_reduce(output, fusion), finish(finished, fusion), strict=True):
        assert torch.equal(left, right)
    wanted = reference.all_reduce([finished, finished])
    for total, fused in LocalWorld(2).run(lambda group: (group.all_reduce(output), group.all_reduce(output, fusion))):
        assert torch.equal(total, wanted)
        for left, right in zip(fused, finish(wanted, fusion), strict=True):
            assert torch.equal(left, right)
