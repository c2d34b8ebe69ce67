# SPDX-License-Identifier: Apache-2.0
"""RS_NORM_AG and GEMM_RS between real CPU ranks: the bits of TWOSHOT, the residual sharded, memory that is never overwritten early;
and a group that runs them by its table, or because they are forced."""

from __future__ import annotations

import itertools
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.kernels import reference
from tests.support import comm_cpu_ranks

pytestmark = [
    pytest.mark.usefixtures("forked_python"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="shared memory needs stores in order: x86-64"),
]

WORLD = 3
SHAPES = ((1, 16), (2, 1008), (7, 64), (64, 512), (700, 128))
MODES = (("none", None, False), ("fp8", 0.02, False), ("fp8", None, False), ("fp8", 0.02, True), ("fp8", None, True))
"""quant, scale, keep_norm."""
DTYPES = (torch.bfloat16, torch.float32)


def tensor_of(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fusion_of(shape: tuple[int, int], mode: tuple[str, float | None, bool], dtype: torch.dtype) -> ResidualRmsNorm:
    scale = None if mode[1] is None else torch.tensor(mode[1])
    residual, weight = tensor_of(99, *shape, dtype=dtype), 1 + 0.1 * tensor_of(98, shape[1], dtype=dtype)
    return ResidualRmsNorm(residual, weight, 1e-5, mode[0], scale, mode[2])  # type: ignore[arg-type]


STRATEGIES = """
import itertools
from dataclasses import replace
from phalanx.comm import shared_memory
from phalanx.comm.sequence_parallel import unshard
from phalanx.comm.sequence_parallel.on_cpu import CpuGemmRs, CpuRsNormAg
from tests.comm.sequence_parallel.test_on_cpu import DTYPES, MODES, SHAPES, fusion_of, tensor_of
memory = shared_memory.form(group, 1 << 16)  # 64 KiB: the longest shapes run in chunks
rs_norm_ag, gemm_rs = CpuRsNormAg(memory), CpuGemmRs(memory)
for shape, mode, dtype in itertools.product(SHAPES, MODES, DTYPES):
    x, fusion, outputs = tensor_of(rank, *shape, dtype=dtype), fusion_of(shape, mode, dtype), []
    for call in range(6):  # GEMM_RS where all rows are one chunk, one-shots between, and the residual of the call before
        targets = gemm_rs.targets(*shape, fusion) if call % 2 else None
        if targets is None:
            *made, residual = rs_norm_ag.all_reduce_norm(x, fusion)
        else:
            for rows, out in targets:
                out.copy_(x[rows])
            *made, residual = gemm_rs.all_reduce_norm(fusion)
            memory.oneshot(x)
        outputs.append((*made, unshard(residual, group)))
        fusion = replace(fusion, residual=residual)
    results[shape, mode, dtype] = outputs
    results["gemm", shape, dtype] = gemm_rs.targets(*shape, fusion) is not None
"""


def test_the_bits_of_a_sum_and_its_fusion(tmp_path: Path) -> None:
    ranks = comm_cpu_ranks.run(WORLD, STRATEGIES, tmp_path)
    for shape, mode, dtype in itertools.product(SHAPES, MODES, DTYPES):
        total = reference.all_reduce([tensor_of(rank, *shape, dtype=dtype) for rank in range(WORLD)])
        fusion = fusion_of(shape, mode, dtype)
        for call in range(6):
            wanted = finish(total, fusion)
            fusion = replace(fusion, residual=wanted[-1])
            for rank in ranks:
                for left, right in zip(rank[shape, mode, dtype][call], wanted, strict=True):
                    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), (shape, mode, dtype, call)
        fits = shape[0] > 2 and shape[0] * shape[1] * dtype.itemsize <= 1 << 16
        assert {rank["gemm", shape, dtype] for rank in ranks} == {fits}


