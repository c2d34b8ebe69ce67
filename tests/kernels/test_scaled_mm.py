# SPDX-License-Identifier: Apache-2.0
"""Products in FP8 against the formula."""

from __future__ import annotations

import pytest
import torch

from phalanx import kernels
from phalanx.kernels import reference
from phalanx.kernels.scaled_mm import FP8, Quantized, has_fp8_products, quantizing_mm


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_rows_and_columns(static: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 32), torch.randn(48, 32)
    quantized = Quantized(*kernels.quantize_fp8(x, torch.tensor(0.01) if static else None))
    stored, scale = kernels.quantize_fp8(weight)
    out = kernels.scaled_mm(quantized, stored, scale.squeeze(-1), dtype=dtype)
    expected = (quantized.values.double() * quantized.scale.double()) @ (stored.double() * scale.double()).t()
    assert out.dtype == dtype
    assert quantized.shape == (5, 32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    torch.testing.assert_close(expected, x.double() @ weight.double().t(), rtol=0, atol=1.5)
    into = torch.empty_like(out)
    assert kernels.scaled_mm(quantized, stored, scale.squeeze(-1), dtype=dtype, out=into) is into
    assert torch.equal(into, out)


@pytest.mark.parametrize("begin", [0, 5, 15])
def test_dequantize_by_block_begins_within_one(begin: int) -> None:
    stored, scale = torch.randn(3, 40).to(FP8), torch.rand(3, 4)
    wide = kernels.dequantize(stored, scale, torch.float32, block=16, begin=begin)
    for column in range(40):
        assert torch.equal(wide[:, column], stored[:, column].float() * scale[:, (begin + column) // 16])


@pytest.mark.parametrize("scale", [None, torch.tensor(0.02)])
def test_silu_mul_quant_is_silu_mul_then_quant(scale: torch.Tensor | None) -> None:
    gate_up = torch.randn(7, 64)
    fused = kernels.silu_mul_quant_fp8(gate_up, scale)
    values, found = reference.quantize_fp8(reference.silu_mul(gate_up), scale)
    assert torch.equal(fused.values.float(), values.float())
    assert torch.equal(fused.scale, found)


def test_a_cpu_has_no_fp8_products() -> None:
    assert not has_fp8_products(torch.device("cpu"))


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "inputs", "out"),
    [(1, 128, 64), (1, 7168, 8192), (3, 4096, 1280), (17, 336, 208), (64, 8192, 2560), (513, 1024, 2048)],
)
def test_on_gpu(static: bool, dtype: torch.dtype, tokens: int, inputs: int, out: int) -> None:
    device = torch.device("cuda")
    if not has_fp8_products(device):
        pytest.skip("this GPU has no FP8 products")
    x, weight = torch.randn(tokens, inputs, device=device), torch.randn(out, inputs, device=device)
    quantized = Quantized(*kernels.quantize_fp8(x, torch.tensor(0.01, device=device) if static else None))
    stored, scale = kernels.quantize_fp8(weight)
    scale = scale.squeeze(-1)
    expected = reference.scaled_mm(quantized.values, quantized.scale, stored, scale, torch.float32)
    for into in (None, torch.empty(tokens, out, dtype=dtype, device=device)):
        found = kernels.scaled_mm(quantized, stored, scale, dtype=dtype, out=into)
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2 * inputs**0.5)


@pytest.mark.parametrize("scale", [None, torch.tensor(0.02)])
def test_quantizing_mm_is_quantize_then_product(scale: torch.Tensor | None) -> None:
    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    stored, columns = kernels.quantize_fp8(weight)
    wanted = kernels.scaled_mm(Quantized(*kernels.quantize_fp8(x, scale)), stored, columns.flatten(), dtype=torch.float32)
    assert torch.equal(quantizing_mm(x, scale, stored, columns.flatten(), dtype=torch.float32), wanted)


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("inputs", [2048, 3584, 8192])
def test_one_row_quantized_by_its_product_on_gpu(static: bool, inputs: int) -> None:
    device = torch.device("cuda")
    if not has_fp8_products(device):
        pytest.skip("this GPU has no FP8 products")
    x = torch.randn(1, inputs, device=device, dtype=torch.bfloat16)
    stored, columns = kernels.quantize_fp8(torch.randn(2048, inputs, device=device))
    scale = torch.tensor(0.01, device=device) if static else None
    wanted = kernels.scaled_mm(Quantized(*kernels.quantize_fp8(x, scale)), stored, columns.flatten(), dtype=x.dtype)
    assert torch.equal(quantizing_mm(x, scale, stored, columns.flatten(), dtype=x.dtype), wanted)
