# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism over symmetric memory as the candidates of a benchmark launch it, without a GPU: the kernels of the runtime,
once each, and nothing else where a choice is to be measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.comm.group import Solo
from phalanx.comm.sequence_parallel import ShardedResidual
from phalanx.comm.strategies import AllReduce, Strategies, symmetric_strategies
from phalanx.comm.symmetric import ReduceScatterBuffer
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.ranks.candidates import StrategyCandidates
from phalanx.tune.ranks.warmup import arguments
from phalanx.tune.sweep import Task

CPU, TOKENS, HIDDEN, WORLD = torch.device("cpu"), 256, 4096, 4


class LastOfFour(Solo):
    rank, size = WORLD - 1, WORLD


def peer_tensor(rank: int, rows: int, columns: int, dtype: torch.dtype, before: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


def candidates(capacity: int) -> StrategyCandidates:
    from tests.support.comm_compiled import workspace

    local = torch.zeros(4, dtype=torch.int32)
    buffer = ReduceScatterBuffer(WORLD - 1, WORLD, capacity, 1 << 40, local, (0,) * WORLD, peer_tensor)
    runs = {Strategy.NCCL: AllReduce(lambda x: x)} | symmetric_strategies(workspace(WORLD, 90), buffer, sweeps=True)
    return StrategyCandidates(Strategies(Fingerprint(90, "nvlink", WORLD), runs), LastOfFour())


def measured(name: str) -> Task:
    return Task.parse(f"bf16 RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE {TOKENS}x{HIDDEN} {name}")


@pytest.mark.parametrize(
    ("name", "kernel"), [("RS_NORM_AG", "rs_norm_ag"), ("GEMM+RS_NORM_AG", "rs_norm_ag"), ("GEMM_RS", "gemm_rs_norm_ag")]
)
def test_sequence_parallelism_launches_its_kernel_alone(name: str, kernel: str) -> None:
    """Although the longest message of the buffer would not fit: a benchmark measures each size for itself."""
    pytest.importorskip("triton")
    from tests.support.comm_compiled import only

    task = measured(name)
    with torch.inference_mode(), only(90) as launched:
        x, fusion, layer = arguments(task, CPU, LastOfFour())
        assert (layer is None) == (name == "RS_NORM_AG")
        values, scale, residual = candidates(64 << 20).get(task.choice, layer)(x, fusion)
    assert [launch for launch, _, _ in launched] == [kernel]
    assert (values.shape, values.dtype, scale.shape) == ((TOKENS, HIDDEN), torch.float8_e4m3fn, (TOKENS, 1))
    assert isinstance(residual, ShardedResidual)


def test_what_has_no_room_or_no_kernel_says_so() -> None:
    task = measured("GEMM_RS")
    _, _, layer = arguments(task, CPU, LastOfFour())
    with pytest.raises(KeyError, match="the memory of GEMM_RS has no room for 2097152 bytes"):
        candidates(1 << 20).get(task.choice, layer)
    with pytest.raises(KeyError, match="MNNVL is not built here"):
        candidates(1 << 20).get(Choice(Strategy.MNNVL), layer)


def test_a_layer_that_runs_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time would be written down under a wrong name."""
    built: Any = candidates(64 << 20)
    task = measured("GEMM_RS")
    x, fusion, layer = arguments(task, CPU, LastOfFour())
    run = built.get(task.choice, layer)
    monkeypatch.setattr(type(built.strategies.runs[Strategy.GEMM_RS].gemm_rs), "targets", lambda *_: None)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="GEMM_RS was to run, and these ran"):
        run(x, fusion)
