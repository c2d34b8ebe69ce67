# SPDX-License-Identifier: Apache-2.0
"""Launches cover every message and run all at once, chunks fit the workspace, and the kernel compiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.sequence_parallel import ShardedResidual, rank_rows, rs_norm_ag
from phalanx.comm.sequence_parallel.rs_norm_ag import RsNormAg, chunk_rows_of
from phalanx.kernels.scaled_tensors import Unscaled
from tests.support.comm_workspace import NUM_SMS, space

SHAPES = (None, (32, 1, 1), (16, 2, 2), (16, 3, 2), (8, 4, 2))


@given(st.integers(1, 20_000), st.integers(2, 4096), st.integers(2, 8), st.booleans(), st.sampled_from(SHAPES))
def test_rows_are_covered(rows: int, pitch: int, world: int, quantized: bool, shape: tuple[int, int, int] | None) -> None:
    take = -(-pitch // 2) if quantized else pitch
    launch = rs_norm_ag.launch_of(rows, pitch, take, world, NUM_SMS, shape)
    assert 1 <= launch.movers <= launch.programs
    assert launch.warps in (1, 2, 4, 8, 16, 32)
    for block in (launch.block, launch.flat, launch.take):
        assert block & (block - 1) == 0
        assert block >= 32 * launch.warps  # otherwise two threads would read, and clear, one vector
    assert launch.block >= pitch
    assert launch.take >= take
    # All programs run at once: a multiprocessor has 2048 threads and 65536 registers.
    per_sm = -(-launch.programs // NUM_SMS)
    assert per_sm * launch.warps * 32 <= 2048
    assert per_sm == 1 or (launch.registers or 255) * launch.warps * 32 * per_sm <= 65536


@given(st.integers(1, 40_000), st.sampled_from([16, 64, 1008, 5120, 8192, 16384]), st.integers(2, 8), st.sampled_from([2, 4]))
def test_a_chunk_fits_whatever_it_becomes(tokens: int, hidden: int, world: int, itemsize: int) -> None:
    """Parts, then norms or e4m3, then scales; the rank of a row does not depend on the mode."""
    pitch, workspace = hidden * itemsize // 16, space(world, 8192 * hidden * itemsize)
    chunk_rows = chunk_rows_of(pitch, workspace.twoshot_vectors, world)
    assert chunk_rows >= world
    assert chunk_rows % world == 0
    for rows in {min(tokens, chunk_rows), (tokens - 1) % chunk_rows + 1}:
        parts = (world - 1) * -(-rows // world) * pitch
        assert parts + rows * pitch <= workspace.half
        assert 16 * (parts + rows * hidden // 16) + 4 * rows <= 16 * workspace.half


def test_another_sharding_is_refused() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="by 3 rows"):
        RsNormAg(space(2, 1 << 20)).all_reduce_norm(x, ResidualRmsNorm(ShardedResidual.of(x, 3), x[0], 1e-5))


@pytest.mark.parametrize(("sm", "world"), [(80, 2), (90, 8), (100, 3)])
def test_kernels_compile(sm: int, world: int) -> None:
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    workspace, dtype = comm_compiled.workspace(world, sm), comm_compiled.DTYPES[sm]
    cases = [(3, "none", None, False, False), (700, "fp8", None, False, True), (1100, "fp8", torch.ones(()), False, True)]
    cases += [(700, "fp8", None, True, True), (1100, "fp8", torch.ones(()), True, False)]
    if dtype == torch.float32:
        cases.append((3, "none", None, False, True))
    sequence_parallel = RsNormAg(workspace)
    with comm_compiled.only(sm) as launched:
        for tokens, quant, scale, keep, unscaled in cases:
            x = torch.zeros(tokens, 4096, dtype=dtype)
            output = Unscaled(x, torch.ones(tokens, 1), torch.ones(4096)) if unscaled else x
            *outputs, residual = sequence_parallel.all_reduce_norm(output, ResidualRmsNorm(x, x[0], 1e-5, quant, scale, keep))
            assert [out.dtype for out in outputs] == comm_compiled.outputs_of(dtype, quant, scale, keep)
            again = sequence_parallel.all_reduce_norm(output, ResidualRmsNorm(residual, x[0], 1e-5, quant, scale, keep))
            assert isinstance(again[-1], ShardedResidual)
            assert len(list(rank_rows(tokens, again[-1].chunk_rows, 0, world))) == 1
    assert {name for name, _, _ in launched} == {"rs_norm_ag"}
    if dtype == torch.float32:
        assert comm_compiled.fused(launched[0]) == comm_compiled.fused(launched[-1]), "a part is rounded before it is added up"
    for _, grid, kernel in launched:
        per_sm, ptx = -(-grid[0] // NUM_SMS), kernel.asm["ptx"]
        assert kernel.metadata.shared * per_sm <= 200 << 10
        assert per_sm == 1 or f".maxnreg {kernel.metadata.maxnreg}" in ptx
        assert ("griddepcontrol.wait" in ptx) == (sm >= 90)
