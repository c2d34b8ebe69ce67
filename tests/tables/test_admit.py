# SPDX-License-Identifier: Apache-2.0
"""What cannot run is refused with its reason; NCCL runs nearly everything."""

from __future__ import annotations

import pytest

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.admit import admit
from phalanx.tables.message import Fusion, Message
from phalanx.tables.strategy import SUPPORTED, Strategy

NVLINK = Fingerprint(90, "nvlink", 4)


def message(fusion=Fusion.NONE, hidden=5120, world=4):
    return Message("all_reduce", fusion, "bf16", 17, hidden, world)


@pytest.mark.parametrize("strategy", SUPPORTED)
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
