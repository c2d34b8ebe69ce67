# SPDX-License-Identifier: Apache-2.0
"""Scales after a product: in Triton's interpreter against the formula, and compiled for three generations of GPUs."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.reference import Unscaled
from tests.kernels.compiled import compiled
from tests.kernels.interpreted import interpreted

pytest.importorskip("triton")


def check() -> None:
    from phalanx.kernels.products.scale_sums import scale_sums

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, width in ((1, 8), (3, 100), (2, 2100), (0, 8)):
            sums = Unscaled((torch.randn(tokens, width) * 1e3).to(dtype), torch.rand(tokens, 1), torch.rand(width))
            wanted = sums.wide().to(dtype)
            assert scale_sums(sums) is sums.values
            assert torch.equal(sums.values, wanted)


def test_in_the_interpreter() -> None:
    assert interpreted("tests.kernels.products.test_scale_sums").strip() == "checked"


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    from phalanx.kernels.products import scale_sums

    kinds = {"sums": "*bf16", "rows": "*fp32", "columns": "*fp32", "width": "i32"}
    compiled(scale_sums._scale_sums, kinds, {"BLOCK": scale_sums.PIECE}, arch)


if __name__ == "__main__":
    torch.manual_seed(0)
    check()
    print("checked")
