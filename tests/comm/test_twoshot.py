# SPDX-License-Identifier: Apache-2.0
"""Two-shot's launches cover every message and run all at once, and its kernels compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import twoshot

NUM_SMS = 132
"""Capability and ranks, the same for both tests: each compiles plain kernels, and the second finds those of the first."""


def sound(launch: twoshot.TwoshotLaunch) -> None:
    assert 1 <= launch.movers <= launch.programs
    assert launch.warps in (1, 2, 4, 8, 16, 32)
    for block in (launch.flat, launch.block or launch.flat):
        assert block & (block - 1) == 0
        assert block >= 32 * launch.warps  # otherwise two threads would read, and clear, one vector
    # All programs run at once: a multiprocessor has 2048 threads and 65536 registers.
    per_sm = -(-launch.programs // NUM_SMS)
    assert per_sm * launch.warps * 32 <= 2048
    assert per_sm == 1 or (launch.registers or 255) * launch.warps * 32 * per_sm <= 65536


@given(st.integers(1, 1 << 24), st.integers(2, 8))
def test_a_sum_is_covered(vectors: int, world: int) -> None:
    sound(twoshot.flat_launch(vectors, world, NUM_SMS))


@given(st.integers(1, 20_000), st.integers(1, 4096), st.integers(2, 8))
def test_rows_are_covered(rows: int, pitch: int, world: int) -> None:
    launch = twoshot.row_launch(rows, pitch, world, NUM_SMS)
    sound(launch)
    assert launch.block >= pitch


@pytest.mark.parametrize(("sm", "world"), [(80, 2), (90, 8), (100, 2)])
def test_kernels_compile(sm: int, world: int) -> None:
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    one = torch.ones(())
    norms = [(3, "none", None), (3, "fp8", None), (40, "fp8", one), (1100, "nvfp4", one)]
    launches = comm_compiled.launches(twoshot, world, sm, [(1, 8), (3, 1008), (2048, 8192)], norms)
    assert {name for name, _, _ in launches} == {"twoshot", "twoshot_norm"}
    for _, grid, kernel in launches:
        per_sm = -(-grid[0] // NUM_SMS)
        metadata = kernel.metadata
        assert metadata.shared * per_sm <= 200 << 10
        if per_sm > 1:
            assert f".maxnreg {metadata.maxnreg}" in kernel.asm["ptx"]


@pytest.mark.parametrize(("sm", "world"), [(90, 4), (100, 2)])
def test_kernels_that_apply_scales_compile(sm: int, world: int) -> None:
    """Each load of values brings its loads of scales along; the rest is as without."""
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    sums, norms = [(3, 1008), (900, 8192)], [(3, "none", None), (40, "fp8", torch.ones(())), (300, "fp8", None)]
    plain = comm_compiled.launches(twoshot, world, sm, sums, norms)
    with_scales = comm_compiled.launches(twoshot, world, sm, sums, norms, scales=True)
    loads = 2 if comm_compiled.DTYPES[sm].itemsize == 2 else 1
    for left, right in zip(plain, with_scales, strict=True):
        assert left[:2] == right[:2]
        more = right[2].asm["ptx"].count("ld.global.v4.b32") - left[2].asm["ptx"].count("ld.global.v4.b32")
        assert more == loads * world  # a share for each rank
        assert comm_compiled.fused(right) == comm_compiled.fused(left), "a part is rounded before it is added up"
