# SPDX-License-Identifier: Apache-2.0
"""Each row belongs to one rank; a sharded residual is not read as a tensor, and is unsharded from the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.comm.local import LocalWorld
from phalanx.comm.sequence_parallel import ShardedResidual, rank_rows, unshard
from tests.support.comm_poisoned import poisoned

NAN = float("nan")


@given(st.integers(0, 300), st.integers(1, 70), st.integers(1, 8))
def test_each_row_belongs_to_one_rank(tokens: int, chunk_rows: int, world: int) -> None:
    ranks = [rank_rows(tokens, chunk_rows, rank, world) for rank in range(world)]
    assert sorted(row for own in ranks for rows in own for row in rows) == list(range(tokens))


TOUCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "a sum": lambda x: torch.ones(4, 8) + x,
    "an index": lambda x: x[0],
    "a view": lambda x: x.view(torch.int32),
    "a copy": lambda x: torch.zeros(4, 8).copy_(x),
    "a clone": lambda x: x.clone(),
    "a kernel's pointer": lambda x: x.data_ptr(),
    "its values": lambda x: x.tolist(),
    "a fused kernel": lambda x: finish(torch.ones(4, 8), ResidualRmsNorm(x, torch.ones(8), 1e-5)),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_it_is_not_read_as_a_tensor(touch: Callable[[torch.Tensor], object]) -> None:
    sharded = ShardedResidual.of(torch.randn(4, 8), 4)
    with pytest.raises(TypeError):
        touch(sharded)


def test_what_it_is_may_be_asked() -> None:
    sharded = ShardedResidual.of(torch.randn(4, 8, dtype=torch.bfloat16), 4)
    assert (sharded.shape, sharded.dtype, sharded.device.type, sharded.is_cuda) == ((4, 8), torch.bfloat16, "cpu", False)
    assert "[4, 8]" in repr(sharded)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 11, 13])
@pytest.mark.parametrize("world", [2, 3])
def test_it_is_unsharded_from_the_rows_of_all_ranks(tokens: int, world: int) -> None:
    wanted = torch.randn(tokens, 16)

    def act(group: Group) -> torch.Tensor:
        local = torch.full_like(wanted, NAN)
        for rows in rank_rows(tokens, 5, group.rank, group.size):
            local[rows.start : rows.stop] = wanted[rows.start : rows.stop]
        return unshard(ShardedResidual.of(local, 5), group)

    for unsharded in LocalWorld(world).run(act):
        assert torch.equal(unsharded, wanted)


def test_no_rows_are_a_tensor_at_once() -> None:
    local = torch.empty(0, 8)
    assert LocalWorld(1).run(lambda group: unshard(ShardedResidual.of(local, 4), group) is local) == [True]


def test_it_flows_where_no_gradients_are_made() -> None:
    with torch.inference_mode():
        sharded = ShardedResidual.of(torch.ones(4, 8), 4)
        assert (sharded.shape, sharded.dtype, sharded.chunk_rows) == ((4, 8), torch.float32, 4)
        with pytest.raises(TypeError, match="rows that other ranks hold"):
            torch.add(sharded, 1)
        assert torch.equal(sharded.local, torch.ones(4, 8))


def test_a_tensor_stays_as_it_is() -> None:
    x = torch.randn(3, 4)
    assert LocalWorld(1).run(lambda group: unshard(x, group) is x) == [True]


def test_a_group_unshards_it_for_a_fusion_that_needs_all_rows() -> None:
    """NVFP4, and callers that accept no sharded residual."""
    x, residual, weight = torch.randn(2, 7, 32), torch.randn(7, 32), torch.rand(32)
    plain = ResidualRmsNorm(residual, weight, 1e-5, "nvfp4", torch.tensor(0.02), keep_norm=True)

    def act(base: Group) -> tuple[torch.Tensor, ...]:
        group = poisoned(base)
        sharded = group.all_reduce(x[base.rank], ResidualRmsNorm(residual, weight, 1e-5, accepts_sharded=True))[-1]
        assert isinstance(sharded, ShardedResidual)
        kept = group.all_reduce(x[base.rank], replace(plain, residual=sharded, accepts_sharded=True))
        last = group.all_reduce(x[base.rank], ResidualRmsNorm(sharded, weight, 1e-5))
        assert group.calls == {
            "RS_NORM_AG/RESIDUAL_RMS_NORM": 1,
            "TWOSHOT/RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4": 1,
            "TWOSHOT/RESIDUAL_RMS_NORM": 1,
        }
        return (*kept, *last)

    total = x[0] + x[1]
    once = finish(total, ResidualRmsNorm(residual, weight, 1e-5))[-1]
    wanted = (*finish(total, replace(plain, residual=once)),)
    wanted += (*finish(total, ResidualRmsNorm(once, weight, 1e-5)),)
    for outputs in LocalWorld(2).run(act):
        for left, right in zip(outputs, wanted, strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("scale", [None, torch.tensor(0.02)])
def test_a_norm_that_is_kept_beside_its_fp8_leaves_the_residual_sharded(scale: torch.Tensor | None) -> None:
    """As behind an attention before experts in FP8: in between, no rank gathers the residual."""
    x, residual, weight = torch.randn(2, 7, 32), torch.randn(7, 32), torch.rand(32)
    fusion = ResidualRmsNorm(residual, weight, 1e-5, "fp8", scale, keep_norm=True, accepts_sharded=True)
    name = f"RESIDUAL_RMS_NORM_OUT_QUANT_FP8{'_TOKEN_SCALE' if scale is None else ''}"

    def act(base: Group) -> tuple[torch.Tensor, ...]:
        group = poisoned(base, gemm_rs_min_tokens=3)
        first = group.all_reduce(x[base.rank], fusion)
        second = group.all_reduce(x[base.rank], replace(fusion, residual=first[-1], quant="none", scale=None, keep_norm=False))
        third = group.all_reduce(x[base.rank], replace(fusion, residual=second[-1]))
        assert isinstance(third[-1], ShardedResidual)
        scatter = group.gemm_reduce_scatter_targets(7, 32, fusion)
        assert scatter is not None
        for rows, out in scatter.targets:
            out.copy_(x[base.rank][rows])
        last = scatter.finish()
        assert group.calls == {f"RS_NORM_AG/{name}": 2, "RS_NORM_AG/RESIDUAL_RMS_NORM": 1, f"GEMM_RS/{name}": 1}
        return (*third[:-1], unshard(third[-1], group), *last[:-1], unshard(last[-1], group))

    total, residuals = x[0] + x[1], [residual]
    for _ in range(2):
        residuals.append(total + residuals[-1])
    wanted = (*finish(total, replace(fusion, residual=residuals[-1])), *finish(total, fusion))
    for outputs in LocalWorld(2).run(act):
        for left, right in zip(outputs, wanted, strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_gemm_rs_runs_only_where_the_sharding_stays_the_same() -> None:
    """The sharding of a residual changes once at most: from a tensor, or by an RS_NORM_AG."""
    x, residual, weight = torch.randn(2, 7, 32), torch.randn(7, 32), torch.rand(32)

    def act(base: Group) -> list[torch.Tensor]:
        group, outputs, local = poisoned(base, gemm_rs_min_tokens=3), list[torch.Tensor](), residual
        for gemm_rs in (True, True, False, True):
            fusion = ResidualRmsNorm(local, weight, 1e-5, accepts_sharded=True)
            scatter = group.gemm_reduce_scatter_targets(7, 32, fusion) if gemm_rs else None
            if scatter is None:
                norm, local = group.all_reduce(x[base.rank], fusion)
            else:
                for rows, out in scatter.targets:
                    out.copy_(x[base.rank][rows])
                norm, local = scatter.finish()
            outputs.append(norm)
        assert group.calls == {"GEMM_RS/RESIDUAL_RMS_NORM": 2, "RS_NORM_AG/RESIDUAL_RMS_NORM": 2}
        return [*outputs, unshard(local, group)]

    wanted, local = [], residual
    for _ in range(4):
        norm, local = finish(x[0] + x[1], ResidualRmsNorm(local, weight, 1e-5))
        wanted.append(norm)
    for rank_outputs in LocalWorld(2).run(act):
        for left, right in zip(rank_outputs, [*wanted, local], strict=True):
            assert torch.equal(left, right)


def test_only_a_caller_that_accepts_a_sharded_residual_gets_targets() -> None:
    residual = torch.randn(7, 32)
    fusion = ResidualRmsNorm(residual, residual[0], 1e-5, accepts_sharded=True)

    def act(base: Group) -> None:
        group = poisoned(base, gemm_rs_min_tokens=3)
        assert group.gemm_reduce_scatter_targets(2, 32, replace(fusion, residual=residual[:2])) is None
        assert group.gemm_reduce_scatter_targets(7, 32, replace(fusion, accepts_sharded=False)) is None
        assert group.gemm_reduce_scatter_targets(7, 32, replace(fusion, weight=residual[0].bfloat16())) is None
        assert poisoned(base, sp_min_tokens=8, gemm_rs_min_tokens=3).gemm_reduce_scatter_targets(7, 32, fusion) is None
        scatter = group.gemm_reduce_scatter_targets(7, 32, fusion)
        assert scatter is not None
        assert sorted((rows.start, rows.stop) for rows, _ in scatter.targets) == [(0, 4), (4, 7)]

    LocalWorld(2).run(act)
