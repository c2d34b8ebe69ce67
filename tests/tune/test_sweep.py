# SPDX-License-Identifier: Apache-2.0
"""The plan of a benchmark: the default grid, all choices, in an order that leaves complete columns when it is interrupted."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.grid import HIDDEN, LOOKUP_FUSIONS, TOKENS
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice, Strategy, choices
from phalanx.tune.sweep import Sweep, Task

NVLINK = Fingerprint(90, "nvlink", 4)


def test_the_guides_grid():
    tasks, skipped = Sweep.from_text(NVLINK).plan()
    assert not skipped
    assert len(tasks) == len(set(tasks)) == len(TOKENS) * len(HIDDEN) * sum(len(choices(fusion)) for fusion in Fusion)
    assert (TOKENS[0], TOKENS[-1], len(TOKENS)) == (1, 16384, 15)
    assert (HIDDEN[0], HIDDEN[-1], len(HIDDEN)) == (128, 8192, 7)


def test_the_widest_column_and_the_lookup_fusions_come_first():
    tasks, _ = Sweep.from_text(NVLINK).plan()
    column = [task for task in tasks if task.hidden == 8192 and task.fusion in LOOKUP_FUSIONS]
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
    assert all(Task.parse(str(task)) == task for task in tasks)


def test_what_is_left_out_says_why():
    sweep = Sweep.from_text(NVLINK, tokens="1,2048", hidden="1000,8192", max_bytes=1 << 20)
    tasks, skipped = sweep.plan()
    assert {task.bytes > 1 << 20 for task in tasks} == {False}
    assert "32.0 MiB is more than --max_mib 1" in skipped[Task("bf16", Fusion.NONE, 2048, 8192, Choice(Strategy.NCCL))]
    assert "multiple of 16" in skipped[Task("bf16", Fusion.RESIDUAL_RMS_NORM_QUANT_NVFP4, 1, 1000, Choice(Strategy.NCCL))]
    _, alone = Sweep.from_text(Fingerprint(90, "pcie", 4), tokens="1", hidden="128", fusions="NONE").plan()
    assert {str(task.choice) for task in alone} == {"ONESHOT", "TWOSHOT"}


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
