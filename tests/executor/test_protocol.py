# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest

from phalanx.engine.messages import Step, StepBatch
from phalanx.errors import StepDiverged
from phalanx.executor.protocol import Chain, StepDone, Stop, decode_rank_message, decode_to_rank, encode


def step(number: int) -> Step:
    return Step(number, [StepBatch(released=[number])])


def test_both_ends_of_a_chain_come_to_the_same_digest() -> None:
    engine, rank = Chain(), Chain()
    for number in (1, 2, 3):
        assert rank.open(0, engine.seal(step(number))) == step(number)
        assert rank.digest == engine.digest


def test_the_engine_cannot_leave_a_gap() -> None:
    with pytest.raises(StepDiverged, match="step 2 was submitted"):
        Chain().seal(step(2))


def test_a_rank_sees_a_lost_step() -> None:
    engine, rank = Chain(), Chain()
    engine.seal(step(1))
    with pytest.raises(StepDiverged, match=r"rank 5 received step 2 out of order.*last one was step 0"):
        rank.open(5, engine.seal(step(2)))


def test_a_rank_sees_another_payload() -> None:
    engine, rank = Chain(), Chain()
    header, _ = engine.seal(step(1))
    with pytest.raises(StepDiverged, match=r"rank 5.*digest"):
        rank.open(5, [header, encode(Step(1, [StepBatch(released=[7])]))])


def test_a_rank_that_missed_history_sees_it_in_the_digest() -> None:
    engine, rank = Chain(), Chain()
    engine.seal(step(1))
    rank.open(0, Chain().seal(Step(1, [StepBatch()])))
    with pytest.raises(StepDiverged, match="not received the same steps"):
        rank.open(0, engine.seal(step(2)))


def test_messages_keep_their_kind() -> None:
    assert decode_rank_message(encode(StepDone(1, 2, b"x", 3))) == StepDone(1, 2, b"x", 3)
    assert decode_to_rank(encode(Stop())) == Stop()
    with pytest.raises(msgspec.DecodeError):
        decode_rank_message(b"\x93GET")
