# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.comm.group import Group, ResidualRmsNorm, Solo
from phalanx.comm.local import LocalWorld
from phalanx.comm.marked_group import MarkedGroup, marked_groups, unmarked
from phalanx.comm.torch_group import Groups
from phalanx.layout.rank_progress import OPERATIONS, DevicePlace, RankProgress, unpack

CPU = torch.device("cpu")


class Silent:
    """A device that never comes anywhere."""

    def begin(self, step: int) -> None: ...

    def read(self) -> DevicePlace:
        return DevicePlace(0, 0, 0)


def test_groups_of_several_ranks_are_marked_where_the_device_says_where_it_is() -> None:
    pair = LocalWorld(2)

    def marked(group: Group) -> None:
        groups = Groups(group, Solo(), group)
        on_cpu = marked_groups(groups, RankProgress(), CPU)
        assert isinstance(on_cpu.tp, MarkedGroup)
        assert isinstance(on_cpu.pp, Solo)
        assert (on_cpu.tp.rank, on_cpu.tp.size) == (group.rank, 2)
        assert unmarked(on_cpu.tp) is group
        assert unmarked(group) is group
        assert marked_groups(groups, RankProgress(), torch.device("cuda")) is groups
        progress = RankProgress()
        progress.device = Silent()
        on_gpu = marked_groups(replace(groups, ends=group), progress, torch.device("cuda"))
        assert isinstance(on_gpu.tp, MarkedGroup)
        assert on_gpu.ends is group, "it has a stream of its own"

    pair.run(marked)


def test_every_operation_gives_what_the_group_gives_and_is_recorded() -> None:
    def calls(group: Group) -> list[str]:
        progress = RankProgress()
        progress.begin(1)
        marked = MarkedGroup(group, progress.marker("tp"))
        x = torch.arange(8.0).view(2, 4) + group.rank
        assert torch.equal(marked.all_reduce(x.clone()), group.all_reduce(x.clone()))
        fusion = ResidualRmsNorm(torch.ones(2, 4), torch.ones(4), 1e-6)
        for ours, plain in zip(marked.all_reduce(x.clone(), fusion), group.all_reduce(x.clone(), fusion), strict=True):
            assert torch.equal(ours, plain)
        assert torch.equal(marked.all_gather(x, 0), group.all_gather(x, 0))
        assert torch.equal(marked.all_to_all(x), group.all_to_all(x))
        assert torch.equal(marked.reduce_scatter(x), group.reduce_scatter(x))
        assert torch.equal(marked.broadcast(x.clone(), 1), group.broadcast(x.clone(), 1))
        marked.barrier()
        if group.rank == 0:
            marked.send(x, 1)
        else:
            assert torch.equal(marked.receive(torch.empty(2, 4), 0), x - 1)
        assert marked.gemm_reduce_scatter_targets(2, 4, fusion) is None
        assert progress.inside == 0
        return [call.operation for call in unpack(progress.packed_calls)]

    first, second = LocalWorld(2).run(calls)
    assert first[:-1] == second[:-1]
    assert first == [
        "all_reduce", "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "barrier", "send",
    ]  # fmt: skip
    assert {*first, *second, "expert_exchange"} == set(OPERATIONS)
