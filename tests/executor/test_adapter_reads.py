# SPDX-License-Identifier: Apache-2.0
"""An adapter is there once every rank has read it, or none."""

from __future__ import annotations

import pytest

from phalanx.errors import StepDiverged, WeightError
from phalanx.executor.adapter_reads import AdapterReads
from phalanx.executor.protocol import AdapterRead


def test_an_adapter_is_complete_when_every_rank_has_answered():
    reads = AdapterReads(3)
    reads.begin(1)
    reads.begin(2)
    for rank in (0, 2):
        reads.record(AdapterRead(rank, 1))
    reads.record(AdapterRead(0, 2))
    assert reads.completed() == []
    reads.record(AdapterRead(1, 1))
    assert reads.completed() == [(1, None)]
    assert reads.completed() == []


def test_the_first_error_names_its_rank():
    reads = AdapterReads(2)
    reads.begin(7)
    reads.record(AdapterRead(1, 7, WeightError("a file is gone", next="download it").to_wire()))
    assert reads.completed() == []
    reads.record(AdapterRead(0, 7))
    ((key, error),) = reads.completed()
    assert key == 7
    assert isinstance(error, WeightError)
    assert str(error) == "rank 1: a file is gone; download it"


@pytest.mark.parametrize(("rank", "key"), [(0, 9), (0, 7)])
def test_an_answer_that_nobody_asked_for_is_an_error(rank, key):
    reads = AdapterReads(2)
    reads.begin(7)
    reads.record(AdapterRead(0, 7))
    with pytest.raises(StepDiverged, match=f"rank 0 has read adapter {key}"):
        reads.record(AdapterRead(rank, key))
