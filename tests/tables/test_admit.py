# SPDX-License-Identifier: Apache-2.0
"""What cannot run is refused with its reason; NCCL runs nearly everything."""

from __future__ import annotations

import pytest

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.admit import admit
from phalanx.tables.message import Caller, Fusion, Message
from phalanx.tables.strategy import SEQUENCE_PARALLEL, SUPPORTED, Strategy

NVLINK = Fingerprint(90, "nvlink", 4)


def message(fusion=Fusion.NONE, hidden=5120, world=4, caller=Caller.REPLICATED, tokens=17, dtype="bf16"):
    return Message("all_reduce", fusion, dtype, tokens, hidden, world, caller)


@pytest.mark.parametrize("strategy", [strategy for strategy in SUPPORTED if strategy not in SEQUENCE_PARALLEL])
@pytest.mark.parametrize("world", range(2, 9))
def test_admitted(strategy, world):
    assert admit(strategy, message(world=world), Fingerprint(90, "nvlink", world)) is None
    assert admit(strategy, message(world=world), Fingerprint(0, "shm", world)) is None


def test_refused():
    assert "cannot reach" in admit(Strategy.ONESHOT, message(), Fingerprint(90, "pcie", 4))
    assert "cannot reach" in admit(Strategy.TWOSHOT, message(), Fingerprint(90, "nodes", 4))
    assert admit(Strategy.NCCL, message(), Fingerprint(90, "nodes", 4)) is None
    assert "multiple of 8" in admit(Strategy.ONESHOT, message(hidden=1004), NVLINK)
    assert admit(Strategy.NCCL, message(hidden=1004), NVLINK) is None
    assert "multiple of 16" in admit(Strategy.NCCL, message(Fusion.RESIDUAL_RMS_NORM_QUANT_NVFP4, hidden=1000), NVLINK)
    assert "2 to 8 ranks" in admit(Strategy.ONESHOT, message(world=9), Fingerprint(90, "nvlink", 9))
    assert "not implemented" in admit(Strategy.MNNVL, message(), NVLINK)


@pytest.mark.parametrize("fusion", Fusion)
@pytest.mark.parametrize("caller", Caller)
@pytest.mark.parametrize("world", range(2, 9))
def test_sequence_parallelism_needs_a_caller_and_a_fusion_that_allow_it(fusion, caller, world):
    can = fusion is Fusion.RESIDUAL_RMS_NORM or fusion.quant == "fp8"
    assert fusion.shards == can
    for dtype in ("bf16", "fp16", "fp32"):
        for link, sm in (("nvlink", 90), ("pcie_p2p", 89), ("shm", 0)):
            for strategy in SEQUENCE_PARALLEL:
                why = admit(strategy, message(fusion, 5120, world, caller, 64, dtype), Fingerprint(sm, link, world))
                allows = caller is Caller.GEMM or (caller is Caller.SHARDED and strategy is Strategy.RS_NORM_AG)
                assert (why is None) == (can and allows), why


def test_sequence_parallelism_is_refused():
    norm = Fusion.RESIDUAL_RMS_NORM
    assert "cannot reach" in admit(Strategy.RS_NORM_AG, message(norm, caller=Caller.GEMM), Fingerprint(90, "pcie", 4))
    assert "multiple of 16" in admit(Strategy.RS_NORM_AG, message(norm, hidden=1000, caller=Caller.GEMM), NVLINK)
    assert "2 to 8 ranks" in admit(Strategy.GEMM_RS, message(norm, world=9, caller=Caller.GEMM), Fingerprint(90, "nvlink", 9))
    assert "needs the GEMM" in admit(Strategy.GEMM_RS, message(norm, caller=Caller.SHARDED), NVLINK)
    without = admit(Strategy.GEMM_RS, message(norm, tokens=9, caller=Caller.GEMM), NVLINK)
    assert "9 tokens leave the last of 4 ranks without any" in without
    assert admit(Strategy.RS_NORM_AG, message(norm, tokens=1, caller=Caller.GEMM), NVLINK) is None
