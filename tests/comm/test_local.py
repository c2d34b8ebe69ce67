# SPDX-License-Identifier: Apache-2.0
"""In-process ranks: right, in rank order, the same bits everywhere, and never a hang."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm.group import Group, ResidualRmsNorm, Solo
from phalanx.comm.local import LocalWorld, Standstill


def test_sums_are_in_rank_order_and_round_once() -> None:
    """In bf16 256 + 1 + 1 + 1 is 256 when each addition rounds, and 260 when the sum does (259 is no bf16)."""
    values = torch.tensor([256.0, 1.0, 1.0, 1.0])
    sums = LocalWorld(4).run(lambda group: group.all_reduce(values[group.rank].bfloat16().expand(2, 8).clone()))
    assert all(torch.equal(total, torch.full((2, 8), 260.0, dtype=torch.bfloat16)) for total in sums)


def test_a_fusion_is_the_sum_then_the_norm() -> None:
    torch.manual_seed(0)
    parts, residual, weight = torch.randn(3, 5, 16), torch.randn(5, 16), torch.rand(16)
    fused = LocalWorld(3).run(lambda group: group.all_reduce(parts[group.rank].clone(), ResidualRmsNorm(residual, weight, 1e-5)))
    total = residual + parts.sum(0)
    expected = torch.nn.functional.rms_norm(total, (16,), weight, 1e-5)
    for norm, new_residual in fused:
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(new_residual, total)
        assert torch.equal(norm, fused[0][0])


def test_gather_broadcast_and_messages() -> None:
    def act(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        local = torch.full((2, 3), float(group.rank))
        columns, rows = group.all_gather(local), group.all_gather(local, dim=0)
        broadcast = group.broadcast(local.clone(), source=2)
        group.send(local, (group.rank + 1) % group.size)
        local.fill_(-1.0)  # once sent, the sender's tensor is its own again
        received = group.receive(torch.empty(2, 3), (group.rank - 1) % group.size)
        group.barrier()
        return columns, rows, broadcast, received

    for rank, (columns, rows, broadcast, received) in enumerate(LocalWorld(3).run(act)):
        assert columns.tolist() == [[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2
        assert rows.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2 + [[2.0] * 3] * 2
        assert broadcast.tolist() == [[2.0] * 3] * 2
        assert received.tolist() == [[float((rank - 1) % 3)] * 3] * 2


def test_all_to_all_and_reduce_scatter() -> None:
    def act(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        numbered = torch.tensor([[10.0 * group.rank + to] for to in range(3) for _ in range(2)])
        values = torch.tensor([256.0, 1.0, 2.0])[group.rank].bfloat16().expand(6, 8).clone()
        return group.all_to_all(numbered), group.reduce_scatter(values)

    for rank, (received, total) in enumerate(LocalWorld(3).run(act)):
        assert received.flatten().tolist() == [10.0 * source + rank for source in range(3) for _ in range(2)]
        assert total.shape == (2, 8)
        assert (total == 260.0).all()  # 259 rounded once; 256 + 1 is 256 in bf16, and then 258


def test_many_rounds_repeat_to_the_bit() -> None:
    torch.manual_seed(1)
    parts = torch.randn(4, 50, 7)

    def act(group: Group) -> torch.Tensor:
        return torch.stack([group.all_reduce(parts[group.rank, i : i + 1].clone()) for i in range(50)])

    world = LocalWorld(4)
    first = world.run(act)
    assert all(torch.equal(other, first[0]) for other in first + world.run(act))


def test_an_error_of_one_rank_frees_the_others() -> None:
    def act(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("rank 1 has its own trouble")
        group.barrier()

    world = LocalWorld(3)
    with pytest.raises(KeyError, match="own trouble"):
        world.run(act)
    assert world.run(lambda group: group.rank) == [0, 1, 2]


def test_a_standstill_is_an_error() -> None:
    world = LocalWorld(2)
    with pytest.raises(Standstill, match="1 have ended"):
        world.run(lambda group: group.barrier() if group.rank == 0 else None)
    with pytest.raises(Standstill, match="2 ranks wait"):
        world.run(lambda group: group.receive(torch.empty(1), 1 - group.rank))


def test_ranks_that_disagree_are_told() -> None:
    world = LocalWorld(2)
    with pytest.raises(ValueError, match="different collectives"):
        world.run(lambda group: group.all_reduce(torch.zeros(group.rank + 1, 4)))
    with pytest.raises(ValueError, match="different collectives"):
        world.run(lambda group: group.all_reduce(torch.zeros(4)) if group.rank else group.all_gather(torch.zeros(4)))
    with pytest.raises(ValueError, match=r"sent \[3\] torch.float32, and x is \[2\]"):
        world.run(lambda group: group.receive(torch.empty(2), 1) if group.rank == 0 else group.send(torch.empty(3), 0))
    with pytest.raises(IndexError):
        world.run(lambda group: group.send(torch.empty(1), 2))
    with pytest.raises(ValueError, match="at least 1"):
        LocalWorld(0)


def test_a_world_of_one_is_solo() -> None:
    x = torch.randn(3, 8)
    fusion = ResidualRmsNorm(torch.randn(3, 8), torch.rand(8), 1e-6)
    (norm, residual), total = LocalWorld(1).run(lambda group: (group.all_reduce(x.clone(), fusion), group.all_reduce(x.clone())))[0]
    solo = Solo()
    assert torch.equal(total, solo.all_reduce(x))
    assert torch.equal(norm, solo.all_reduce(x, fusion)[0])
    assert torch.equal(residual, solo.all_reduce(x, fusion)[1])
