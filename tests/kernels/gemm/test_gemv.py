# SPDX-License-Identifier: Apache-2.0
"""GEMV in 16 and 32 bit: in Triton's interpreter against the reference, and compiled for three generations of GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels_compiled import compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def check() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.gemm.gemv import gemv

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for outputs, inputs, block in ((1, 8, 64), (7, 200, 64), (33, 128, 64), (5, 1032, 1024)):
            x, weight = torch.randn(1, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
            wanted = reference.linear(x, weight)
            torch.testing.assert_close(
                gemv(x, weight, rows=4, block=block, warps=8), wanted, rtol=torch.finfo(dtype).eps, atol=1e-4
            )
            into = torch.full((1, outputs), float("nan"), dtype=dtype)
            assert gemv(x, weight, into, rows=4, block=block, warps=8) is into
            torch.testing.assert_close(into, wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)
            bias, in_fp32 = torch.randn(outputs).to(dtype), torch.full((1, outputs), float("nan"))
            gemv(x, weight, in_fp32, bias, rows=4, block=block, warps=8)
            torch.testing.assert_close(in_fp32, x.float() @ weight.float().t() + bias.float(), rtol=1e-5, atol=1e-4)


def test_in_the_interpreter() -> None:
    interpret([check])


@pytest.mark.parametrize(
    ("arch", "out", "bias"), [(80, "*bf16", False), (90, "*bf16", True), (90, "*fp32", False), (100, "*bf16", True)]
)
def test_compiles(arch: int, out: str, bias: bool) -> None:
    from phalanx.kernels.gemm import gemv

    kinds = {"x": "*bf16", "weight": "*bf16", "out": out, "rows": "i32"} | ({"bias": "*bf16"} if bias else {})
    constants = {"COLUMNS": 4096, "ROWS": 4, "BLOCK": 2048} | ({} if bias else {"bias": None})
    compiled(gemv._gemv, kinds, constants, arch)


def test_linear_on_a_cpu_is_torchs() -> None:
    from phalanx import kernels

    x, weight, bias = torch.randn(1, 8), torch.randn(5, 8), torch.randn(5)
    assert torch.equal(kernels.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    out = torch.empty(1, 5)
    assert kernels.linear(x, weight, out=out) is out
    torch.testing.assert_close(out, x @ weight.t())
