# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import timeit
from array import array

import pytest

from phalanx.layout.rank_progress import ALL_GATHER, ALL_REDUCE, BEHIND_LAYERS, SEND, Call, DevicePlace, RankProgress, unpack


def test_the_calls_of_a_step_are_told_one_by_one() -> None:
    progress = RankProgress()
    tp, pp = progress.marker("tp"), progress.marker("pp")
    tp.enter(ALL_REDUCE)
    tp.leave()
    assert not progress.calls, "no step has begun"
    progress.begin(4)
    progress.layer = 81
    tp.enter(ALL_REDUCE)
    tp.enter(ALL_GATHER)  # a part of the all-reduce
    assert progress.inside == 2
    tp.leave()
    tp.leave()
    progress.layer = BEHIND_LAYERS
    pp.enter(SEND)
    calls = unpack(progress.packed_calls)
    assert calls == [Call(81, "tp", "all_reduce"), Call(BEHIND_LAYERS, "pp", "send")]
    assert [call.words for call in calls] == [
        "all_reduce of the tensor-parallel group in layer 80", "send of the pipeline behind the layers",
    ]  # fmt: skip
    progress.begin(5)
    assert (progress.packed_calls, progress.inside, progress.step) == (b"", 0, 5)


class Device:
    at: DevicePlace | None = None

    def begin(self, step: int) -> None:
        self.at = DevicePlace(step, 0, 0)

    def read(self) -> DevicePlace | None:
        return self.at


def test_calls_that_the_host_has_not_queued_are_an_unknown_place() -> None:
    progress = RankProgress()
    device = progress.device = Device()
    progress.begin(3)
    call = 1 << 8 | ALL_REDUCE
    progress.replay(array("I", [call, call]))
    device.at = DevicePlace(3, 2, 2 * call << 4)
    assert (progress.place.on_device, unpack(progress.place.calls)) == (True, [Call(1, "tp", "all_reduce")] * 2)
    for unknown in (None, DevicePlace(3, 3, 3 * call << 4), DevicePlace(3, 2, call << 4)):
        device.at = unknown
        assert (progress.place.on_device, progress.place.calls, progress.place.begun) == (False, b"", 3)
    progress.finished = 3
    progress.begin(4)
    device.at = DevicePlace(3, 2, call << 4)  # it has ended, and the next has not begun
    assert (progress.place.on_device, progress.place.begun, progress.place.calls) == (True, 3, b"")


def test_what_no_rank_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank makes such a call"):
        unpack(b"\xff\xff\x00\x00")


def test_a_call_costs_less_than_a_microsecond() -> None:
    """A layer has two, and takes a millisecond: less than 0.2 percent."""
    progress = RankProgress()
    progress.begin(1)
    marker = progress.marker("tp")

    def call() -> None:
        marker.enter(ALL_REDUCE)
        marker.leave()

    assert min(timeit.repeat(call, number=1000, repeat=20)) / 1000 < 1e-6