GROUPS = """
import pathlib
from dataclasses import replace
from phalanx import kernels
from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.comm.sequence_parallel import ShardedResidual, unshard
from phalanx.comm.tuned_group import tuned
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.models.layers.linear import RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, WeightPart
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import default
from phalanx.tables.shipped import file_name
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import HAND_OVER, HiddenRange, Section, Span, Table
from phalanx.tables.table_file import save
from tests.comm.sequence_parallel.test_on_cpu import fusion_of, tensor_of

machine, norm = Fingerprint(0, "shm", world), Fusion.RESIDUAL_RMS_NORM
def row(*spans):
    return (HiddenRange(64, 64, tuple(Span(first, last, Choice(strategy)) for first, last, strategy in spans)),)
table = Table(machine, (
    Section("fp32", norm, row((1, 100, Strategy.ONESHOT)), Caller.REPLICATED),
    Section("fp32", norm, row((1, 15, Strategy.ONESHOT), (16, 100, Strategy.RS_NORM_AG)), Caller.SHARDED),
    Section("fp32", norm, row((1, 31, Strategy.AUTO), (32, 100, Strategy.GEMM_RS)), Caller.GEMM),
), default(machine))
if rank == 0:
    save(table, folder / file_name(machine))
group.barrier()
names = ("AUTO", "NCCL", "ONESHOT", "TWOSHOT", "RS_NORM_AG", "GEMM_RS")
with torch.inference_mode():
    for name in names:
        tuned_group = tuned(group, message_bytes=1 << 20, strategy=name, tables=folder)
        context = LayerContext(tuned_group, torch.float32, torch.device("cpu"))
        for tokens in (8, 20, 40):
            part = WeightPart("o_proj", (64, 8 * world), range(64), range(8 * rank, 8 * rank + 8))
            layer = RowParallelLinear(part, bias=False, context=context)
            rms = RmsNorm("n", 64, 1e-5, context=context)
            layer.method.weight.copy_(tensor_of(50 + rank, 64, 8, dtype=torch.float32))
            rms.weight.fill_(1)
            x, residual = tensor_of(rank, tokens, 8, dtype=torch.float32), tensor_of(99, tokens, 64, dtype=torch.float32)
            tuned_group.calls.clear()
            for _ in range(2):
                out, residual = layer(x, residual, rms)
            last, residual = layer(x, residual, None)  # without a norm: a whole residual, and no sequence parallelism
            results[name, tokens] = (out, residual, dict(tuned_group.calls))
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return comm_cpu_ranks.run(2, GROUPS, tmp_path_factory.mktemp("groups"))


def test_the_table_decides_what_a_layer_runs(groups: list[dict[Any, Any]]) -> None:
    ran = {tokens: {call for call in groups[0]["AUTO", tokens][2] if not call.endswith("/NONE")} for tokens in (8, 20, 40)}
    assert ran == {
        8: {"ONESHOT/RESIDUAL_RMS_NORM"},
        20: {"RS_NORM_AG/RESIDUAL_RMS_NORM"},
        40: {"GEMM_RS/RESIDUAL_RMS_NORM"},
    }


def test_a_forced_strategy_is_what_runs(groups: list[dict[Any, Any]]) -> None:
    """TWOSHOT means two-shot in every layer and for every sum; counted."""
    for name in ("NCCL", "ONESHOT", "TWOSHOT", "RS_NORM_AG", "GEMM_RS"):
        for tokens in (8, 20, 40):
            calls = groups[0][name, tokens][2]
            alone = "TWOSHOT" if name in ("RS_NORM_AG", "GEMM_RS") else name.replace("NCCL", "GLOO")
            assert calls == {f"{name.replace('NCCL', 'GLOO')}/RESIDUAL_RMS_NORM": 2, f"{alone}/NONE": 1}


def test_all_strategies_give_the_same(groups: list[dict[Any, Any]]) -> None:
    """To the last bit, but for GEMMs of fewer rows, which may add in another order."""
    for tokens in (8, 20, 40):
        wanted = groups[0]["TWOSHOT", tokens][:2]
        for name in ("AUTO", "NCCL", "ONESHOT", "RS_NORM_AG", "GEMM_RS"):
            for rank in groups:
                for left, right in zip(rank[name, tokens][:2], wanted, strict=True):
                    exact = name not in ("GEMM_RS", "AUTO")
                    torch.testing.assert_close(left, right, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


FUSIONS = """
from dataclasses import replace
from phalanx.comm.tuned_group import tuned
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import default
from phalanx.tables.shipped import file_name
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import HiddenRange, Section, Span, Table
from phalanx.tables.table_file import save
from tests.comm.sequence_parallel.test_on_cpu import fusion_of, tensor_of

machine = Fingerprint(0, "shm", world)
quantized, kept = Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE, Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE
def section(fusion, first):  # sharded from `first` tokens on
    spans = (Span(1, first - 1, Choice(Strategy.TWOSHOT)), Span(first, 100, Choice(Strategy.RS_NORM_AG)))
    return Section("fp32", fusion, (HiddenRange(64, 64, spans),), Caller.SHARDED)
table = Table(machine, (section(quantized, 16), section(kept, 64)), default(machine))
if rank == 0:
    save(table, folder / file_name(machine))
group.barrier()
gathers = []
all_gather = group.all_gather
def counted(x, dim=-1):
    gathers.append(tuple(x.shape))
    return all_gather(x, dim)
group.all_gather = counted
for name in ("AUTO", "TWOSHOT"):
    tuned_group = tuned(group, message_bytes=1 << 20, strategy=name, tables=folder)
    for tokens in (8, 32, 80):
        gathers.clear()
        tuned_group.calls.clear()
        residual, outputs = tensor_of(99, tokens, 64, dtype=torch.float32), []
        for call in range(6):  # a layer's two norms: before its experts, which keep it in 16 bit for the router, and behind them
            mode = ("fp8", None, call % 2 == 0)
            fusion = replace(fusion_of((tokens, 64), mode, torch.float32), residual=residual, accepts_sharded=True)
            *norm, residual = tuned_group.all_reduce(tensor_of(10 * call + rank, tokens, 64, dtype=torch.float32), fusion)
            outputs.append(norm)
        results[name, tokens] = (outputs, dict(tuned_group.calls), list(gathers))
"""


def test_norms_that_shard_from_different_sizes_on_gather_no_residual(tmp_path: Path) -> None:
    ranks = comm_cpu_ranks.run(2, FUSIONS, tmp_path)
    for tokens, own in ((8, "TWOSHOT"), (32, "RS_NORM_AG"), (80, "RS_NORM_AG")):
        for rank in ranks:
            outputs, calls, gathers = rank["AUTO", tokens]
            assert not gathers
            for left, right in zip(itertools.chain(*outputs), itertools.chain(*rank["TWOSHOT", tokens][0]), strict=True):
                assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
            kept, quantized = "RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE", "RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE"
            first = 1 if tokens == 32 else 0  # its residual comes in whole
            wanted = {f"{own}/{kept}": 3 - first, f"{own}/{quantized}": 3} | ({f"TWOSHOT/{kept}": 1} if first else {})
            assert calls == wanted
