# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up, and its quantization: in Triton's interpreter against the reference, and compiled for three generations of GPUs.

The interpreter is chosen when a kernel is defined, so what runs in it runs in a process of its own.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from phalanx.kernels.scaled_tensors import Unscaled
from tests.support.kernels_compiled import by_generation, compiled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_silu_mul() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import silu_and_mul

    for dtype, (tokens, width) in itertools.product(DTYPES, [(1, 64), (3, 100), (2, 2100), (0, 8)]):
        gate_up = (torch.randn(tokens, 2 * width) * 3).to(dtype)
        # Two roundings: where exp() differs in its last bit, either may fall on the other side.
        step = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(silu_and_mul.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=step, atol=1e-6)
        for scale in (None, torch.tensor(0.02)):
            quantized, scales = silu_and_mul.silu_mul_quant_fp8(gate_up, scale)
            wanted, wanted_scales = reference.silu_mul_quant_fp8(gate_up, scale)
            assert quantized.dtype == torch.float8_e4m3fn
            torch.testing.assert_close(scales, wanted_scales, rtol=step, atol=0)
            near = (quantized.float() - wanted.float()).abs() <= wanted.float().abs() / 8 + 2.0**-9
            assert near.all()
            assert (quantized.float() == wanted.float()).float().mean() > 0.98 if tokens else True


def unscaled(values: torch.Tensor) -> Unscaled:
    """The values as an unscaled GEMM output, a thousand times as large."""
    tokens, width = values.shape
    return Unscaled((values.float() * 1e3).to(values.dtype), torch.rand(tokens, 1) / 500, torch.rand(width) + 0.5)


def check_silu_mul_of_an_unscaled_output() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import silu_and_mul

    for dtype, (tokens, width) in itertools.product((torch.bfloat16, torch.float32), [(3, 100), (2, 2100), (0, 8)]):
        output, eps = unscaled((torch.randn(tokens, 2 * width) * 3).to(dtype)), torch.finfo(dtype).eps
        torch.testing.assert_close(silu_and_mul.silu_mul(output), reference.silu_mul(output), rtol=max(eps, 1e-6), atol=1e-6)
        finished = reference.silu_mul(output.to_fp32().to(dtype))
        torch.testing.assert_close(silu_and_mul.silu_mul(output), finished, rtol=6 * eps, atol=1e-3 * eps**0.5)
        for scale in (None, torch.tensor(0.02)):
            quantized, scales = silu_and_mul.silu_mul_quant_fp8(output, scale)
            wanted, wanted_scales = reference.silu_mul_quant_fp8(output, scale)
            torch.testing.assert_close(scales, wanted_scales, rtol=max(eps, 1e-6), atol=0)
            assert ((quantized.float() - wanted.float()).abs() <= wanted.float().abs() / 8 + 2.0**-9).all()
            assert (quantized.float() == wanted.float()).float().mean() > 0.98 if tokens else True


def check_gelu() -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.ops import silu_and_mul

    for dtype, (tokens, width) in itertools.product(DTYPES, [(3, 100), (2, 2100)]):
        gate_up, step = (torch.randn(tokens, 2 * width) * 3).to(dtype), 2 * torch.finfo(dtype).eps
        wanted = reference.silu_mul(gate_up, gelu=True)
        torch.testing.assert_close(silu_and_mul.silu_mul(gate_up, gelu=True), wanted, rtol=max(step, 1e-5), atol=2e-6)
        quantized, scales = silu_and_mul.silu_mul_quant_fp8(gate_up, gelu=True)
        torch.testing.assert_close(scales, reference.silu_mul_quant_fp8(gate_up, gelu=True)[1], rtol=max(step, 1e-5), atol=0)
        assert ((quantized.float() * scales - wanted.float()).abs() <= wanted.float().abs() / 8 + scales).all()
    output = unscaled(torch.randn(3, 200) * 3)
    wanted = reference.silu_mul(output, gelu=True)
    torch.testing.assert_close(silu_and_mul.silu_mul(output, gelu=True), wanted, rtol=1e-5, atol=2e-6)
    assert (silu_and_mul.silu_mul(torch.tensor([[-1e30, -40.0, 1.0, 1.0]]), gelu=True) == 0).all()


def check_where_exp_overflows() -> None:
    from phalanx.kernels.ops import silu_and_mul

    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 1e30, 1.0, -1.0]])
    output = silu_and_mul.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(output, torch.nn.functional.silu(gate))


def check_a_row_of_zeros_quantizes() -> None:
    from phalanx.kernels.ops import silu_and_mul

    values, scales = silu_and_mul.silu_mul_quant_fp8(torch.zeros(2, 64))
    assert (values.float() == 0).all()
    assert (scales > 0).all()


CHECKS = [
    check_silu_mul, check_silu_mul_of_an_unscaled_output, check_gelu, check_where_exp_overflows, check_a_row_of_zeros_quantizes,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


VARIANTS = [*itertools.product(("silu_mul", "silu_mul_quant_fp8", "silu_mul_static_fp8"), (False, True)), ("gelu_mul", True)]
"""Function, and whether it applies scales."""
WAYS = {("silu_mul", True), ("silu_mul_quant_fp8", True), ("silu_mul_static_fp8", False)}


@pytest.mark.parametrize(("variant", "arch"), by_generation(VARIANTS, WAYS))
def test_compiles(variant: tuple[str, bool], arch: int) -> None:
    """Down to machine code. The launch's own choices (PDL from Hopper on, the FP8 conversion from Ada on) compile with it."""
    from phalanx.kernels.ops import silu_and_mul

    kernel, unscaled = variant
    signature, constants = {"gate_up": "*bf16", "width": "i32"}, {"GELU": kernel == "gelu_mul"}
    if kernel in ("silu_mul", "gelu_mul"):
        function = silu_and_mul._silu_mul
        signature["out"], constants["BLOCK"] = "*bf16", 2048
    else:
        function = silu_and_mul._silu_mul_quant_fp8
        signature |= {"out": "*u8", "scales": "*fp32"}
        constants |= {"STATIC": "static" in kernel, "BLOCK": 16384}
    if unscaled:
        signature |= {"rows": "*fp32", "columns": "*fp32"}
    else:
        constants |= {"rows": None, "columns": None}
    ptx = compiled(function, signature, constants, arch).asm["ptx"]
    if arch >= 89 and kernel == "silu_mul_static_fp8":
        assert "min.NaN." in ptx, "clipped to +-448, and NaN stays NaN"
