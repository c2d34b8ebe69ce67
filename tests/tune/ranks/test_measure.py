# SPDX-License-Identifier: Apache-2.0
"""One rank's measuring, without processes: what is verified, what is timed, and how samples are combined."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.group import Solo
from phalanx.comm.strategies import AllReduce, Strategies
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.ranks.candidates import StrategyCandidates
from phalanx.tune.ranks.measure import Method, Rank
from phalanx.tune.sweep import Task

CPU = torch.device("cpu")
ONE = Choice(Strategy.ONESHOT)


def rank(total=lambda x: x.clone(), norm=None, **method):
    runs = {Strategy.ONESHOT: AllReduce(total, norm)}
    strategies = Strategies(detect_fingerprint(CPU, 2), runs, {Strategy.TWOSHOT: "no shared memory"})
    return Rank(Solo(), CPU, StrategyCandidates(strategies), Method(**{"calls": 3, "replays": 5} | method))


def task(choice=ONE, fusion=Fusion.NONE, tokens=4):
    return Task("bf16", fusion, tokens, 128, choice)


def test_samples():
    samples = rank().measure(task())
    assert len(samples) == 5
    assert all(us > 0 for us in samples)


def test_calls_fit_the_time_that_a_sample_should_take():
    calls = []
    long = rank(lambda x: (calls.append(1), x.clone())[1], calls=50, cpu_sample_us=1.0)
    long.measure(task())
    assert len(calls) == 1 + 2 + 5  # verified, estimated twice, five samples of one call
    calls.clear()
    rank(lambda x: (calls.append(1), x.clone())[1], calls=4, cpu_sample_us=1e9).measure(task())
    assert len(calls) == 1 + 2 + 5 * 4


def test_a_cells_tensors_are_made_once_and_restored():
    inputs = []

    def greedy(x):
        inputs.append(x.clone())
        x.add_(7)  # an in-place collective overwrites its input
        return x - 7

    one = rank(greedy)
    one.measure(task())
    first = one._cell
    one.measure(task(Choice(Strategy.ONESHOT, unfused=True)))
    assert one._cell is first
    assert torch.equal(inputs[0], first.x)
    assert torch.equal(inputs[1], first.x)


def test_left_out_with_the_reason():
    assert rank().measure(task(Choice(Strategy.TWOSHOT))) == "no shared memory"
    assert rank().measure(task(Choice(Strategy.MNNVL))) == "MNNVL is not built here"
    assert rank(lambda x: x + 1).measure(task()).startswith("wrong: sum: ")


@pytest.mark.parametrize("fusion", [fusion for fusion in Fusion if fusion is not Fusion.NONE])
def test_fused_and_unfused_run_what_they_say(fusion):
    ran = []

    def norm(x, fusion):
        from phalanx.comm.group import finish

        ran.append("fused")
        return finish(x, fusion)

    one = rank(lambda x: (ran.append("sum"), x.clone())[1], norm)
    assert isinstance(one.measure(task(fusion=fusion)), list)
    assert set(ran) == {"fused"}
    ran.clear()
    assert isinstance(one.measure(task(Choice(Strategy.ONESHOT, unfused=True), fusion)), list)
    assert set(ran) == {"sum"}


def test_auto_asks_the_machines_table(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    ran = []
    strategies = Strategies(detect_fingerprint(CPU, 2))
    for strategy in (Strategy.NCCL, Strategy.ONESHOT, Strategy.TWOSHOT):
        strategies.runs[strategy] = AllReduce(lambda x, s=strategy: (ran.append(s), x.clone())[1])
    built = StrategyCandidates(strategies)
    for tokens in (1, 4096):
        built.get(Choice(Strategy.AUTO))(torch.zeros(tokens, 128, dtype=torch.bfloat16), None)
    expected = [built._decide(tokens, 128, "bf16", Fusion.NONE, False).strategy for tokens in (1, 4096)]
    assert ran == expected
