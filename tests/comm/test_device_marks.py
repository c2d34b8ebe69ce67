# SPDX-License-Identifier: Apache-2.0
"""What kernels tell of a rank's place: in Triton's interpreter, and compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.comm import oneshot, twoshot
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.sequence_parallel.rs_norm_ag import RsNormAg
from phalanx.comm.symmetric import BOARD_PLACES, SymmetricWorkspace
from phalanx.layout.rank_progress import (
    ALL_GATHER,
    ALL_REDUCE,
    BEHIND_LAYERS,
    UNCOUNTED,
    Call,
    CallMarker,
    Place,
    RankProgress,
    unpack,
)
from tests.support.kernels_interpreted import interpreted, let_loops_begin_anywhere

pytest.importorskip("triton")
from tests.support.comm_compiled import DTYPES, only, workspace
from tests.support.kernels_signals import replace_signals

pytestmark = pytest.mark.usefixtures("forked_python")

CPU = torch.device("cpu")
HALF = 64
"""Vectors in one half of a workspace."""
ADDITION = "red.relaxed.gpu.global.add.u64"
SUM = Call(1, "tp", "all_reduce")


def small_workspace(marks: Any) -> SymmetricWorkspace:
    memory = [torch.full((2 * HALF * 4,), -1, dtype=torch.int32) for _ in range(2)]
    epoch, board = torch.zeros(2, dtype=torch.int32), torch.zeros(BOARD_PLACES, 2, dtype=torch.int64)
    addresses = tuple(part.data_ptr() for part in memory)
    return SymmetricWorkspace(0, 2, addresses, HALF, epoch, board, 132, 0, tuple(memory), marks.of_kernel)


def place(progress: RankProgress) -> tuple[Place, list[Call]]:
    """As after a look at a late step."""
    progress.device.look()  # type: ignore[union-attr]
    return progress.place, unpack(progress.place.calls)


def interpret() -> None:
    from phalanx.comm import device_marks

    let_loops_begin_anywhere()
    replace_signals(oneshot, twoshot, device_marks)
    progress = RankProgress()
    marks = progress.device = device_marks.DeviceMarks(progress, CPU)
    space, marker, x = small_workspace(marks), progress.marker("tp"), torch.ones(4, 8)
    twoshot.all_reduce(x, space)  # as in a warm-up: of no step
    marker.call(ALL_REDUCE, lambda: oneshot.all_reduce(x, space))
    assert place(progress) == (Place(0, 0, 0, False, False, b"", True), [])

    progress.begin(7)
    assert place(progress)[0] == Place(7, 0, 0, False, False, b"", True)
    progress.enter_layer(0)
    marker.call(ALL_REDUCE, lambda: twoshot.all_reduce(x, space))
    long = torch.ones(HALF, 8)
    assert len(long.view(-1)) > 4 * space.oneshot_vectors, "it runs in chunks"
    marker.call(ALL_REDUCE, lambda: oneshot.all_reduce(long, space))
    at, calls = place(progress)
    assert calls == [SUM, SUM]
    assert (at.begun, at.layer, at.inside, at.queued) == (7, 1, True, False)
    progress.layer = BEHIND_LAYERS
    marker.call(ALL_GATHER, marks.mark)  # as before a call of NCCL
    marker.call(ALL_GATHER, lambda: None)  # launches nothing
    assert place(progress)[1] == [SUM, SUM, Call(BEHIND_LAYERS, "tp", "all_gather")] == unpack(progress.packed_calls)

    queue_ahead(progress, marker, space)
    for step, count in ((9, (1 << 32) - 2), (10, -2), (11, (1 << 63) - 2)):  # days later: the halves of the word pass their ends
        marks._words[0] = count
        progress.begin(step)
        assert progress.place == Place(step, 7, 0, False, False, b"", False), "nobody has looked"
        for _ in range(3):
            marker.call(ALL_REDUCE, lambda: oneshot.all_reduce(x, space))
        assert (len(place(progress)[1]), progress.place.on_device) == (3, True)
    between_two_stores(progress, marks)


def queue_ahead(progress: RankProgress, marker: CallMarker, space: SymmetricWorkspace) -> None:
    """A graph is queued, and the next step behind it: the device is where its kernels are."""
    x, launches = torch.ones(4, 8), []
    with progress.capturing() as captured:
        for layer in range(3):
            progress.enter_layer(layer)
            marker.enter(ALL_REDUCE)
            launches.append(progress.take_call())  # as a kernel bakes it in
            marker.leave()
    assert len(captured) == 3
    progress.finished = 7
    progress.begin(8)
    progress.replay(captured)

    def run(call: int) -> None:
        progress.pending = call
        oneshot.all_reduce(x, space)

    run(launches[0])
    at, calls = place(progress)
    assert calls == [SUM]
    assert (at.begun, at.finished, at.queued) == (8, 7, True)
    run(launches[2])  # the device left out one that the host has queued
    assert place(progress) == (Place(8, 7, BEHIND_LAYERS, False, False, b"", False), []), "unknown"


def between_two_stores(progress: RankProgress, marks: Any) -> None:
    """Of `begin_step`: the count before step 12 is there, and the device's step is still 11, of which the host knows all calls."""
    progress.begin(12)
    marks._words[1] = 11
    assert len(place(progress)[1]) == 3
    marks._words[1] = 12
    assert place(progress)[1] == []


