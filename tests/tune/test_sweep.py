# SPDX-License-Identifier: Apache-2.0
"""The plan of a benchmark: the default grid, all choices, in an order that leaves complete columns when it is interrupted."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.grid import HIDDEN, LOOKUP_FUSIONS, TOKENS
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import Choice, Strategy, choices
from phalanx.tune.sweep import ALL_REDUCE, GEMM_ALL_REDUCE, Sweep, Task

NVLINK = Fingerprint(90, "nvlink", 4)


def test_the_guides_grid():
    tasks, skipped = Sweep.from_text(NVLINK).plan()
    assert not skipped
    assert (
        len(tasks)
        == len(set(tasks))
        == len(TOKENS) * len(HIDDEN) * sum(len(choices(fusion, Caller.SHARDED)) for fusion in Fusion)
        + len(HIDDEN) * len([tokens for tokens in TOKENS if tokens >= 64]) * 5 * 7
    )
    assert (TOKENS[0], TOKENS[-1], len(TOKENS)) == (1, 16384, 15)
    assert (HIDDEN[0], HIDDEN[-1], len(HIDDEN)) == (128, 8192, 7)


def test_the_widest_column_and_the_lookup_fusions_come_first():
    tasks, _ = Sweep.from_text(NVLINK).plan()
    column = [task for task in tasks if task.hidden == 8192 and task.fusion in LOOKUP_FUSIONS]
    assert {task.op for task in column} == {ALL_REDUCE, GEMM_ALL_REDUCE}
    assert tasks[: len(column)] == column
    cells = [task.cell for task in tasks]
    assert len(set(cells)) == sum(a != b for a, b in zip(cells, [None, *cells], strict=False))


def test_what_was_asked():
    sweep = Sweep.from_text(
        NVLINK, dtype="float16", tokens="1, 16,256", hidden="5120", fusions="NONE", strategies="GLOO,TWOSHOT,AUTO"
    )
    tasks, _ = sweep.plan()
    assert [str(task) for task in tasks[:3]] == ["fp16 NONE 1x5120 NCCL", "fp16 NONE 1x5120 TWOSHOT", "fp16 NONE 1x5120 AUTO"]
    assert sweep.grid() == {"dtype": "fp16", "tokens": [1, 16, 256], "hidden": [5120], "fusions": ["NONE"]}
    assert all(Task.parse(str(task)) == task for task in [*tasks, *Sweep.from_text(NVLINK, auto=True).plan()[0]])


def test_layers_are_measured_by_every_strategy_where_gemm_rs_is():
    """So that a cell is decided by comparable times; only where each rank has a tile of rows, and the fusion allows it."""
    size = {"tokens": "32,64", "hidden": "1024", "strategies": "NCCL,TWOSHOT,RS_NORM_AG,GEMM_RS"}
    tasks, skipped = Sweep.from_text(NVLINK, fusions="RESIDUAL_RMS_NORM", **size).plan()
    assert not skipped
    names = ["NCCL", "TWOSHOT", "TWOSHOT+UNFUSED", "RS_NORM_AG"]
    layers = [f"GEMM+{name}" for name in names] + ["GEMM_RS"]
    assert [(task.tokens, task.name()) for task in tasks] == [
        *((n, name) for n in (32, 64) for name in names),
        *((64, x) for x in layers),
    ]
    assert [task.op for task in tasks] == [ALL_REDUCE] * 8 + [GEMM_ALL_REDUCE] * 5
    for fusion in ("NONE", "RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4"):
        assert {task.choice.strategy for task in Sweep.from_text(NVLINK, fusions=fusion, **size).plan()[0]} == {
            Strategy.NCCL,
            Strategy.TWOSHOT,
        }
    without = Sweep.from_text(NVLINK, fusions="RESIDUAL_RMS_NORM", **size | {"strategies": "NCCL,RS_NORM_AG"}).plan()[0]
    assert {task.op for task in without} == {ALL_REDUCE}
    _, skipped = Sweep.from_text(Fingerprint(90, "pcie", 4), fusions="RESIDUAL_RMS_NORM", **size).plan()
    assert {task.choice.strategy for task in skipped} == {Strategy.TWOSHOT, Strategy.RS_NORM_AG, Strategy.GEMM_RS}


def test_what_is_left_out_says_why():
    sweep = Sweep.from_text(NVLINK, tokens="1,2048", hidden="1000,8192", max_bytes=1 << 20)
    tasks, skipped = sweep.plan()
    assert {task.bytes > 1 << 20 for task in tasks} == {False}
    assert "32.0 MiB is more than --max_mib 1" in skipped[Task("bf16", Fusion.NONE, 2048, 8192, Choice(Strategy.NCCL))]
    assert "multiple of 16" in skipped[Task("bf16", Fusion.RESIDUAL_RMS_NORM_QUANT_NVFP4, 1, 1000, Choice(Strategy.NCCL))]
    _, alone = Sweep.from_text(Fingerprint(90, "pcie", 4), tokens="1", hidden="128", fusions="NONE").plan()
    assert {str(task.choice) for task in alone} == {"ONESHOT", "TWOSHOT"}


def test_a_cpu_times_no_layer_that_takes_minutes():
    size = {"tokens": "64,256", "hidden": "512,8192", "fusions": "RESIDUAL_RMS_NORM"}
    tasks, skipped = Sweep.from_text(Fingerprint(0, "shm", 2), **size).plan()
    assert {(task.tokens, task.hidden) for task in tasks if task.op == GEMM_ALL_REDUCE} == {(64, 512), (256, 512)}
    assert {(task.tokens, task.hidden, task.op) for task in skipped} == {(n, 8192, GEMM_ALL_REDUCE) for n in (64, 256)}
    assert "a GEMM of 17.2 GFLOP takes too long on a CPU" in skipped[next(task for task in skipped if task.tokens == 256)]
    assert not Sweep.from_text(NVLINK, **size).plan()[1]


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": "0"}, {"tokens": "1,1"}, {"tokens": ""}, {"tokens": "1.5"}, {"hidden": "-8"}, {"hidden": "9999999999"},
        {"fusions": "RMS"}, {"strategies": "RING"}, {"dtype": "int4"}, {"strategies": "NCCL,GLOO"},
        {"strategies": "LOWPRECISION"}, {"strategies": "NCCL,MNNVL"},
    ],
)  # fmt: skip
def test_bad_options(bad):
    with pytest.raises(OptionError):
        Sweep.from_text(NVLINK, **bad)


def test_one_rank_has_nothing_to_reduce():
    with pytest.raises(OptionError, match="at least 2"):
        Sweep.from_text(Fingerprint(90, "nvlink", 1))
