# SPDX-License-Identifier: Apache-2.0
"""Each row has one owner; a tensor of which the rest means nothing is not read as one, and is made whole from its owners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.comm.local import LocalWorld
from phalanx.comm.rows import OwnedRows, own_rows, whole
from tests.comm.rows.poisoned import poisoned

NAN = float("nan")


@given(st.integers(0, 300), st.integers(1, 70), st.integers(1, 8))
def test_each_row_has_one_owner(tokens: int, at_once: int, world: int) -> None:
    owners = [own_rows(tokens, at_once, rank, world) for rank in range(world)]
    assert sorted(row for mine in owners for rows in mine for row in rows) == list(range(tokens))


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
    owned = OwnedRows.of(torch.randn(4, 8), 4)
    with pytest.raises(TypeError):
        touch(owned)


def test_what_it_is_may_be_asked() -> None:
    owned = OwnedRows.of(torch.randn(4, 8, dtype=torch.bfloat16), 4)
    assert (owned.shape, owned.dtype, owned.device.type, owned.is_cuda) == ((4, 8), torch.bfloat16, "cpu", False)
    assert "[4, 8]" in repr(owned)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 11, 13])
@pytest.mark.parametrize("world", [2, 3])
def test_it_is_made_whole_from_its_owners(tokens: int, world: int) -> None:
    wanted = torch.randn(tokens, 16)

    def act(group: Group) -> torch.Tensor:
        held = torch.full_like(wanted, NAN)
        for rows in own_rows(tokens, 5, group.rank, group.size):
            held[rows.start : rows.stop] = wanted[rows.start : rows.stop]
        return whole(OwnedRows.of(held, 5), group)

    for found in LocalWorld(world).run(act):
        assert torch.equal(found, wanted)


def test_no_rows_are_a_tensor_at_once() -> None:
    held = torch.empty(0, 8)
    assert LocalWorld(1).run(lambda group: whole(OwnedRows.of(held, 4), group) is held) == [True]


def test_it_flows_where_no_gradients_are_made() -> None:
    with torch.inference_mode():
        owned = OwnedRows.of(torch.ones(4, 8), 4)
        assert (owned.shape, owned.dtype, owned.at_once) == ((4, 8), torch.float32, 4)
        with pytest.raises(TypeError, match="rows that other ranks own"):
            torch.add(owned, 1)
        assert torch.equal(owned.held, torch.ones(4, 8))


def test_a_whole_tensor_stays_as_it_is() -> None:
    x = torch.randn(3, 4)
    assert LocalWorld(1).run(lambda group: whole(x, group) is x) == [True]


def test_a_group_makes_it_whole_for_what_no_owner_can_do() -> None:
    """keep_norm, and callers that take no owned rows back."""
    x, residual, weight = torch.randn(2, 7, 32), torch.randn(7, 32), torch.rand(32)
    plain = ResidualRmsNorm(residual, weight, 1e-5, "fp8", keep_norm=True)

    def act(base: Group) -> tuple[torch.Tensor, ...]:
        group = poisoned(base)
        owned = group.all_reduce(x[base.rank], ResidualRmsNorm(residual, weight, 1e-5, may_own=True))[-1]
        assert isinstance(owned, OwnedRows)
        kept = group.all_reduce(x[base.rank], ResidualRmsNorm(owned, weight, 1e-5, "fp8", keep_norm=True, may_own=True))
        last = group.all_reduce(x[base.rank], ResidualRmsNorm(owned, weight, 1e-5))
        assert group.calls == {
            "TWOSHOT+OWNED/RESIDUAL_RMS_NORM": 1,
            "TWOSHOT/RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE": 1,
            "TWOSHOT/RESIDUAL_RMS_NORM": 1,
        }
        return (*kept, *last)

    total = x[0] + x[1]
    once = finish(total, ResidualRmsNorm(residual, weight, 1e-5))[-1]
    wanted = (*finish(total, ResidualRmsNorm(once, weight, 1e-5, plain.quant, keep_norm=True)),)
    wanted += (*finish(total, ResidualRmsNorm(once, weight, 1e-5)),)
    for found in LocalWorld(2).run(act):
        for left, right in zip(found, wanted, strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_products_land_only_where_that_leaves_owners_as_they_are() -> None:
    """A residual's owners change once at most: from a whole tensor, or when a product is handed over whole."""
    x, residual, weight = torch.randn(2, 7, 32), torch.randn(7, 32), torch.rand(32)

    def act(base: Group) -> list[torch.Tensor]:
        group, outputs, held = poisoned(base, lands_from=3), list[torch.Tensor](), residual
        for lands in (True, True, False, True):
            fusion = ResidualRmsNorm(held, weight, 1e-5, may_own=True)
            spread = group.spread(7, 32, fusion) if lands else None
            if spread is None:
                norm, held = group.all_reduce(x[base.rank], fusion)
            else:
                for rows, out in spread.pieces:
                    out.copy_(x[base.rank][rows])
                norm, held = spread.finish()
            outputs.append(norm)
        assert group.calls == {"TWOSHOT+LANDED/RESIDUAL_RMS_NORM": 2, "TWOSHOT+OWNED/RESIDUAL_RMS_NORM": 2}
        return [*outputs, whole(held, group)]

    wanted, held = [], residual
    for _ in range(4):
        norm, held = finish(x[0] + x[1], ResidualRmsNorm(held, weight, 1e-5))
        wanted.append(norm)
    for found in LocalWorld(2).run(act):
        for left, right in zip(found, [*wanted, held], strict=True):
            assert torch.equal(left, right)


def test_only_whoever_takes_owned_rows_back_is_told_where_to_write() -> None:
    residual = torch.randn(7, 32)
    asked = ResidualRmsNorm(residual, residual[0], 1e-5, may_own=True)

    def act(base: Group) -> None:
        group = poisoned(base, lands_from=3)
        assert group.spread(2, 32, replace(asked, residual=residual[:2])) is None
        assert group.spread(7, 32, replace(asked, may_own=False)) is None
        assert group.spread(7, 32, replace(asked, weight=residual[0].bfloat16())) is None
        assert poisoned(base, owned_from=8, lands_from=3).spread(7, 32, asked) is None
        found = group.spread(7, 32, asked)
        assert found is not None
        assert sorted((rows.start, rows.stop) for rows, _ in found.pieces) == [(0, 4), (4, 7)]

    LocalWorld(2).run(act)
