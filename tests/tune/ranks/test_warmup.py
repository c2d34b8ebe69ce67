# SPDX-License-Identifier: Apache-2.0
"""The kernels of a benchmark are compiled before it: each once, in copies of the process, and none is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm import oneshot, twoshot
from phalanx.comm.group import Solo
from phalanx.comm.strategies import AllReduce, Strategies
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.compiling.ahead import can_compile_ahead
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Strategy, choices
from phalanx.tune.ranks import warmup
from phalanx.tune.ranks.candidates import StrategyCandidates
from phalanx.tune.sweep import Sweep, Task

CPU = torch.device("cpu")
NVLINK4 = Fingerprint(90, "nvlink", 4)


@pytest.mark.parametrize("fusion", Fusion)
def test_arguments_of_every_fusion(fusion):
    x, residual_norm, layer = warmup.arguments(Task("bf16", fusion, 3, 128, choices(fusion)[0]), CPU, Solo())
    assert layer is None
    assert (x.shape, x.dtype) == ((3, 128), torch.bfloat16)
    assert (residual_norm is None) == (fusion is Fusion.NONE)
    if residual_norm is not None:
        token_scale = residual_norm.scale is None
        assert Fusion.of(residual_norm.quant, token_scale=token_scale, keep_norm=residual_norm.keep_norm) is fusion


def test_each_kernel_is_compiled_once_and_found_by_the_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    triton = pytest.importorskip("triton")
    if not can_compile_ahead():
        pytest.skip("this Triton cannot be asked to compile later")
    from tests.support import comm_compiled

    heard: list[bool] = []  # whether a kernel was found in the cache

    def listener(*, cache_hit: bool, **_: Any) -> None:
        heard.append(cache_hit)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    workspace = comm_compiled.workspace(4, 90)
    sums: list[torch.Tensor] = []
    strategies = Strategies(NVLINK4, {
        Strategy.NCCL: AllReduce(lambda x: (sums.append(x), x)[1]),
        Strategy.ONESHOT: AllReduce(lambda x: oneshot.all_reduce(x, workspace)),
        Strategy.TWOSHOT: AllReduce(lambda x: twoshot.all_reduce(x, workspace)),
    })  # fmt: skip
    candidates = StrategyCandidates(strategies)
    sweep = Sweep.from_text(NVLINK4, tokens="1,2,4,8,16", hidden="512", fusions="NONE", strategies="NCCL,ONESHOT,TWOSHOT")
    tasks, _ = sweep.plan()
    progress: list[tuple[int, int]] = []
    with comm_compiled.only(90, device=1):  # of which no kernel is compiled yet
        compiled = warmup.warm_up(tasks, candidates, Solo(), CPU, 2, lambda *each: progress.append(each))
        assert 2 <= compiled < len(tasks) / 2
        assert progress[-1] == (compiled, compiled)
        assert not sums  # NCCL alone has no kernel
        before = heard.count(False)
        for task in tasks:
            candidates.get(task.choice)(*warmup.arguments(task, CPU, Solo())[:2])
    assert heard.count(False) == before == compiled


def test_without_processes_nothing_is_done():
    assert warmup.warm_up([], StrategyCandidates(Strategies(NVLINK4, {})), Solo(), CPU, 1, lambda *_: None) == 0


def test_cores_are_shared_among_ranks(monkeypatch):
    monkeypatch.setattr(warmup.probe, "cores", lambda: 16)
    assert (warmup.compile_processes(2), warmup.compile_processes(4), warmup.compile_processes(16)) == (8, 4, 1)
