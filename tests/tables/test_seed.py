# SPDX-License-Identifier: Apache-2.0
"""The seed decides by exact whole numbers, everywhere, and scales to other numbers of ranks."""

from __future__ import annotations

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.seed import MAX_A, MAX_B, MAX_BYTES, MAX_C, MAX_TOKENS, Latency, Seed, default
from phalanx.tables.strategy import INCUMBENT, Choice, Strategy


def test_never_beyond_64_bits():
    assert Latency(MAX_A, MAX_B, MAX_C).fs(2**62, 2**80) == MAX_A + MAX_B * MAX_BYTES + MAX_C * MAX_TOKENS < 2**64
    assert Latency.of_us(2.5, 3e-6, 0.001) == Latency(2_500_000_000, 3000, 1_000_000)
    assert Latency.of_us(-1.0, 1.0, 0.0) == Latency(0, MAX_B, 0)


@pytest.mark.parametrize("link", LINKS)
def test_default_covers_every_fusion(link):
    seed = default(Fingerprint(90, link, 4))
    choice, us = seed.choose("bf16", Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4, 1, 8192)
    assert us > 0
    if not Fingerprint(90, link, 4).peers_reach:
        assert all(set(models) == {INCUMBENT} for models in seed.models.values())
    else:
        assert choice.strategy is Strategy.ONESHOT


def test_large_messages_leave_one_shot():
    seed = default(Fingerprint(90, "nvlink", 8))
    assert seed.choose("bf16", Fusion.NONE, 1, 8192)[0] == Choice(Strategy.ONESHOT)
    assert seed.choose("bf16", Fusion.NONE, 16384, 8192)[0] != Choice(Strategy.ONESHOT)


def test_scaling():
    seed = default(Fingerprint(90, "nvlink", 2))
    four = seed.scaled(2, 4, "four")
    one = Choice(Strategy.ONESHOT)
    assert four.models[Fusion.NONE][one].b == 3 * seed.models[Fusion.NONE][one].b
    assert four.models[Fusion.NONE][INCUMBENT].b == round(1.5 * seed.models[Fusion.NONE][INCUMBENT].b)
    assert four.models[Fusion.NONE][one].a > seed.models[Fusion.NONE][one].a
    assert four.origin == "four"


def test_ties_go_to_the_first():
    same = Latency(1, 1, 1)
    models = {fusion: {Choice(Strategy.TWOSHOT): same, INCUMBENT: same} for fusion in Fusion}
    assert Seed("", models).choose("fp32", Fusion.NONE, 3, 8)[0] == Choice(Strategy.TWOSHOT)


def test_faulty_seeds():
    models = {fusion: {INCUMBENT: Latency(1, 1, 1)} for fusion in Fusion}
    with pytest.raises(TableError, match="no model for RESIDUAL_RMS_NORM"):
        Seed("", {Fusion.NONE: models[Fusion.NONE]})
    with pytest.raises(TableError, match="outside"):
        Seed("", models | {Fusion.NONE: {INCUMBENT: Latency(-1, 0, 0)}})
