# SPDX-License-Identifier: Apache-2.0
"""Scales after a GEMM: in Triton's interpreter against the formula, and compiled for three generations of GPUs."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.scaled_tensors import Unscaled
from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check() -> None:
    from phalanx.kernels.gemm.apply_scales import apply_scales

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, width in ((1, 8), (3, 100), (2, 2100), (0, 8)):
            sums = Unscaled((torch.randn(tokens, width) * 1e3).to(dtype), torch.rand(tokens, 1), torch.rand(width))
            wanted = sums.to_fp32().to(dtype)
            assert apply_scales(sums) is sums.values
            assert torch.equal(sums.values, wanted)


def test_in_the_interpreter() -> None:
    interpret([check])


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    from phalanx.kernels.gemm import apply_scales

    kinds = {"values": "*bf16", "rows": "*fp32", "columns": "*fp32", "width": "i32"}
    compiled(apply_scales._apply_scales, kinds, {"BLOCK": apply_scales.MAX_BLOCK}, arch)
