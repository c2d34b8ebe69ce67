# SPDX-License-Identifier: Apache-2.0
"""Strategies keep TensorRT-LLM's numbers; a choice reads its own name."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import INCUMBENT, TENSORRT_LLM, Choice, Strategy, choices, numeric_class


def test_numbers_are_the_incumbents():
    names = ["NCCL", "MIN_LATENCY", "UB", "AUTO", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC", "SYMM_MEM"]
    numbers = {strategy.name: int(strategy) for strategy in Strategy}
    assert numbers == {name: number for number, name in enumerate(names)} | {"RS_NORM_AG": 64, "GEMM_RS": 65}
    assert [strategy.name for strategy in TENSORRT_LLM] == names


@pytest.mark.parametrize("sm", [0, 90])
def test_names_round_trip(sm):
    for fusion in (Fusion.NONE, Fusion.RESIDUAL_RMS_NORM):
        for choice in choices(fusion):
            assert Choice.parse(choice.name(sm)) == choice
    assert INCUMBENT.name(0) == "GLOO"
    assert Choice.parse("NCCL+UNFUSED") == INCUMBENT
    for choice in choices(Fusion.RESIDUAL_RMS_NORM, Caller.GEMM):
        assert Choice.parse(choice.name(sm)) == choice
    with pytest.raises(OptionError, match="RING"):
        Choice.parse("RING")
    with pytest.raises(OptionError, match="always runs its fusion"):
        Choice.parse("RS_NORM_AG+UNFUSED")


def test_choices():
    assert [str(choice) for choice in choices(Fusion.NONE)] == ["NCCL", "ONESHOT", "TWOSHOT"]
    fused = [str(choice) for choice in choices(Fusion.RESIDUAL_RMS_NORM)]
    assert fused == ["NCCL", "ONESHOT", "TWOSHOT", "ONESHOT+UNFUSED", "TWOSHOT+UNFUSED"]
    assert [str(choice) for choice in choices(Fusion.RESIDUAL_RMS_NORM, Caller.SHARDED)] == [*fused, "RS_NORM_AG"]
    assert [str(choice) for choice in choices(Fusion.RESIDUAL_RMS_NORM, Caller.GEMM)] == [*fused, "RS_NORM_AG", "GEMM_RS"]
    for fusion in Fusion:
        assert fusion.shards or choices(fusion, Caller.GEMM) == choices(fusion)
    assert not INCUMBENT.fuses(Fusion.RESIDUAL_RMS_NORM)
    assert Choice(Strategy.ONESHOT).fuses(Fusion.RESIDUAL_RMS_NORM)
    assert not Choice(Strategy.ONESHOT).fuses(Fusion.NONE)


def test_a_quantized_wire_is_another_class():
    assert numeric_class(Strategy.LOWPRECISION) != numeric_class(Strategy.NCCL) == numeric_class(Strategy.TWOSHOT)
