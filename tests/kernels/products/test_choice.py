# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies: one row's own, or torch."""

from __future__ import annotations

import pytest

from phalanx.kernels.products import choice


@pytest.mark.parametrize("inputs", [16, 128, 2048, 3584, 4096, 7168, 8192, 11008, 14336, 16384, 28672, 53248])
def test_one_row(inputs: int) -> None:
    for tiling, width in ((choice.fp8(1, inputs), 1), (choice.sixteen(1, inputs), 2)):
        assert tiling is not None
        assert tiling.block & (tiling.block - 1) == tiling.rows & (tiling.rows - 1) == tiling.warps & (tiling.warps - 1) == 0
        # A thread keeps two tiles of the weight, the one it adds up and the one to come, within its 255 registers.
        assert 2 * tiling.rows * tiling.block * width / (tiling.warps * 32) <= 4 * 128


def test_rows_in_fp8_are_held_whole_where_they_can_be() -> None:
    for inputs in range(1024, 16385, 1024):
        tiling = choice.fp8(1, inputs)
        assert tiling is not None
        assert tiling.block >= inputs


@pytest.mark.parametrize("tokens", [0, 2, 8192])
def test_torch_has_the_rest(tokens: int) -> None:
    assert choice.fp8(tokens, 2048) is None
    assert choice.sixteen(tokens, 2048) is None
