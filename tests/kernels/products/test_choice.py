# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies: one row, few rows, many rows, or torch."""

from __future__ import annotations

import pytest

from phalanx.kernels.products import choice
from phalanx.kernels.products.choice import FewRows, OneRow, shared_columns


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168), (128256, 4096), (64, 128)]
)
def test_by_tokens(outputs: int, inputs: int) -> None:
    assert isinstance(choice.fp8(1, outputs, inputs), OneRow)
    assert isinstance(choice.sixteen(1, outputs, inputs), OneRow)
    for tokens in (2, 16, choice.FEW_FP8):
        tiling = choice.fp8(tokens, outputs, inputs)
        assert isinstance(tiling, FewRows)
        # A dot of the kernel takes powers of two, and its stages must fit into Hopper's 227 KiB of shared memory.
        padded = max(16, 1 << (tokens - 1).bit_length())
        assert tiling.stages * tiling.block * (tiling.rows + padded) <= 227 << 10
        assert tiling.rows & (tiling.rows - 1) == tiling.block & (tiling.block - 1) == tiling.ahead & (tiling.ahead - 1) == 0
        assert -(-outputs // tiling.rows) < 1 << 16  # counters
    assert choice.fp8(0, outputs, inputs) is choice.sixteen(0, outputs, inputs) is None
    assert choice.fp8(100_000, outputs, inputs) is choice.sixteen(100_000, outputs, inputs) is None


def test_columns_are_shared_evenly() -> None:
    assert shared_columns(2560, 8192, 64, 256, 264) == 8  # 40 tiles
    assert shared_columns(14336, 8192, 64, 256, 264) == 2  # 224
    assert shared_columns(57344, 8192, 64, 256, 264) == 1
    assert shared_columns(8192, 7168, 64, 256, 396) == 4  # 28 blocks: 3 would leave some idle
    assert shared_columns(64, 1280, 64, 256, 264) == 5  # as many as there are