def test_in_the_interpreter() -> None:
    assert interpreted("tests.comm.test_device_marks").strip() == "checked"


class Marks:
    """As of a GPU that is not there."""

    def __init__(self) -> None:
        self.call = 0

    def of_kernel(self) -> tuple[int, int]:
        return 0x7F00_0000_1000, self.call


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_a_kernel_is_compiled_once_for_all_calls(sm: int) -> None:
    marks = Marks()
    space, x = replace(workspace(2, sm), marks=marks.of_kernel), torch.zeros(4, 4096, dtype=DTYPES[sm])
    fusion = ResidualRmsNorm(x, x[0], 1e-5)
    for run in (oneshot.all_reduce_norm, twoshot.all_reduce_norm, lambda *args: RsNormAg(args[-1]).all_reduce_norm(*args[:-1])):
        with only(sm) as launches:
            for call in (UNCOUNTED, 0, (1 << 8) << 4, (BEHIND_LAYERS << 8 | 0x21) << 4):
                marks.call = call
                run(x, fusion, space)  # type: ignore[operator]
        assert len({id(compiled) for _, _, compiled in launches}) == 1
        ptx = launches[0][2].asm["ptx"]
        assert ptx.count(ADDITION) == 1
        assert "sys.global.b64" not in ptx, "a store to the host would keep the kernel from its end"
    with only(sm) as launches:
        oneshot.all_reduce_norm(x, fusion, workspace(2, sm))
    assert ADDITION not in launches[0][2].asm["ptx"], "a group that tells nothing has no such addition"


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_the_kernels_of_one_warp_compile(sm: int) -> None:
    from phalanx.comm.device_marks import begin_step, mark_before

    with only(sm) as launches:
        for call in (UNCOUNTED, 0, 16, (BEHIND_LAYERS << 8) << 4):
            mark_before[(1,)](0x7F00_0000_1000, call, SM=sm, num_warps=1)
        for step in (0, 1, 16, 99):
            begin_step[(1,)](torch.zeros(4, dtype=torch.int64), step, num_warps=1)
    mark, begin = launches[0][2].asm["ptx"], launches[-1][2].asm["ptx"]
    assert len({id(compiled) for _, _, compiled in launches}) == 2
    assert mark.count(ADDITION) == 1
    assert begin.index("st.global.b64") < begin.index("release"), "the step comes behind its count"


if __name__ == "__main__":
    interpret()
    print("checked")
