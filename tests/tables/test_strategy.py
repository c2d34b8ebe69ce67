# SPDX-License-Identifier: Apache-2.0
"""Strategies keep TensorRT-LLM's numbers; a choice reads its own name."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import INCUMBENT, Choice, Strategy, choices, numeric_class


def test_numbers_are_the_incumbents():
    names = ["NCCL", "MIN_LATENCY", "UB", "AUTO", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC", "SYMM_MEM"]
    assert {strategy.name: int(strategy) for strategy in Strategy} == {name: number for number, name in enumerate(names)}


@pytest.mark.parametrize("sm", [0, 90])
def test_names_round_trip(sm):
    for fusion in (Fusion.NONE, Fusion.RESIDUAL_RMS_NORM):
        for choice in choices(fusion):
            assert Choice.parse(choice.name(sm)) == choice
    assert INCUMBENT.name(0) == "GLOO"
    assert Choice.parse("NCCL+UNFUSED") == INCUMBENT
    with pytest.raises(OptionError, match="RING"):
        Choice.parse("RING")


def test_choices():
    assert [str(choice) for choice in choices(Fusion.NONE)] == ["NCCL", "ONESHOT", "TWOSHOT"]
    fused = [str(choice) for choice in choices(Fusion.RESIDUAL_RMS_NORM)]
    assert fused == ["NCCL", "ONESHOT", "TWOSHOT", "ONESHOT+UNFUSED", "TWOSHOT+UNFUSED"]
    assert not INCUMBENT.fuses(Fusion.RESIDUAL_RMS_NORM)
    assert Choice(Strategy.ONESHOT).fuses(Fusion.RESIDUAL_RMS_NORM)
    assert not Choice(Strategy.ONESHOT).fuses(Fusion.NONE)


def test_a_quantized_wire_is_another_class():
    assert numeric_class(Strategy.LOWPRECISION) != numeric_class(Strategy.NCCL) == numeric_class(Strategy.TWOSHOT)
