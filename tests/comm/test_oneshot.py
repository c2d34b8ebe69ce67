# SPDX-License-Identifier: Apache-2.0
"""One-shot's launches cover every message, and its kernels compile. That they are right, `test_symmetric_gpu` shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import oneshot
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import BOARD_PLACES
from phalanx.kernels.scaled_tensors import Unscaled

NUM_SMS = 132
"""Capability and ranks, the same for both tests: each compiles plain kernels, and the second finds those of the first."""


def sound(launch: oneshot.OneshotLaunch) -> None:
    assert launch.programs >= 1
    assert launch.warps in (1, 2, 4, 8, 16, 32)
    assert launch.block & (launch.block - 1) == 0
    assert launch.block >= 32 * launch.warps  # otherwise two threads would read, and clear, one vector


@given(st.integers(1, 1 << 24))
def test_a_sum_is_covered(vectors: int) -> None:
    launch = oneshot.flat_launch(vectors, NUM_SMS)
    sound(launch)
    assert launch.loop or launch.programs * launch.block >= vectors
    assert (launch.programs - 1) * launch.block < vectors


@given(st.integers(1, 20_000), st.integers(1, 4096), st.integers(2, 8), st.booleans())
def test_rows_are_covered(rows: int, pitch: int, world: int, whole_rows: bool) -> None:
    launch = oneshot.row_launch(rows, pitch, world, NUM_SMS, whole_rows=whole_rows)
    sound(launch)
    if launch.splits > 1:
        assert not whole_rows
        assert launch.splits * launch.block >= pitch
        assert launch.programs == rows * launch.splits <= min(BOARD_PLACES, 4 * NUM_SMS)
        assert launch.block % 4 == 0  # whole blocks of 16 elements, which share an NVFP4 scale
    else:
        assert launch.block >= pitch
        assert launch.loop == (launch.programs < rows)


@pytest.mark.parametrize(("sm", "world"), [(80, 2), (90, 8), (100, 4)])
def test_kernels_compile(sm: int, world: int) -> None:
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    one = torch.ones(())
    norms = [(3, "none", None), (3, "fp8", None), (3, "fp8", one), (3, "nvfp4", one)]
    launches = comm_compiled.launches(oneshot, world, sm, [(1, 8), (3, 1008), (700, 8192)], norms)
    names = [name for name, _, _ in launches]
    assert names[:3] == ["oneshot"] * 3
    assert set(names[3:]) == ({"oneshot_norm"} if world == 2 else {"oneshot_norm", "oneshot_norm_split"})
    for name, _, kernel in launches:
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (sm >= 90)
        assert ("e4m3x2" in kernel.asm["ptx"]) == (name != "oneshot" and sm >= 90 and "fp8" in str(kernel.src.constants))
        assert "local" not in kernel.asm["ptx"].split(".reg")[0]


@pytest.mark.parametrize(("sm", "world"), [(90, 4), (100, 4)])
def test_kernels_that_apply_scales_compile(sm: int, world: int) -> None:
    """Loads of a vector of 16-bit values bring two vectors of scales along; the rest is as without."""
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    sums, norms = [(3, 1008), (700, 8192)], [(3, "none", None), (3, "fp8", None), (600, "none", None)]
    plain = comm_compiled.launches(oneshot, world, sm, sums, norms)
    with_scales = comm_compiled.launches(oneshot, world, sm, sums, norms, scales=True)
    loads = 2 if comm_compiled.DTYPES[sm].itemsize == 2 else 1
    for left, right in zip(plain, with_scales, strict=True):
        assert left[:2] == right[:2]
        more = right[2].asm["ptx"].count("ld.global.v4.b32") - left[2].asm["ptx"].count("ld.global.v4.b32")
        assert more > 0
        assert more % loads == 0
        assert comm_compiled.fused(right) == comm_compiled.fused(left), "a part is rounded before it is added up"
        if sm >= 90:  # a row's scale is written by a kernel before, a column's by none
            early, late = right[2].asm["ptx"].split("griddepcontrol.wait")
            assert ("ld.global.b32" in early, "ld.global.b32" in late) == (False, True)


def test_messages_beyond_the_workspace_go_in_chunks() -> None:
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    space = comm_compiled.workspace(8, 90, 1 << 20)
    x = torch.zeros(100, 8192, dtype=torch.bfloat16)
    with comm_compiled.only(90) as launches:
        oneshot.all_reduce(x, space)
        assert len(launches) == -(-x.nbytes // (16 * space.oneshot_vectors)) > 1
        launches.clear()
        outputs = oneshot.all_reduce_norm(x, ResidualRmsNorm(x, x[0], 1e-5), space)
        assert len(launches) == -(-100 // (space.oneshot_vectors // 1024)) > 1
        launches.clear()
        output = Unscaled(x, torch.ones(100, 1), torch.ones(8192))
        oneshot.all_reduce(output, space)
        assert len(launches) == -(-100 // (space.oneshot_vectors // 1024)) > 1  # chunks of rows
        oneshot.all_reduce_norm(output, ResidualRmsNorm(x, x[0], 1e-5), space)
        assert len({kernel.hash for name, _, kernel in launches if name == "oneshot"}) == 1, "chunks of one kernel"
    assert [out.shape for out in outputs] == [x.shape, x.shape]
