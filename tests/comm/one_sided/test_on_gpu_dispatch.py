# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine in Triton's interpreter, with the launches of `comm`: against plain indexing, for every kind of payload.

Nobody can wait there (`tests.support.kernels_signals`): every rank runs each call twice, of which the second finds what the others
have sent. That ranks wait as they should, `tests.comm.one_sided.test_exchange_gpu` shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.comm.one_sided.on_gpu import GpuOneSided, RegionSizes
from phalanx.comm.symmetric import SymmetricRegion
from tests.support.kernels_interpreted import interpret, let_loops_begin_anywhere
from tests.support.one_sided_cases import EXPERTS, Case

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def without_waiting() -> None:
    import phalanx.comm.one_sided.on_gpu as on_gpu
    from tests.support.kernels_signals import replace_signals

    replace_signals(on_gpu)


def ranks(world: int, rows: int, row_bytes: int, top_k: int, num_sms: int) -> list[GpuOneSided]:
    sizes = RegionSizes.of(world, rows, row_bytes, top_k)
    memory = [torch.full((sizes.total // 4,), -1, dtype=torch.int32) for _ in range(world)]
    addresses, epoch = tuple(part.data_ptr() for part in memory), torch.zeros(2, dtype=torch.int32)
    return [GpuOneSided(SymmetricRegion(rank, world, addresses, epoch, num_sms, 0, tuple(memory)), sizes) for rank in range(world)]


def twice(act: Any, spaces: list[GpuOneSided]) -> list[Any]:
    for space in spaces:
        act(space)
    return [act(space) for space in spaces]


def check(case: Case, num_sms: int) -> None:
    spaces = ranks(case.world, case.rows, case.hidden * case.dtype.itemsize, case.top_k, num_sms)
    assert spaces[0].max_rows == case.rows
    sent = [case.routing(rank) for rank in range(case.world)]
    received = twice(
        lambda space: space.dispatch(case.payload(space.region.rank), sent[space.region.rank], case.rows, EXPERTS), spaces
    )
    for rank, (values, routing) in enumerate(received):
        case.check_dispatch(rank, values, routing)
    sums = twice(
        lambda space: space.combine(
            case.sums(space.region.rank), sent[space.region.rank], received[space.region.rank][1], EXPERTS
        ), spaces,
    )  # fmt: skip
    for rank, out in enumerate(sums):
        case.check_combine(rank, out)


def main() -> None:
    let_loops_begin_anywhere()
    without_waiting()
    check(Case((3, 5), 5, torch.bfloat16), 132)
    check(Case((0, 4), 4, torch.bfloat16, "token"), 132)
    check(Case((1, 0, 2), 3, torch.float32), 1)  # fewer programs than rows
    check(Case((2, 3), 4, torch.float16, "block", hidden=272), 132)
    check(Case((2, 2, 1, 0), 2, torch.bfloat16, "static", top_k=1), 132)
    check(Case((2, 3), 3, torch.bfloat16, "token", top_k=6, to=0), 132)  # one rank takes all


def test_in_the_interpreter() -> None:
    interpret([main])
