# SPDX-License-Identifier: Apache-2.0
"""Launches of rows with owners cover every message and run all at once, chunks fit the workspace, and the kernel compiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.rows import OwnedRows, own_rows, owned
from phalanx.comm.symmetric import Workspace, half_bytes
from phalanx.kernels.reference import Unscaled

SMS = 132
SHAPES = (None, (32, 1, 1), (16, 2, 2), (16, 3, 2), (8, 4, 2))


@given(st.integers(1, 20_000), st.integers(2, 4096), st.integers(2, 8), st.booleans(), st.sampled_from(SHAPES))
def test_rows_are_covered(rows: int, pitch: int, world: int, quantized: bool, shape: tuple[int, int, int] | None) -> None:
    take = -(-pitch // 2) if quantized else pitch
    launch = owned.launch_of(rows, pitch, take, world, SMS, shape)
    assert 1 <= launch.movers <= launch.programs
    assert launch.warps in (1, 2, 4, 8, 16, 32)
    for block in (launch.block, launch.flat, launch.take):
        assert block & (block - 1) == 0
        assert block >= 32 * launch.warps  # otherwise two threads would read, and clear, one vector
    assert launch.block >= pitch
    assert launch.take >= take
    # All programs run at once: a multiprocessor has 2048 threads and 65536 registers.
    per_sm = -(-launch.programs // SMS)
    assert per_sm * launch.warps * 32 <= 2048
    assert per_sm == 1 or (launch.registers or 255) * launch.warps * 32 * per_sm <= 65536


def space(world: int, message_bytes: int) -> Workspace:
    nothing = torch.zeros(2, dtype=torch.int32)
    return Workspace(0, world, (0,) * world, half_bytes(world, message_bytes) // 16, nothing, nothing, SMS, 90)


@given(st.integers(1, 40_000), st.sampled_from([16, 64, 1008, 5120, 8192, 16384]), st.integers(2, 8), st.sampled_from([2, 4]))
def test_a_chunk_fits_whatever_it_becomes(tokens: int, hidden: int, world: int, itemsize: int) -> None:
    """Parts, then norms or e4m3, then scales; a row has the same owner in all modes since none of them is asked."""
    pitch, workspace = hidden * itemsize // 16, space(world, 8192 * hidden * itemsize)
    at_once = owned.rows_at_once(pitch, workspace)
    assert at_once >= world
    assert at_once % world == 0
    for rows in {min(tokens, at_once), (tokens - 1) % at_once + 1}:
        parts = (world - 1) * -(-rows // world) * pitch
        assert parts + rows * pitch <= workspace.half
        assert 16 * (parts + rows * hidden // 16) + 4 * rows <= 16 * workspace.half


def test_owners_by_another_chunk_are_refused() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="by 3 rows"):
        owned.all_reduce_norm(x, ResidualRmsNorm(OwnedRows.of(x, 3), x[0], 1e-5), space(2, 1 << 20))


@pytest.mark.parametrize(("capability", "world"), [(80, 4), (90, 2), (90, 8), (100, 3)])
def test_kernels_compile(capability: int, world: int) -> None:
    pytest.importorskip("triton")
    from tests.comm import compiled

    workspace, dtype = compiled.workspace(world, capability), compiled.DTYPES[capability]
    cases = [(3, "none", None, False), (700, "fp8", None, True), (1100, "fp8", torch.ones(()), True)]
    if dtype == torch.float32:
        cases.append((3, "none", None, True))
    with compiled.only(capability) as launched:
        for tokens, quant, scale, bare in cases:
            x = torch.zeros(tokens, 4096, dtype=dtype)
            product = Unscaled(x, torch.ones(tokens, 1), torch.ones(4096)) if bare else x
            *_, residual = owned.all_reduce_norm(product, ResidualRmsNorm(x, x[0], 1e-5, quant, scale), workspace)
            again = owned.all_reduce_norm(product, ResidualRmsNorm(residual, x[0], 1e-5, quant, scale), workspace)
            assert isinstance(again[-1], OwnedRows)
            assert len(list(own_rows(tokens, again[-1].at_once, 0, world))) == 1
    assert {name for name, _, _ in launched} == {"owned_norm"}
    if dtype == torch.float32:
        assert compiled.fused(launched[0]) == compiled.fused(launched[-1]), "a part is rounded before it is added up"
    for _, grid, made in launched:
        per_sm, ptx = -(-grid[0] // SMS), made.asm["ptx"]
        assert made.metadata.shared * per_sm <= 200 << 10
        assert per_sm == 1 or f".maxnreg {made.metadata.maxnreg}" in ptx
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90)
