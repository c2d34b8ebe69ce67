# SPDX-License-Identifier: Apache-2.0
"""Two-shot's launches cover every message and run all at once, and its kernels compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import twoshot
from phalanx.comm.group import ResidualRmsNorm

SMS = 132


def sound(launch: twoshot.Launch) -> None:
    assert 1 <= launch.movers <= launch.programs
    assert launch.warps in (1, 2, 4, 8, 16, 32)
    for block in (launch.flat, launch.block or launch.flat):
        assert block & (block - 1) == 0
        assert block >= 32 * launch.warps  # otherwise two threads would read, and clear, one vector
    # All programs run at once: a multiprocessor has 2048 threads and 65536 registers.
    per_sm = -(-launch.programs // SMS)
    assert per_sm * launch.warps * 32 <= 2048
    assert per_sm == 1 or (launch.registers or 255) * launch.warps * 32 * per_sm <= 65536


@given(st.integers(1, 1 << 24), st.integers(2, 8))
def test_a_sum_is_covered(vectors: int, world: int) -> None:
    sound(twoshot.flat_launch(vectors, world, SMS))


@given(st.integers(1, 20_000), st.integers(1, 4096), st.integers(2, 8))
def test_rows_are_covered(rows: int, pitch: int, world: int) -> None:
    launch = twoshot.row_launch(rows, pitch, world, SMS)
    sound(launch)
    assert launch.block >= pitch


@pytest.mark.parametrize(("capability", "world"), [(80, 4), (90, 2), (90, 8), (100, 2)])
def test_kernels_compile(capability: int, world: int) -> None:
    pytest.importorskip("triton")
    from tests.comm import compiled

    space = compiled.workspace(world, capability)
    dtype = {80: torch.float16, 90: torch.bfloat16, 100: torch.float32}[capability]
    with compiled.only(capability) as launches:
        for tokens, hidden in ((1, 8), (3, 1008), (2048, 8192)):
            x = torch.zeros(tokens, hidden, dtype=dtype)
            assert twoshot.all_reduce(x, space).shape == x.shape
        for tokens, quant, scale in (
            (3, "none", None),
            (3, "fp8", None),
            (40, "fp8", torch.ones(())),
            (1100, "nvfp4", torch.ones(())),
        ):
            x = torch.zeros(tokens, 4096, dtype=dtype)
            twoshot.all_reduce_norm(x, ResidualRmsNorm(x, x[0], 1e-5, quant, scale), space)
    assert {name for name, _, _ in launches} == {"twoshot", "twoshot_norm"}
    for _, grid, made in launches:
        per_sm = -(-grid[0] // SMS)
        found = made.metadata
        assert found.shared * per_sm <= 200 << 10
        if per_sm > 1:
            assert f".maxnreg {found.maxnreg}" in made.asm["ptx"]


WAYS = ({"ahead": 1}, {"ahead": 2, "spread": True}, {"together": True}, {"flat": 1024, "ahead": 1}, {"movers": 7, "ahead": 3})


@pytest.mark.parametrize("world", [2, 4])
def test_other_ways_compile(world: int) -> None:
    pytest.importorskip("triton")
    from tests.comm import compiled

    space = compiled.workspace(world, 90)
    x = torch.zeros(512, 8192, dtype=torch.bfloat16)
    flat, rows = twoshot.flat_launch(x.numel() // 8, world, SMS), twoshot.row_launch(512, 1024, world, SMS)
    with compiled.only(90) as launches:
        for way in WAYS:
            twoshot.all_reduce(x, space, replace(flat, **way))
        twoshot.all_reduce_norm(x, ResidualRmsNorm(x, x[0], 1e-5), space, replace(rows, ahead=1, spread=True))
    assert len(launches) == len(WAYS) + 1


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 4))
def test_every_block_is_pushed_and_then_summed_once(blocks: int, movers: int, ahead: int) -> None:
    """The walk of `_move`: what a mover waits for, it has pushed for its peers before."""
    pushed: list[int] = []
    summed: list[int] = []
    for first in range(movers):
        mine: list[int] = []
        for block in range(first, blocks + ahead * movers, movers):
            mine += [block] if block < blocks else []
            late = block - ahead * movers
            if late >= 0:
                assert late in mine
                summed.append(late)
        pushed += mine
    assert sorted(pushed) == sorted(summed) == list(range(blocks))


@pytest.mark.parametrize("world", range(2, 9))
def test_spread_blocks_reach_every_peer_in_its_slot(world: int) -> None:
    from phalanx.kernels.signals import slot

    place = getattr(slot, "fn", slot)
    for rank in range(world):
        for block in range(world):
            hops = [1 + (step - 1 + block) % (world - 1) for step in range(1, world)]
            assert sorted(hops) == list(range(1, world))
            assert all(place((rank + hop) % world, rank, world) == world - 1 - hop for hop in hops)
