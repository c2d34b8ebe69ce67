# SPDX-License-Identifier: Apache-2.0
"""Where a GEMM writes its rows: every row once, where the kernel reads it; and the kernel compiles."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.sequence_parallel import ShardedResidual, rank_rows
from phalanx.comm.sequence_parallel.gemm_rs import GemmRs, gathered_rows_fit, scatter_targets
from phalanx.comm.strategies import symmetric_strategies
from phalanx.comm.symmetric import (
    REDUCE_SCATTER_LIMIT_BYTES,
    ReduceScatterBuffer,
    SymmetricWorkspace,
    half_bytes,
    reduce_scatter_bytes,
    reduce_scatter_capacity,
)
from phalanx.tables.strategy import Strategy
from tests.support.comm_workspace import NUM_SMS, space

META = torch.device("meta")
Request = tuple[int, int, int, torch.dtype, int]


def buffer_of(rank: int, world: int, message_bytes: int) -> tuple[ReduceScatterBuffer, list[Request]]:
    """An empty buffer, and the calls of its `peer_tensor`."""
    requests: list[Request] = []

    def peer_tensor(*wanted: int) -> torch.Tensor:
        requests.append(wanted)  # type: ignore[arg-type]
        return torch.empty(wanted[1:3], dtype=wanted[3], device=META)  # type: ignore[arg-type]

    call: Callable[..., torch.Tensor] = peer_tensor
    local, capacity = torch.zeros(4, dtype=torch.int32), reduce_scatter_capacity(world, message_bytes)
    return ReduceScatterBuffer(rank, world, capacity, message_bytes, local, (0,) * world, call), requests


@given(
    st.integers(1, 20_000), st.sampled_from([16, 1008, 5120, 8192]), st.integers(2, 8),
    st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_every_row_is_written_once_where_its_rank_reads_it(tokens: int, hidden: int, world: int, dtype: torch.dtype) -> None:
    row = hidden * dtype.itemsize
    longest = 8192 * row
    for rank in range(world):
        buffer, requests = buffer_of(rank, world, longest)
        targets = scatter_targets(tokens, hidden, dtype, buffer)
        depth = -(-tokens // world)
        few = tokens <= depth * (world - 1)
        if few or world * depth * row > buffer.capacity:
            assert targets is None
            continue
        assert targets is not None
        peers = [request[0] for request in requests]
        assert peers == [*range(rank + 1, world), *range(rank + 1)], "each rank begins with another peer, and ends with itself"
        for (rows, out), (peer, count, columns, kind, before) in zip(targets, requests, strict=True):
            (own,) = rank_rows(tokens, tokens, peer, world)
            assert (rows.start, rows.stop) == (own.start, own.stop)
            assert out.shape == (count, columns) == (len(own), hidden)
            assert kind == dtype
            assert before == rank * depth * row, "the kernel reads parts by rank, each as long as the longest"
            assert before + count * row <= buffer.capacity


@given(st.integers(0, 1 << 29), st.integers(1, 8))
def test_a_buffer_holds_every_message_or_there_is_none(message_bytes: int, world: int) -> None:
    capacity, size = reduce_scatter_capacity(world, message_bytes), reduce_scatter_bytes(world, message_bytes)
    assert (capacity > 0) == (size > 0) == (world > 1 and message_bytes <= REDUCE_SCATTER_LIMIT_BYTES)
    if capacity:
        row = 65536  # of the widest model
        assert message_bytes + world * row <= capacity < message_bytes + world * row + 4096
        assert capacity + 16 * world <= size, "flags lie behind"


def test_targets_are_made_once_for_a_size() -> None:
    buffer, requests = buffer_of(1, 2, 8192 * 8192 * 2)
    gemm_rs = GemmRs(space(2, 8192 * 8192 * 2), buffer)

    def fusion(tokens: int, quant: str = "fp8", hidden: int = 8192, *, keep_norm: bool = False) -> ResidualRmsNorm:
        like = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=META)
        return ResidualRmsNorm(like, like[0], 1e-5, quant, keep_norm=keep_norm)  # type: ignore[arg-type]

    first = gemm_rs.targets(8192, 8192, fusion(8192))
    assert first is not None
    assert gemm_rs.targets(8192, 8192, fusion(8192)) is first
    assert len(requests) == 2
    assert gemm_rs.targets(2048, 8192, fusion(2048)) is not None
    assert gemm_rs.targets(1, 8192, fusion(1)) is None, "the last rank would have no rows"
    assert gemm_rs.targets(16384, 8192, fusion(16384)) is None, "the buffer is too small"
    for tokens in (8192, 4096):
        assert gemm_rs.targets(tokens, 8192, fusion(tokens, "none")) is None, "the longest norms in 16 bit have no room"
        assert gemm_rs.targets(tokens, 8192, fusion(tokens, keep_norm=True)) is None, "which are sent where they are kept, too"
        assert GemmRs(space(2, 8192 * 8192 * 2), buffer, sweeps=True).targets(2048, 8192, fusion(2048, "none")) is not None
    shorter = GemmRs(space(2, 4096 * 8192 * 2), buffer_of(1, 2, 4096 * 8192 * 2)[0])
    assert shorter.targets(4096, 8192, fusion(4096, "none")) is not None
    assert Strategy.GEMM_RS not in symmetric_strategies(space(2, 1 << 20)), "without a buffer"
    assert symmetric_strategies(space(2, 1 << 20), buffer)[Strategy.GEMM_RS].gemm_rs is not None


@given(st.integers(1, 10_000), st.sampled_from([16, 5120, 8192]), st.integers(2, 8), st.integers(1, 2))
def test_gathered_rows_fit_half_a_workspace(tokens: int, hidden: int, world: int, itemsize: int) -> None:
    nothing = torch.zeros(2, dtype=torch.int32)
    workspace = SymmetricWorkspace(
        0, world, (0,) * world, half_bytes(world, 8192 * hidden * 2) // 16, nothing, nothing, NUM_SMS, 90
    )

    def end(rows: int) -> int:
        """Of the scales behind them, as the kernel has them."""
        words_at = rows * (hidden * itemsize // 16) * 16
        return words_at + 4 * rows

    most = bisect.bisect_right(range(1 << 30), 16 * workspace.half, key=end) - 1
    for rows in (tokens, most, most + 1):
        assert gathered_rows_fit(rows, hidden * itemsize, workspace) == (rows <= most)


def test_another_sharding_is_refused() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    buffer, _ = buffer_of(0, 2, 32 << 20)
    with pytest.raises(ValueError, match="by 3 rows"):
        GemmRs(space(2, 1 << 20), buffer).all_reduce_norm(ResidualRmsNorm(ShardedResidual.of(x, 3), x[0], 1e-5))


@pytest.mark.parametrize(("sm", "world"), [(80, 2), (90, 8), (100, 3)])
def test_kernels_compile(sm: int, world: int) -> None:
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    workspace, dtype = comm_compiled.workspace(world, sm), comm_compiled.DTYPES[sm]
    buffer, _ = buffer_of(world - 1, world, 32 << 20)
    gemm_rs = GemmRs(workspace, buffer)
    with comm_compiled.only(sm) as launched:
        cases = ((700, "none", None, False), (4100, "fp8", None, False), (1100, "fp8", torch.ones(()), False))
        for tokens, quant, scale, keep in (*cases, (4100, "fp8", None, True), (1100, "fp8", torch.ones(()), True)):
            x = torch.zeros(tokens, 4096, dtype=dtype)
            *outputs, residual = gemm_rs.all_reduce_norm(ResidualRmsNorm(x, x[0], 1e-5, quant, scale, keep))  # type: ignore[arg-type]
            assert [out.dtype for out in outputs] == comm_compiled.outputs_of(dtype, quant, scale, keep)
            again = gemm_rs.all_reduce_norm(ResidualRmsNorm(residual, x[0], 1e-5, quant, scale, keep))  # type: ignore[arg-type]
            assert isinstance(again[-1], ShardedResidual)
            assert len(list(rank_rows(tokens, again[-1].chunk_rows, 0, world))) == 1
    assert {name for name, _, _ in launched} == {"gemm_rs_norm_ag"}
    assert len({kernel.hash for _, _, kernel in launched}) == 5, "a kernel is compiled for what it does, not for a number of tokens"
    for _, grid, kernel in launched:
        per_sm, ptx = -(-grid[0] // NUM_SMS), kernel.asm["ptx"]
        assert kernel.metadata.shared * per_sm <= 200 << 10
        assert per_sm == 1 or f".maxnreg {kernel.metadata.maxnreg}" in ptx
        assert ptx.count("ld.acquire.sys") == ptx.count("fence.acq_rel.sys") == world - 1
        assert ("griddepcontrol.wait" in ptx) == (sm >= 90)
