# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies: one row's own, or torch, with scales or for sums alone."""

from __future__ import annotations

import pytest

from phalanx.kernels.gemm import heuristics
from phalanx.kernels.gemm.heuristics import Cublas, GemvTiling


@pytest.mark.parametrize("inputs", [16, 128, 2048, 3584, 4096, 7168, 8192, 11008, 14336, 16384, 28672, 53248])
def test_one_row(inputs: int) -> None:
    for tiling, width in ((heuristics.select_fp8(1, 8192, inputs), 1), (heuristics.select_16bit(1, inputs), 2)):
        assert isinstance(tiling, GemvTiling)
        assert tiling.block & (tiling.block - 1) == tiling.rows & (tiling.rows - 1) == tiling.warps & (tiling.warps - 1) == 0
        # A thread keeps two tiles of the weight, the one it adds up and the one to come, within its 255 registers.
        assert 2 * tiling.rows * tiling.block * width / (tiling.warps * 32) <= 4 * 128


def test_rows_in_fp8_are_held_whole_where_they_can_be() -> None:
    for inputs in range(1024, 16385, 1024):
        tiling = heuristics.select_fp8(1, 8192, inputs, reader_scales=True)
        assert isinstance(tiling, GemvTiling)
        assert tiling.block >= inputs


def test_torch_has_the_rest() -> None:
    for tokens in (0, 2, 8192):
        assert heuristics.select_16bit(tokens, 2048) is None
    # (tokens, outputs, inputs): of 70B on four GPUs
    for tokens in (2, 64, 1024):
        assert heuristics.select_fp8(tokens, 2560, 8192, reader_scales=True) is Cublas.UNSCALED
    for tokens in (2, 255):
        assert heuristics.select_fp8(tokens, 8192, 7168) is Cublas.UNSCALED
    assert heuristics.select_fp8(64, 14336, 8192, reader_scales=True) is Cublas.UNSCALED
    for size, reads in (
        ((0, 2560, 8192), True), ((1025, 2560, 8192), True), ((65, 14336, 8192), True), ((256, 8192, 7168), False),
        ((8, 8192, 2048), False), ((8192, 8192, 7168), False),
    ):  # fmt: skip
        assert heuristics.select_fp8(*size, reader_scales=reads) is Cublas.SCALED


@pytest.mark.parametrize("outputs", [16, 48, 2560, 2576, 4096, 6144, 8192, 14336, 28672, 57344, 100_000])
@pytest.mark.parametrize("inputs", [16, 144, 2048, 2064, 8192, 14336])
def test_few_rows_give_every_program_as_much_and_a_multiprocessor(outputs: int, inputs: int) -> None:
    for processors in (132, 114, 78):
        for tokens in (2, 16, 17, 33, 48, 64):
            tiling = heuristics.select_fp8_skinny(tokens, outputs, inputs, processors)
            if tiling is None:
                assert outputs <= 64 * processors // 2
                assert tokens > 48
                assert outputs * inputs < heuristics.LARGE_WEIGHT
                continue
            along, deep = -(-outputs // tiling.rows), -(-inputs // 128)
            assert 0 < tiling.programs <= min(processors, along * deep)
            assert tiling.stages >= 4
            assert tiling.stages * (tiling.rows + heuristics.tile_tokens(tokens)) * 128 <= heuristics.TILE_BYTES
            if tiling.programs > along:  # a row of tiles for as many programs each
                assert tiling.programs % along == 0
            else:  # none is cut
                assert outputs > 64 * processors // 2 or deep == 1 or tiling.programs == along


def test_few_rows_of_70b() -> None:
    def programs(tokens: int, outputs: int, inputs: int) -> tuple[int, int] | None:
        found = heuristics.select_fp8_skinny(tokens, outputs, inputs, 132)
        return None if found is None else (found.rows, found.programs)

    assert programs(1, 8192, 4096) is programs(1, 5120, 8192) is programs(65, 8192, 8192) is None
    assert [programs(1, *size) for size in ((14336, 8192), (8192, 7168))] == [(128, 112), (64, 128)]
    assert [programs(tokens, 2560, 8192) for tokens in (16, 48, 64)] == [(128, 80), (64, 80), None]
    assert [programs(64, *size) for size in ((8192, 2048), (14336, 8192), (8192, 7168))] == [(64, 128), (128, 112), (64, 128)]
    assert programs(1, 8192, 14336) is None  # of two ranks: as fast by one row's kernels
    assert programs(64, 4096, 14336) == (64, 128)
    assert [programs(64, *size) for size in ((5120, 8192), (28672, 8192), (57344, 8192))] == [(64, 80), (128, 112), (128, 112)]


@pytest.mark.parametrize("inputs", [2048, 3584, 4096, 5120, 8192, 16384])
def test_pairs_of_one_token(inputs: int) -> None:
    for fp8 in (False, True):
        tiling = heuristics.select_fused_gemv(1, inputs, fp8=fp8)
        assert tiling is not None
        for size in tiling:
            assert size & (size - 1) == 0 < size
        assert 4 * tiling.pairs * tiling.block * (1 if fp8 else 2) / (tiling.warps * 32) <= 4 * 128
        assert heuristics.select_fused_gemv(2, inputs, fp8=fp8) is None
        assert (heuristics.select_fused_gemv(1, inputs, fp8=True, quantized=False) is None) == (inputs > heuristics.GEMV_QUANT_MAX_INPUTS)


def test_silu_joins_the_product_where_that_saves_a_launch() -> None:
    # Of 70B: on four GPUs the down product quantizes its input itself, on two a kernel would have to.
    assert not heuristics.fuses_silu(7168, down_is_fp8=True)
    assert heuristics.fuses_silu(14336, down_is_fp8=True)
    assert heuristics.fuses_silu(14336, down_is_fp8=False)
