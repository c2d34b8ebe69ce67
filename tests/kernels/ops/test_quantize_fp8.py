# SPDX-License-Identifier: Apache-2.0
"""Rows in e4m3: in Triton's interpreter against the reference bit for bit, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import FILLED, filled_memory, interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_rows() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import quantize_fp8

    for dtype, (tokens, width) in itertools.product(DTYPES, [(1, 16), (3, 100), (2, 2100), (0, 8), (4101, 40)]):
        x = (torch.randn(tokens, width) * 3).to(dtype)
        x[:1, :4] = torch.tensor([0.0, -1e-4, 300.0, -300.0])
        for scale in (None, torch.tensor(0.02)):
            quantized, scales = quantize_fp8.quantize_fp8(x, scale)
            wanted, wanted_scales = reference.quantize_fp8(x, scale)
            assert torch.equal(scales, wanted_scales)
            assert torch.equal(quantized.view(torch.uint8), wanted.view(torch.uint8))


def check_a_row_of_zeros() -> None:
    from phalanx.kernels.ops import quantize_fp8

    values, scales = quantize_fp8.quantize_fp8(torch.zeros(2, 64))
    assert not values.float().any()
    assert (scales > 0).all()


def check_only_so_many_rows() -> None:
    """Those behind are neither read, where they hold no numbers, nor written."""
    from phalanx.kernels import reference
    from phalanx.kernels.ops import quantize_fp8

    for rows, count in ((5, 3), (4100, 1025), (4100, 1024), (4100, 0)):
        x = torch.randn(rows, 64)
        x[count:] = float("nan")
        counts = torch.tensor([9, count], dtype=torch.int32)
        with filled_memory():
            quantized, scales = quantize_fp8.quantize_fp8(x, counts=counts)
        wanted, wanted_scales = reference.quantize_fp8(x[:count])
        assert torch.equal(quantized[:count].view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales[:count], wanted_scales)
        assert (quantized[count:].float() == FILLED).all()
        assert (scales[count:] == FILLED).all()


CHECKS = [check_rows, check_a_row_of_zeros, check_only_so_many_rows]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("counted", [False, True])
def test_compiles(arch: int, counted: bool) -> None:
    from phalanx.kernels.ops import quantize_fp8

    kinds = {"x": "*bf16", "out": "*u8", "scales": "*fp32", "counts": "*i32", "width": "i32"}
    constants = {"STATIC": False, "BLOCK": 8192} | ({} if counted else {"counts": None})
    compiled(quantize_fp8._quantize_fp8, kinds, constants, arch)
    short = constants | {"ROWS": 8, "BLOCK": 512}
    compiled(quantize_fp8._quantize_short_rows, kinds | {"count": "i32"}, short, arch)


@pytest.mark.gpu1
@pytest.mark.parametrize(("rows", "width"), [(5, 1000), (5, 8192), (5, 53248), (5000, 384), (5000, 1024)])
def test_on_gpu(rows: int, width: int) -> None:
    from phalanx import kernels
    from phalanx.kernels import reference

    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    quantized, scales = kernels.quantize_fp8(x)
    wanted, wanted_scales = reference.quantize_fp8(x.cpu())
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(quantized.cpu().view(torch.uint8), wanted.view(torch.uint8))
