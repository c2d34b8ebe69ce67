# SPDX-License-Identifier: Apache-2.0
"""What helpers compile is what ranks run: the same kinds of arguments; and nothing is launched."""

from __future__ import annotations

import json

import pytest
import torch

from phalanx.comm.symmetric import Workspace
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Strategy, choices
from phalanx.tune.ranks import precompile
from phalanx.tune.sweep import Sweep, Task

CPU = torch.device("cpu")


def test_a_likeness_has_every_field_that_a_kernel_sees():
    ranks = {"rank": 1, "world": 2, "addresses": (1 << 40, 1 << 41), "half": 4096, "turn": torch.zeros(2, dtype=torch.int32)}
    ranks |= {"board": torch.zeros(4096, 2, dtype=torch.int64), "sms": 132, "ptx": 90, "memory": (object(),)}
    real = Workspace(**ranks)
    likeness = precompile._likeness(json.loads(json.dumps(precompile._plain(real))), CPU)
    for name, value in ranks.items():
        if name == "memory":
            continue
        made = getattr(likeness, name)
        if isinstance(value, torch.Tensor):
            assert (made.dtype, made.shape) == (value.dtype, value.shape)
        else:
            assert made == value


@pytest.mark.parametrize("fusion", Fusion)
def test_arguments_of_every_fusion(fusion):
    x, asked = precompile._tensors(Task("bf16", fusion, 3, 128, choices(fusion)[0]), CPU)
    assert (x.shape, x.dtype) == ((3, 128), torch.bfloat16)
    assert (asked is None) == (fusion is Fusion.NONE)
    if asked is not None:
        assert Fusion.of(asked.quant, token_scale=asked.scale is None, keep_norm=asked.keep_norm) is fusion


def test_each_kernel_is_compiled_once():
    pytest.importorskip("triton")
    from tests.comm import compiled

    planned, _ = Sweep.of(Fingerprint(90, "nvlink", 4), tokens="1,2,4,8,16,32,64,128", hidden="512,4096").plan()
    tasks = [task for task in planned if not task.choice.unfused]  # what follows the sum runs on CPU here, and takes its time
    built = precompile._stand_in(Fingerprint(90, "nvlink", 4), compiled.workspace(4, 90))
    firsts = precompile.distinct(tasks, built, CPU)
    assert tasks[1] == firsts[0]  # after NCCL, which has no kernel
    assert len(firsts) < len(tasks) / 3
    assert set(firsts) < set(tasks)
    assert precompile.distinct(firsts, built, CPU) == firsts
    kinds = {(task.choice.strategy, task.fusion) for task in firsts}
    assert kinds == {(strategy, fusion) for strategy in (Strategy.ONESHOT, Strategy.TWOSHOT) for fusion in Fusion}


def test_cores_are_shared_among_ranks(monkeypatch):
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda _: set(range(16)))
    assert (precompile.helpers(2), precompile.helpers(4), precompile.helpers(16)) == (7, 3, 0)
