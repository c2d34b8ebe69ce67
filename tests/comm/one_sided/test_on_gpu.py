# SPDX-License-Identifier: Apache-2.0
"""The launches of the one-sided exchange: how large its memory is, and that its kernels compile. That they are right,
`tests.comm.one_sided` shows in the interpreter and `test_exchange_gpu` on GPUs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.one_sided.on_gpu import LIMIT_BYTES, GpuOneSided, RegionSizes, header_vectors
from phalanx.comm.symmetric import SymmetricRegion
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import FP8, Quantized

NUM_SMS = 132


@given(st.integers(2, 8), st.integers(1, 1 << 20), st.sampled_from([4096, 8192, 14336, 32768]), st.integers(1, 16))
def test_memory_stays_within_its_limit(world: int, rows: int, row_bytes: int, top_k: int) -> None:
    sizes = RegionSizes.of(world, rows, row_bytes, top_k)
    assert 0 < sizes.rows <= rows
    assert sizes.total <= LIMIT_BYTES
    assert sizes.half >= (world - 1) * sizes.rows * (16 * header_vectors(top_k) + row_bytes)
    assert sizes.sums >= (world - 1) * sizes.rows * row_bytes
    assert sizes.half % 16 == sizes.sums % 16 == 0
    assert sizes.rows == rows or RegionSizes.of(world, sizes.rows + 1, row_bytes, top_k, 1 << 40).total > LIMIT_BYTES


def exchange(world: int, sm: int, hidden: int, top_k: int, itemsize: int) -> GpuOneSided:
    addresses = tuple(0x7F00_0000_0000 + rank * (1 << 32) for rank in range(world))
    region = SymmetricRegion(world - 1, world, addresses, torch.zeros(2, dtype=torch.int32), NUM_SMS, sm)
    return GpuOneSided(region, RegionSizes.of(world, 256, hidden * itemsize, top_k))


@pytest.mark.parametrize(
    ("sm", "world", "dtype", "hidden", "top_k"),
    [
        (80, 2, torch.float16, 4096, 2), (90, 2, torch.bfloat16, 4096, 2), (90, 4, torch.bfloat16, 2048, 8),
        (90, 8, torch.bfloat16, 7168, 8), (100, 3, torch.float32, 7168, 8),
    ],
)  # fmt: skip
def test_kernels_compile(sm: int, world: int, dtype: torch.dtype, hidden: int, top_k: int) -> None:
    pytest.importorskip("triton")
    from tests.support import comm_compiled

    ranks, rows = exchange(world, sm, hidden, top_k, dtype.itemsize), 200
    x, blocks = torch.zeros(rows - 1, hidden, dtype=dtype), hidden // 128
    scales = [torch.ones(()), torch.ones(rows - 1, 1), torch.ones(blocks, rows - 1).t()]
    with comm_compiled.only(sm) as launches:
        for count in (8, rows):
            routing = Routing(torch.ones(rows - 1, top_k), torch.zeros(rows - 1, top_k, dtype=torch.int32))
            values, received = ranks.dispatch(x, routing, rows, 256)
            assert isinstance(values, torch.Tensor)
            assert (values.shape, values.dtype) == ((world * rows, hidden), dtype)
            for scale in scales:
                quantized, _ = ranks.dispatch(Quantized(x.to(FP8), scale), routing, rows, 256)
                assert isinstance(quantized, Quantized)
                assert quantized.scale.shape == ((world * rows, scale.shape[1]) if scale.dim() else ())
            sums = torch.zeros(world * count, hidden, dtype=dtype)
            few = Routing(received.weights[: world * count], received.ids[: world * count])
            assert ranks.combine(sums, Routing(routing.weights[:count], routing.ids[:count]), few, 256).dtype == dtype
    assert {name for name, _, _ in launches} == {"dispatch", "combine"}
    for _, (programs,), kernel in launches:
        assert 0 < programs <= NUM_SMS * (2 if kernel.metadata.num_warps == 8 else 4), "all programs run at once"
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (sm >= 90)
        assert "local" not in kernel.asm["ptx"].split(".reg")[0]
        # One vector to a thread, and none to two: both would read, clear and send it.
        layouts = [line for line in kernel.asm["ttgir"].splitlines() if "#ttg.blocked" in line and " = " in line]
        assert layouts
        assert all("sizePerThread = [1]" in line for line in layouts), layouts
