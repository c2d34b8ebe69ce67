# SPDX-License-Identifier: Apache-2.0
"""One rank's measuring, without processes: what is verified, what is timed, and how samples are combined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.group import Solo, finish
from phalanx.comm.sequence_parallel import ShardedResidual
from phalanx.comm.strategies import AllReduce, Strategies
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.ranks import verify
from phalanx.tune.ranks.candidates import StrategyCandidates
from phalanx.tune.ranks.layer import RowParallelLayer, in_features
from phalanx.tune.ranks.measure import Method, Rank
from phalanx.tune.sweep import GEMM_ALL_REDUCE, Task

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
    expected = [built._decide(tokens, 128, "bf16", Fusion.NONE).strategy for tokens in (1, 4096)]
    assert ran == expected


NORM = Fusion.RESIDUAL_RMS_NORM


class Sharded:
    """RS_NORM_AG of one rank. wrong: it spoils its own rows of the residual."""

    def __init__(self, *, wrong=False):
        self.wrong, self.residuals = wrong, []

    def chunk_rows(self, hidden, dtype):
        return 64

    def all_reduce_norm(self, x, fusion):
        residual = fusion.residual
        self.residuals.append(isinstance(residual, ShardedResidual))
        local = residual.local if self.residuals[-1] else residual
        norm, new = finish(x, replace(fusion, residual=local))
        return norm, ShardedResidual.of(new + self.wrong, 64)


def sharded_rank(sharded):
    strategies = Strategies(detect_fingerprint(CPU, 2), {Strategy.RS_NORM_AG: AllReduce(lambda x: x, rs_norm_ag=sharded)})
    return Rank(Solo(), CPU, StrategyCandidates(strategies, Solo()), Method(calls=1, replays=3))


def test_a_sharded_residual_is_verified_and_then_timed_as_behind_any_layer_but_the_first():
    sharded = Sharded()
    assert isinstance(sharded_rank(sharded).measure(task(Choice(Strategy.RS_NORM_AG), NORM)), list)
    assert sharded.residuals[0] is False
    assert set(sharded.residuals[1:]) == {True}
    assert sharded_rank(Sharded(wrong=True)).measure(task(Choice(Strategy.RS_NORM_AG), NORM)).startswith("wrong: residual: ")


@pytest.mark.parametrize("fusion", [fusion for fusion in Fusion if fusion.shards])
@pytest.mark.parametrize("unfused", [False, True])
def test_a_layer_runs_its_gemm_and_the_choice(fusion, unfused):
    """Over one rank, whose sum is what it has: the weights that are verified, and others that are timed."""
    ran = []
    one = rank(lambda x: (ran.append("sum"), x)[1], lambda x, fusion: (ran.append("fused"), finish(x, fusion))[1])
    one.candidates.group = Solo()
    with torch.inference_mode():
        assert isinstance(one.measure(replace(task(Choice(Strategy.ONESHOT, unfused), fusion), op=GEMM_ALL_REDUCE)), list)
    assert set(ran) == {"sum" if unfused else "fused"}
    layer = one._cell.layer
    assert layer._linear.method.weight.float().std() > 0.3
    layer.verified()
    assert (layer._linear.method.weight.float().sum(dim=1) == 1).all()


def test_a_layer_that_no_model_has_is_left_out():
    layer = RowParallelLayer(verify.arguments(Fusion.RESIDUAL_RMS_NORM_QUANT_FP8, 4, 128, torch.float16, CPU, 1), 0, Solo())
    assert layer.refusal(80) == "sm80 has no FP8 GEMM, so no norm there feeds one"
    assert layer.refusal(90) is layer.refusal(0) is None
    assert layer.gemm_rs_refusal() == "an FP8 GEMM writes to other ranks in bf16 alone"
    assert [in_features(*size) for size in ((8192, 4), (128, 8), (5120, 3), (64, 8))] == [2048, 16, 1696, 16]


def test_gemm_rs_without_room_is_left_out():
    class NoRoom:
        def targets(self, tokens, hidden, fusion):
            return None

    strategies = Strategies(detect_fingerprint(CPU, 2), {Strategy.GEMM_RS: AllReduce(lambda x: x, gemm_rs=NoRoom())})
    one = Rank(Solo(), CPU, StrategyCandidates(strategies, Solo()), Method())
    why = one.measure(replace(task(Choice(Strategy.GEMM_RS), NORM), op=GEMM_ALL_REDUCE))
    assert why == "the memory of GEMM_RS has no room for 1024 bytes"
