# SPDX-License-Identifier: Apache-2.0
"""A challenger wins by more than the noise; neighbours agree where noise allows, and nowhere else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import TableError
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import INCUMBENT, Choice, Strategy, choices
from phalanx.tune.decide import UNSAMPLED, decide, noise, ranges
from phalanx.tune.sweep import GEMM_ALL_REDUCE, Task
from tests.support.tune_benchmarks import NVLINK2, bench

ONE, TWO = Choice(Strategy.ONESHOT), Choice(Strategy.TWOSHOT)


def row(*cells, hidden=128, fusion=Fusion.NONE):
    """{task: us} from (tokens, {choice: us})."""
    return {Task("bf16", fusion, tokens, hidden, c): us for tokens, measured in cells for c, us in measured.items()}


def chosen(table, tokens, hidden=128, fusion=Fusion.NONE):
    return table.lookup("bf16", fusion, tokens, hidden)


def test_noise():
    assert noise(None, 100.0) == UNSAMPLED * 100
    assert noise([5.0] * 9, 5.0) == 0
    assert noise([9.0, 10.0, 11.0] * 3, 10.0) == pytest.approx(1.2533 * 1.4826 / 3)


def test_a_challenger_must_beat_the_noise():
    quiet = {Task("bf16", Fusion.NONE, 1, 128, c): [us] * 9 for c, us in ((INCUMBENT, 10.0), (ONE, 9.8))}
    loud = {task: [us[0] * (1 + 0.1 * k) for k in range(-4, 5)] for task, us in quiet.items()}
    times = row((1, {INCUMBENT: 10.0, ONE: 9.8}))
    assert chosen(decide(times, NVLINK2, samples=quiet), 1).strategy is Strategy.ONESHOT
    assert chosen(decide(times, NVLINK2, samples=loud), 1).strategy is Strategy.NCCL
    assert chosen(decide(times, NVLINK2), 1).strategy is Strategy.NCCL
    assert chosen(decide(row((1, {INCUMBENT: 10.0, ONE: 9.0})), NVLINK2), 1).strategy is Strategy.ONESHOT
    # One percent is noise whatever the samples say: it does not repeat from day to day.
    close = {Task("bf16", Fusion.NONE, 1, 128, c): [us] * 9 for c, us in ((INCUMBENT, 10.0), (ONE, 9.95))}
    assert chosen(decide(row((1, {INCUMBENT: 10.0, ONE: 9.95})), NVLINK2, samples=close), 1).strategy is Strategy.NCCL


def test_a_flicker_within_the_noise_is_smoothed():
    win = {INCUMBENT: 10.0, ONE: 5.0, TWO: 5.1}
    flicker = {INCUMBENT: 10.0, ONE: 5.1, TWO: 5.0}
    table = decide(row((1, win), (2, flicker), (4, win), (8, flicker), (16, win)), NVLINK2)
    assert len(table.sections[0].hidden_ranges[0].spans) == 1
    # A tie with the incumbent between two clear wins goes with its neighbours; by itself it stays the incumbent's.
    tie = {INCUMBENT: 5.0, ONE: 5.0, TWO: 9.0}
    assert chosen(decide(row((1, win), (2, tie), (4, win)), NVLINK2), 2).strategy is Strategy.ONESHOT
    assert chosen(decide(row((2, tie)), NVLINK2), 2).strategy is Strategy.NCCL


def test_a_change_beyond_the_noise_stays():
    table = decide(row((1, {ONE: 5.0, TWO: 9.0}), (2, {ONE: 9.0, TWO: 5.0}), (4, {ONE: 5.0, TWO: 9.0})), NVLINK2)
    assert [span.choice for span in table.sections[0].hidden_ranges[0].spans] == [ONE, TWO, ONE]


def test_rows_agree_where_noise_allows():
    clear, tie = {INCUMBENT: 20.0, TWO: 5.0, ONE: 9.0}, {INCUMBENT: 20.0, ONE: 5.0, TWO: 5.05}
    times = row((1, clear), (2, clear)) | row((1, tie), (2, tie), hidden=256)
    table = decide(times, NVLINK2)
    assert chosen(table, 2, 256).strategy is Strategy.TWOSHOT


def test_the_change_is_where_the_times_cross():
    table = decide(row((64, {ONE: 10.0, TWO: 20.0}), (128, {ONE: 40.0, TWO: 30.0})), NVLINK2)
    spans = table.sections[0].hidden_ranges[0].spans
    assert [(span.first, span.last) for span in spans] == [(64, 96), (97, 128)]
    # Without both times at both sizes, the nearer one by ratio.
    table = decide(row((64, {ONE: 10.0}), (128, {TWO: 30.0})), NVLINK2)
    assert [(span.first, span.last) for span in table.sections[0].hidden_ranges[0].spans] == [(64, 90), (91, 128)]


def test_far_apart_is_unmeasured():
    times = row((1, {ONE: 1.0}), (4096, {ONE: 1.0})) | row((1, {ONE: 1.0}), hidden=8192)
    table = decide(times, NVLINK2)
    assert chosen(table, 1).source == chosen(table, 4096).source == chosen(table, 1, 8192).source == "table"
    assert chosen(table, 64).source == chosen(table, 1, 1024).source == chosen(table, 8192).source == "seed"
    assert ranges([1, 2, 64], 16, lambda low, high: low) == [(1, 1), (2, 2), (64, 64)]


def test_unfused_and_what_can_be_said_of_it():
    norm = Fusion.RESIDUAL_RMS_NORM
    unfused = Choice(Strategy.TWOSHOT, unfused=True)
    times = row((1, {INCUMBENT: 10.0, ONE: 8.0, unfused: 5.0}), fusion=norm)
    entry = chosen(decide(times, NVLINK2), 1, fusion=norm)
    assert (entry.strategy, entry.fused) == (Strategy.TWOSHOT, False)
    entry = chosen(decide(times, NVLINK2, expressible=True), 1, fusion=norm)
    assert (entry.strategy, entry.fused) == (Strategy.ONESHOT, True)


def test_auto_takes_no_part():
    auto = Choice(Strategy.AUTO)
    assert chosen(decide(row((1, {auto: 1.0, ONE: 2.0})), NVLINK2), 1).strategy is Strategy.ONESHOT
    with pytest.raises(TableError, match="no times"):
        decide(row((1, {auto: 1.0})), NVLINK2)


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_never_worse_than_the_noise(luck):
    dice = random.Random(luck)
    times = {}
    for hidden in (128, 256, 512):
        for tokens in (1, 2, 4, 8, 16):
            times |= row((tokens, {c: dice.uniform(1, 1.2) for c in choices(Fusion.NONE)}), hidden=hidden)
    table = decide(times, NVLINK2)
    for task in times:
        entry = chosen(table, task.tokens, task.hidden)
        here = {t.choice: us for t, us in times.items() if t.cell == task.cell}
        best = min(here.values())
        assert entry.source == "table"
        assert here[Choice(entry.strategy)] <= best + 2 * UNSAMPLED * 1.5 * here[Choice(entry.strategy)]


def test_a_whole_benchmark():
    benchmark = bench()
    table = decide(benchmark.times, NVLINK2, samples=benchmark.samples)
    assert [(section.dtype, section.fusion) for section in table.sections] == [
        ("bf16", Fusion.NONE), ("bf16", Fusion.RESIDUAL_RMS_NORM),
    ]  # fmt: skip
    row_ = table.sections[0].hidden_ranges[-1]
    assert row_.spans[0].choice.strategy is Strategy.ONESHOT
    assert row_.spans[0].gain > 1.5


NORM, SHARDED, GEMM_RS = Fusion.RESIDUAL_RMS_NORM, Choice(Strategy.RS_NORM_AG), Choice(Strategy.GEMM_RS)


def layers(*cells):
    """{task: us} of NORM from (tokens, {choice: us of the all-reduce}, {choice: us with the GEMM}), exactly repeatable."""
    times = {}
    for tokens, plain, gemm in cells:
        times |= {Task("bf16", NORM, tokens, 128, c): us for c, us in plain.items()}
        times |= {Task("bf16", NORM, tokens, 128, c, GEMM_ALL_REDUCE): us for c, us in gemm.items()}
    return times, {task: [us] * 9 for task, us in times.items()}


def runs(table, tokens):
    """What each caller gets, and from where."""
    entries = [table.lookup("bf16", NORM, tokens, 128, caller) for caller in Caller]
    assert {entry.source for entry in entries} == {"table"}
    return [entry.strategy for entry in entries]


def test_each_caller_gets_the_fastest_of_what_it_allows():
    times, samples = layers(
        (64, {INCUMBENT: 20, ONE: 10, TWO: 12, SHARDED: 11}, {INCUMBENT: 30, ONE: 20, TWO: 22, SHARDED: 21, GEMM_RS: 25}),
        (256, {INCUMBENT: 40, ONE: 30, TWO: 20, SHARDED: 15}, {INCUMBENT: 60, ONE: 50, TWO: 40, SHARDED: 35, GEMM_RS: 36}),
        (1024, {INCUMBENT: 90, ONE: 95, TWO: 60, SHARDED: 40}, {INCUMBENT: 190, ONE: 195, TWO: 160, SHARDED: 140, GEMM_RS: 120}),
    )
    table = decide(times, NVLINK2, samples=samples)
    assert runs(table, 64) == [Strategy.ONESHOT] * 3
    assert runs(table, 256) == [Strategy.TWOSHOT, Strategy.RS_NORM_AG, Strategy.RS_NORM_AG]
    assert runs(table, 1024) == [Strategy.TWOSHOT, Strategy.RS_NORM_AG, Strategy.GEMM_RS]
    plain = decide(times, NVLINK2, samples=samples, expressible=True)
    assert {section.caller for section in plain.sections} == {Caller.REPLICATED}


def test_gemm_rs_is_compared_with_what_the_layer_runs_otherwise():
    """Times with the GEMM against each other, of the choice that the section of SHARDED made; within the noise it stays."""
    plain = {INCUMBENT: 40, ONE: 30, TWO: 20, SHARDED: 15}
    with_gemm = {INCUMBENT: 60, ONE: 50, TWO: 40, SHARDED: 35}
    for us, strategy in ((34.9, Strategy.RS_NORM_AG), (34.0, Strategy.GEMM_RS), (39.0, Strategy.RS_NORM_AG)):
        times, samples = layers((256, plain, with_gemm | {GEMM_RS: us}))
        assert runs(decide(times, NVLINK2, samples=samples), 256)[2] is strategy
    times, samples = layers((256, plain, {TWO: 40, GEMM_RS: 38}))  # what the layer runs was skipped
    assert runs(decide(times, NVLINK2, samples=samples), 256)[2] is Strategy.GEMM_RS
    times, samples = layers((256, plain, {GEMM_RS: 38}))  # nothing to compare it with: the seed's threshold stays
    assert [section.caller for section in decide(times, NVLINK2, samples=samples).sections] == [Caller.REPLICATED, Caller.SHARDED]


def test_a_fusion_without_sequence_parallel_times_leaves_layers_to_the_seed():
    table = decide(row((64, {INCUMBENT: 20.0, ONE: 10.0}), (256, {INCUMBENT: 20.0, ONE: 10.0}), fusion=NORM), NVLINK2)
    assert {section.caller for section in table.sections} == {Caller.REPLICATED}
    assert table.lookup("bf16", NORM, 256, 128, Caller.SHARDED).source == "seed"
    assert table.lookup("bf16", NORM, 64, 128, Caller.SHARDED).source == "table"
